"""The lock file beside the database: who writes now, and the bell that wakes readers of other processes.

SQLite takes its own lock by sleeping and trying again, which is unfair and does not say who holds it. `flock` queues in
the kernel, and the holder's line names its process. The database stays correct without it.
"""

import contextlib
import fcntl
import math
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from onward import clock
from onward.brokers.base import Holder

_LINE_BYTES = 128
_BLANK = b" " * (_LINE_BYTES - 1) + b"\n"


class Gate:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._program = _program()
        _gates.add(self)

    @contextlib.contextmanager
    def held(self, patience_s: float = math.inf) -> Iterator[None]:
        """Wait for the lock, and hold it. TimeoutError after `patience_s`."""
        self._wait(patience_s)
        try:
            self._write(_line(os.getpid(), clock.now(), self._program))
            yield
        finally:
            self._write(_BLANK)
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _wait(self, patience_s: float) -> None:
        if patience_s == math.inf:
            return fcntl.flock(self._fd, fcntl.LOCK_EX)  # queues in the kernel, which is fair
        end = clock.now() + patience_s
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if clock.now() >= end:
                    raise TimeoutError(
                        f"the lock {self.path} is held by {self.holder() or 'a process that left no name'}"
                    ) from None
                time.sleep(0.01)

    def ring(self) -> None:
        """Wake every process that waits for news of this database."""
        with contextlib.suppress(OSError):  # not our file to touch: readers look by themselves every second
            os.utime(self._fd)

    def holder(self) -> Holder | None:
        with contextlib.suppress(OSError):  # closed meanwhile
            return _parsed(os.pread(self._fd, _LINE_BYTES, 0))
        return None

    def _write(self, line: bytes) -> None:
        # One write of a fixed length: a reader sees this line or the last one, and no file size changes.
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only its name is missing
            os.pwrite(self._fd, line, 0)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _close_in_child() -> None:
    for gate in list(_gates):
        gate.close()


# A forked child shares the lock with us: orphaned, it would hold it for ever after we were killed.
_gates: "weakref.WeakSet[Gate]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


def lock_path(database: Path) -> Path:
    return database.with_name(database.name + "-lock")


def lock_holder(database: str | os.PathLike[str]) -> Holder | None:
    """Who writes to the database at this moment, or None. It opens the lock file only, never the database."""
    try:
        fd = os.open(lock_path(Path(database).resolve()), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # A killed holder leaves its line behind, so the lock itself is tried. Shared: two that try do not collide.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _parsed(os.pread(fd, _LINE_BYTES, 0))
    else:
        return None
    finally:
        os.close(fd)


def _program() -> str:
    path = Path(sys.argv[0] if sys.argv else "")
    name = path.parent.name if path.name == "__main__.py" else path.name
    return name or "python"


def _line(pid: int, since: float, program: str) -> bytes:
    return f"{pid} {since:.6f} {program}".encode()[: _LINE_BYTES - 1].ljust(_LINE_BYTES - 1) + b"\n"


def _parsed(line: bytes) -> Holder | None:
    fields = line.decode("utf-8", "replace").split(maxsplit=2)
    return Holder(int(fields[0]), float(fields[1]), fields[2].strip()) if len(fields) == 3 else None
