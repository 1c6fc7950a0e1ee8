"""Which process holds a lock file. Ours write a line into it; any other program is found in Linux's list of locks."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from onward.brokers.base import Holder

LINE_BYTES = 128
BLANK = b" " * (LINE_BYTES - 1) + b"\n"
_LOOKS = 3  # the lock may pass to another process while we look


class LockHolder(NamedTuple):
    """`named`: by its own line, if it is a process of ours. A killed process leaves its line behind: it is not believed
    when another process holds the lock."""

    pid: int | None  # None: unknown
    named: Holder | None = None

    def __str__(self) -> str:
        if self.named is not None:
            return str(self.named)
        if self.pid is None:
            return "another program, or a process in another container"
        return f"process {self.pid} ({_command(self.pid)}), which is not one of Onward's"


def find(path: Path) -> LockHolder | None:
    """Who holds the lock at this moment, or None. It takes the lock for a moment if nothing holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that try do not collide
    except BlockingIOError:
        return _found(fd)
    else:
        return None
    finally:
        os.close(fd)


def line(pid: int, since: float, program: str) -> bytes:
    return f"{pid} {since:.6f} {program}".encode()[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n"


def flock_pid(file: os.stat_result, locks: str) -> int | None:
    """The process that holds a flock on this file, by the text of /proc/locks; None if none is listed."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    found: dict[str, int] = {}
    for entry in locks.splitlines():
        fields = entry.split()  # 1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF; one that waits has -> after its number
        if len(fields) == 8 and fields[1] == "FLOCK":
            place, _, inode = fields[5].rpartition(":")
            if inode == str(file.st_ino):
                found[place] = int(fields[4])
    return found.get(device, next(iter(found.values()), None))  # btrfs lists another device than the file's


def _found(fd: int) -> LockHolder:
    holder = LockHolder(None)
    for _ in range(_LOOKS):
        named = _parsed(os.pread(fd, LINE_BYTES, 0))
        try:
            pid = flock_pid(os.fstat(fd), Path("/proc/locks").read_text())
        except OSError:  # not Linux: a line counts while its process is alive
            return LockHolder(None, named if named is not None and _is_alive(named.pid) else None)
        holder = LockHolder(pid, named if named is not None and named.pid == pid else None)
        if holder.named is not None:
            break
    return holder


def _parsed(text: bytes) -> Holder | None:
    fields = text.decode("utf-8", "replace").split(maxsplit=2)
    with contextlib.suppress(ValueError):  # a program of another kind wrote into it
        return Holder(int(fields[0]), float(fields[1]), fields[2].strip()) if len(fields) == 3 else None
    return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:  # it has ended and left the lock to a child
        return "already ended; a child of it has the lock"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
