"""The process of a worker, with three channels to it: the line (a socket), the leash (a pipe) and the status page."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]  # as multiprocessing does

from onward.clock import now
from onward.engines.processes import wire
from onward.engines.processes.line import Line

_BOOT = (
    "import sys; numbers = map(int, sys.argv[2:6]); sys.path[:] = sys.argv[6:]; "
    "from onward.engines.processes.child import main; main(*numbers)"
)
_PARENT_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class WorkerProcess:
    """Starts the process and owns its channels. Calls `readable` when the line has something to read."""

    def __init__(self, setup: wire.Setup, readable: Callable[[], None]) -> None:
        self.born = now()
        ours, theirs = socket.socketpair()
        leash, self._leash = os.pipe()
        page = wire.new_page()
        self.page = wire.StatusPage(page)
        self.line = Line(ours, readable)
        try:
            self._process = _spawn(setup.target, (theirs.fileno(), page, leash))
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(leash)
            os.close(page)
        self.line.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def pull_leash(self, order: wire.Order) -> None:
        """Send an order that the worker obeys even while the handler keeps its main thread busy."""
        with contextlib.suppress(OSError):  # the worker is dead, and reading the line will show it
            os.write(self._leash, order)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def ended(self) -> bool:
        """Whether the process has ended. Reaps it."""
        return self._process.poll() is not None

    def ending(self) -> str:
        """How the process ended, as text for the log."""
        code = self._process.returncode
        if code is None:
            return "closed its socket"
        if code >= 0:
            return f"exited with {code}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"was killed by signal {-code}"

    def close(self) -> None:
        """Close the line, the leash and the page. A process that still runs ends when its leash closes."""
        self.line.close()
        if self._leash >= 0:
            os.close(self._leash)
            self._leash = -1
            self.page.close()


def _spawn(target: str, descriptors: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter. It blocks the signals meant for its parent until it can ignore them itself."""
    numbers = [str(number) for number in (*descriptors, os.getpid())]
    boot = ["-c", _BOOT, f"onward worker {target}", *numbers, *sys.path]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENT_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, *_args_from_interpreter_flags(), *boot], stdin=subprocess.DEVNULL, pass_fds=descriptors
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
