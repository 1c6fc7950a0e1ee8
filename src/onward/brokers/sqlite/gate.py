"""The lock file beside the database. It queues the writers, names the current one, and can wake all readers.

For its own lock, SQLite sleeps and tries again. That is unfair, and SQLite does not tell which process holds the lock.
`flock` queues the writers in the kernel, and the writer puts a line with its name into the file. Correctness does not
depend on this file, because every writer also takes SQLite's own lock.
"""

import contextlib
import fcntl
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from onward import clock
from onward.brokers.base import Holder
from onward.brokers.sqlite import lock_holders
from onward.settings import FileMode

log = logging.getLogger("onward")

PRIVATE, BY_UMASK = 0o600, 0o666
_LOOK_EVERY_S = 0.1


class Gate:
    def __init__(self, path: Path, file_mode: FileMode = "private") -> None:
        self.path = path
        self._mode = PRIVATE if file_mode == "private" else BY_UMASK
        self._fd, self._file = self._opened()
        self._next = 0.0  # when to check again that the path still names our file
        self._holding = False
        self._program = _program()
        _gates.add(self)

    def _opened(self) -> tuple[int, tuple[int, int]]:
        """A descriptor, and the device and inode of its file."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
        found = os.fstat(fd)
        # A user who can read the file can lock it, and so stop every writer.
        if self._mode == PRIVATE and found.st_mode & 0o077 and found.st_uid == os.geteuid():
            os.fchmod(fd, PRIVATE)
        return fd, (found.st_dev, found.st_ino)

    @contextlib.contextmanager
    def held(self, patience_s: float = math.inf) -> Iterator[None]:
        """Wait for the lock and hold it. Raises TimeoutError after `patience_s`."""
        self._take(patience_s)
        try:
            self._holding = True
            self._write(lock_holders.line(os.getpid(), clock.now(), self._program))
            yield
        finally:
            self._write(lock_holders.BLANK)
            self._holding = False
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _take(self, patience_s: float) -> None:
        self._wait(patience_s)
        while not self._is_in_place():
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._reopen()
            self._wait(patience_s)

    def _wait(self, patience_s: float) -> None:
        if patience_s == math.inf:
            return fcntl.flock(self._fd, fcntl.LOCK_EX)  # the kernel queues the waiting processes, which is fair
        end = clock.now() + patience_s
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if clock.now() >= end:
                    raise TimeoutError(self.obstacle() or f"the lock {self.path} is busy") from None
                time.sleep(0.01)

    def _is_in_place(self) -> bool:
        """Whether the path still names the file that we have locked. Other processes lock the file at the path.

        It checks only now and then, because a stat makes the next write to the file slower. Between two checks
        SQLite's own lock is enough."""
        if (now := clock.now()) < self._next:
            return True
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        if (there.st_dev, there.st_ino) != self._file:
            return False
        self._next = now + _LOOK_EVERY_S
        return True

    def _reopen(self) -> None:
        what = f"the lock {self.path} was deleted or replaced while it was in use"
        try:
            opened = self._opened()
        except OSError as error:
            raise OSError(
                f"{what}, and cannot be opened again ({error}); delete what is at that path, then try again"
            ) from error
        log.warning(
            "%s; opened it again. Until you restart this process, its readers look for events only once a second", what
        )
        os.close(self._fd)
        self._fd, self._file = opened

    def ring(self) -> None:
        """Wake every process that waits for a commit to this database."""
        with contextlib.suppress(OSError):  # no permission: readers look for commits by themselves every second
            os.utime(self._fd)

    def obstacle(self) -> str:
        """Which other process holds the lock, and what the operator can do. "" if no other process holds it."""
        try:
            holder = None if self._holding else lock_holders.find(self.path)
        except OSError as error:
            return f"the lock {self.path} cannot be opened ({error}); correct its owner and mode"
        if holder is None:
            return ""
        cure = "continue or end that process" if holder.named else "end it"
        return f"the lock {self.path} is held by {holder}; {cure}"

    def _write(self, line: bytes) -> None:
        # One write of a fixed length: a reader sees either this line or the last one, and the file size stays the same.
        with contextlib.suppress(OSError):  # the disk is full: the lock works, but the file does not name its holder
            os.pwrite(self._fd, line, 0)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _close_in_child() -> None:
    for gate in list(_gates):
        gate.close()


# A forked child inherits the lock. If this process were killed, the child would hold the lock as long as it lives.
_gates: "weakref.WeakSet[Gate]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


def lock_path(database: Path) -> Path:
    return database.with_name(database.name + "-lock")


def lock_holder(database: str | os.PathLike[str]) -> Holder | None:
    """The process of Onward that writes to the database now, or None. It opens only the lock file, not the database."""
    found = lock_holders.find(lock_path(Path(database).resolve()))
    return None if found is None else found.named


def _program() -> str:
    path = Path(sys.argv[0] if sys.argv else "")
    name = path.parent.name if path.name == "__main__.py" else path.name
    return name or "python"
