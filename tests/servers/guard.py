"""The process between a test run and one of its servers, so that the server never outlives the run.

The test run holds a pipe to the guard. When the pipe closes, because the run closed it or died in any way, the guard
kills every process of the server and removes the server's folder. The guard is the subreaper of all processes that it
starts: it becomes the parent of processes that a server leaves behind (backends with their own session, daemons such as
epmd). So the guard's descendants are all processes of the server, whatever their user is.

Requests and replies are lines of JSON. The guard itself needs only the standard library.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
PARENT_CHECK_S = 0.5
FAREWELL_S = 2.0
KILL_S = 10.0


class Guard:
    """The test run's end of the pipe."""

    def __init__(self, folder: Path, *, farewell: signal.Signals) -> None:
        """Guard `folder`. At the end the main process gets the signal `farewell` and a moment before all is killed."""
        self._one_at_a_time = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-IS", __file__, str(folder), str(farewell.value)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the test run alone
        )

    def start(self, argv: Sequence[str], *, env: dict[str, str], user: str | None, log: Path) -> int:
        """Run `argv` in the folder, append its output to `log`, and return its process id."""
        return int(self._ask("start", argv=argv, env=env, user=user, log=str(log)))

    def exit_code(self, pid: int) -> int | None:
        """The exit code of the process that was started as `pid`, or None while it runs."""
        code = self._ask("exit_code", pid=pid)
        return None if code is None else int(code)

    def signal_all(self, number: signal.Signals) -> None:
        """Signal every process of the server."""
        self._ask("signal_all", number=number.value)

    def stop_all(self) -> None:
        """SIGSTOP every process of the server, and return when all of them are stopped."""
        self._ask("stop_all")

    def kill_all(self) -> None:
        """Kill -9 every process of the server, and return when all of them have ended."""
        self._ask("kill_all")

    def close(self) -> None:
        """End the server and remove its folder."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(FAREWELL_S + 2 * KILL_S)

    def _ask(self, verb: str, **values: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._one_at_a_time:
            self._process.stdin.write(json.dumps([verb, values]) + "\n")
            self._process.stdin.flush()
            reply = json.loads(self._process.stdout.readline() or '{"error": "the guard has ended"}')
        if "error" in reply:
            raise RuntimeError(f"the guard could not {verb} {values.get('argv', '')}: {reply['error']}")
        return reply["value"]


class Keeper:
    """The guard's end of the pipe: it starts processes, and finds all their descendants."""

    def __init__(self, folder: str, farewell: int) -> None:
        self.folder = folder
        self.farewell = farewell
        self.started: list[subprocess.Popen[bytes]] = []
        self.exit_codes: dict[int, int] = {}

    def start(self, *, argv: list[str], env: dict[str, str], user: str | None, log: str) -> int:
        with open(log, "ab") as output:
            process = subprocess.Popen(
                argv,
                cwd=self.folder,
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=[] if user else None,
            )
        self.started.append(process)
        self.exit_codes.pop(process.pid, None)  # of a former process with this id
        return process.pid

    def exit_code(self, *, pid: int) -> int | None:
        self.reap()
        return self.exit_codes.get(pid)

    def signal_all(self, *, number: int) -> None:
        """Signal the descendants, and then those that they forked meanwhile."""
        signalled: set[int] = set()
        while new := [pid for pid in descendants() if pid not in signalled]:
            signalled.update(new)
            send(new, number)

    def stop_all(self) -> None:
        """One thread of a process handles the signal. Until that thread runs, the others go on."""
        self.signal_all(number=signal.SIGSTOP)
        deadline = time.monotonic() + KILL_S
        while not all(map(is_stopped, descendants())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{descendants()} still run {KILL_S} s after SIGSTOP")
            time.sleep(0.005)

    def kill_all(self) -> None:
        deadline = time.monotonic() + KILL_S
        while self.reap():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{descendants()} still run {KILL_S} s after kill -9")
            send(descendants(), signal.SIGKILL)
            time.sleep(0.01)

    def end(self) -> None:
        """Send the farewell signal to the process started last, kill all, remove the folder."""
        pid = self.started[-1].pid if self.started else 0
        if self.farewell != signal.SIGKILL and pid in descendants():
            self.signal_all(number=signal.SIGCONT)
            send([pid], self.farewell)
            deadline = time.monotonic() + FAREWELL_S
            while self.exit_code(pid=pid) is None and time.monotonic() < deadline:
                time.sleep(0.01)
        self.kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def reap(self) -> bool:
        """Collect the exit codes of ended children. False: no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self.exit_codes[pid] = os.waitstatus_to_exitcode(status)


def descendants(root: int | None = None) -> list[int]:
    """The processes below `root` (this one), parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found = list(children.get(root or os.getpid(), []))
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def is_stopped(pid: int) -> bool:
    """Every thread of the process is stopped or has ended."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def requests() -> Iterator[bytes]:
    """The lines on stdin, until it closes or the parent has ended (a fork of the parent may hold the pipe open)."""
    parent, rest = os.getppid(), b""
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], PARENT_CHECK_S)[0]:
            chunk = os.read(sys.stdin.fileno(), 65536)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines


def reply(keeper: Keeper, request: bytes) -> dict[str, Any]:
    verb, values = json.loads(request)
    try:
        return {"value": getattr(keeper, verb)(**values)}
    except (OSError, LookupError) as error:
        return {"error": str(error)}


def main(folder: str, farewell: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = Keeper(folder, int(farewell))
    try:
        for request in requests():
            sys.stdout.write(json.dumps(reply(keeper, request)) + "\n")
            sys.stdout.flush()
    finally:
        keeper.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
