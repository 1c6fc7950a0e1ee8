"""`onward` as a user runs it: a process in a folder, and its output."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60.0  # how long a test waits for something that must happen; it goes on as soon as that happens


def until(seen: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until `seen` is true; fail if that takes too long."""
    deadline = time.monotonic() + patience_s
    while not seen():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Running or stopped. A zombie is not alive."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


class Running:
    """A started command. Its stdout and stderr go to files, so that it never waits for us to read."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process = process
        self._out = out
        self._err = err

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def saw(self, text: str, times: int = 1) -> None:
        """Wait until it has printed this."""

        def printed() -> bool:
            return self.out.count(text) + self.err.count(text) >= times

        try:
            until(printed, repr(text))
        except AssertionError as error:
            raise AssertionError(f"{error}\nstdout:\n{self.out}\nstderr:\n{self.err}") from None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, patience_s: float = PATIENCE_S) -> int:
        """Wait for its end. Returns the exit code, or minus the number of the signal that ended it."""
        return self.process.wait(patience_s)


class Shell:
    """A folder to run commands in. `close` kills commands that a failed test left running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("ONWARD_")}
        self._started: list[Running] = []

    @property
    def command(self) -> str:
        return shlex.join(_command(()))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            _command(arguments),
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def start(self, *arguments: str) -> Running:
        number = len(self._started)
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                _command(arguments), cwd=self.folder, env=self.environment, stdout=stdout, stderr=stderr
            )
        running = Running(process, out, err)
        self._started.append(running)
        return running

    def close(self) -> None:
        for running in self._started:
            running.process.kill()
            running.process.wait()


def _command(arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-P", "-m", "onward", *arguments]
