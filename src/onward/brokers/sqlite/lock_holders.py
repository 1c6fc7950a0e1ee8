"""Which process holds a lock file. A process of Onward writes a line into it. Others are in Linux's list of locks."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from onward.brokers.base import Holder

LINE_BYTES = 128
BLANK = b" " * (LINE_BYTES - 1) + b"\n"
_LOOKS = 3  # the lock may pass to another process while we look
_WRITE_LOCK = "120"  # the byte of -shm that SQLite locks while a transaction writes


class LockHolder(NamedTuple):
    """The process that holds the lock. `named` is what its line in the file says, if it is a process of Onward.

    A killed process leaves its line behind, so a line counts only if the process in it is the one that holds the lock.
    """

    pid: int | None  # None: unknown
    named: Holder | None = None

    def __str__(self) -> str:
        if self.named is not None:
            return str(self.named)
        if self.pid is None:
            return "another program, or a process in another container"
        return f"process {self.pid} ({_command(self.pid)}), which does not belong to Onward"


def find(path: Path) -> LockHolder | None:
    """The process that holds the lock now, or None. If the lock is free, this call takes it for a moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two callers do not report each other
    except BlockingIOError:
        return _found(fd)
    else:
        return None
    finally:
        os.close(fd)


def line(pid: int, since: float, program: str) -> bytes:
    return f"{pid} {since:.6f} {program}".encode()[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n"


def flock_pid(file: os.stat_result, locks: str) -> int | None:
    """The process that holds a flock on this file according to the text of /proc/locks. None if none is listed."""
    return _listed(file, locks, "FLOCK", "0")


def transaction_holder(database: Path) -> str:
    """The program whose transaction holds SQLite's write lock, as words for an error."""
    try:
        # Only stat: if we closed a descriptor of this file, the kernel would drop SQLite's locks of this process.
        pid = _listed(os.stat(f"{database}-shm"), Path("/proc/locks").read_text(), "POSIX", _WRITE_LOCK)
    except OSError:  # not Linux
        pid = None
    if pid == os.getpid():
        return "this process"
    return f"process {pid} ({_command(pid)})" if pid else "another program"


def _listed(file: os.stat_result, locks: str, kind: str, first: str) -> int | None:
    """The process that holds a lock of this kind on this file, from the byte `first` on."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    found: dict[str, int] = {}
    for entry in locks.splitlines():
        fields = entry.split()  # 1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF; of one that waits: 1: -> FLOCK ...
        if len(fields) == 8 and fields[1] == kind and fields[6] == first:
            place, _, inode = fields[5].rpartition(":")
            if inode == str(file.st_ino):
                found[place] = int(fields[4])
    return found.get(device, next(iter(found.values()), None))  # btrfs lists a different device than stat does


def _found(fd: int) -> LockHolder:
    holder = LockHolder(None)
    for _ in range(_LOOKS):
        named = _parsed(os.pread(fd, LINE_BYTES, 0))
        try:
            pid = flock_pid(os.fstat(fd), Path("/proc/locks").read_text())
        except OSError:  # not Linux: believe the line while its process is alive
            return LockHolder(None, named if named is not None and _is_alive(named.pid) else None)
        holder = LockHolder(pid, named if named is not None and named.pid == pid else None)
        if holder.named is not None:
            break
    return holder


def _parsed(text: bytes) -> Holder | None:
    fields = text.decode("utf-8", "replace").split(maxsplit=2)
    with contextlib.suppress(ValueError):  # another program wrote into the file
        return Holder(int(fields[0]), float(fields[1]), fields[2].strip()) if len(fields) == 3 else None
    return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:  # it has ended, and a forked child has inherited the lock
        return "already ended; a child process has inherited the lock"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
