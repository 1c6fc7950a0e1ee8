"""The doorbell: how a process notices a commit, in this process or another one.

After a commit, a process rings by setting the times of a file. The lock file rings for every member. A member's own
file rings only for that member. A ring arrives through inotify, or through polling. A lost ring costs latency but never
an event, because all waits are bounded.
"""

import asyncio
import contextlib
import ctypes
import os
import struct
import sys
import threading
import weakref
from pathlib import Path

from onward.brokers.core.bell import Bell

_POLL_S = 0.01  # on systems without inotify
_IN_ATTRIB = 0x4
_RING = struct.Struct("iIII")  # watch, mask, cookie, length of the name, which is 0 for a watched file
_READ_BYTES = 4_096 * _RING.size


class MemberBell(Bell):
    """The bell that `receive` of one subscription waits for."""

    def __init__(self, doorbell: "Doorbell") -> None:
        super().__init__()
        self._doorbell = doorbell

    def listen(self) -> int:
        self._doorbell.absorb()
        return super().listen()

    def _attend(self, loop: asyncio.AbstractEventLoop) -> None:
        self._doorbell.attend(loop, self)

    def _depart(self, loop: asyncio.AbstractEventLoop) -> None:
        self._doorbell.depart(loop, self)


class Doorbell:
    """Watches the files, and rings the bells of the members in this process."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._guard = threading.Lock()
        self._bells: weakref.WeakValueDictionary[Path, MemberBell] = weakref.WeakValueDictionary()
        self._waiting: dict[asyncio.AbstractEventLoop, set[MemberBell]] = {}
        self._watches: dict[int, Path] = {}
        self._stamps: dict[Path, int] = {}  # the times of the polled files
        self._fd = _inotify()
        if not self.watch(lock):
            self.close()  # and poll
            self.watch(lock)

    def bell(self, path: Path) -> MemberBell:
        """A member's bell. It rings when the lock file rings and, after `watch`, when its own file rings."""
        with self._guard:
            bell = self._bells[path] = MemberBell(self)
        return bell

    def watch(self, path: Path) -> bool:
        """Watch a file. False if the system has no free watch (fs.inotify.max_user_watches)."""
        with self._guard:
            if self._fd is None:
                self._stamps[path] = _stamp(path)
                return True
            watch: int = _libc().inotify_add_watch(self._fd, os.fsencode(path), _IN_ATTRIB)
            if watch >= 0:
                self._watches[watch] = path
            return watch >= 0

    def unwatch(self, path: Path) -> None:
        """Forget a file that is being removed. The kernel removes its watch together with the file."""
        with self._guard:
            self._stamps.pop(path, None)
            self._watches = {watch: watched for watch, watched in self._watches.items() if watched != path}

    def absorb(self) -> None:
        """Ring the bells whose files have rung since the last call."""
        with self._guard:
            rang = self._polled() if self._fd is None else self._read(self._fd)
            everyone = self._lock in rang
            bells = [bell for path, bell in self._bells.items() if everyone or path in rang] if rang else ()
        for bell in bells:
            bell.ring()

    def attend(self, loop: asyncio.AbstractEventLoop, bell: MemberBell) -> None:
        """A task of this loop starts to wait for this bell."""
        with self._guard:
            is_first = loop not in self._waiting
            self._waiting.setdefault(loop, set()).add(bell)
        if self._fd is not None:
            loop.add_reader(self._fd, self.absorb)
        elif is_first:
            loop.call_later(_POLL_S, self._poll, loop)

    def depart(self, loop: asyncio.AbstractEventLoop, bell: MemberBell) -> None:
        with self._guard:
            self._waiting[loop].discard(bell)
            if self._fd is not None and not self._waiting[loop]:
                # No task waits here, so the loop of a busy consumer need not wake up for every commit.
                loop.remove_reader(self._fd)
                del self._waiting[loop]

    def close(self) -> None:
        with self._guard:
            bells, loops = list(self._bells.values()), list(self._waiting)
            fd, self._fd = self._fd, None
        for bell in bells:
            bell.ring()
        if fd is not None:
            for loop in loops:
                with contextlib.suppress(RuntimeError):
                    loop.remove_reader(fd)
            os.close(fd)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        self.absorb()
        with self._guard:
            if self._waiting[loop]:
                loop.call_later(_POLL_S, self._poll, loop)
            else:
                del self._waiting[loop]

    def _read(self, fd: int) -> set[Path]:
        try:
            found = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return set()
        # An unknown watch means that the kernel's queue was full and rings were lost. So ring all bells.
        return {self._watches.get(watch, self._lock) for watch, *_ in _RING.iter_unpack(found)}

    def _polled(self) -> set[Path]:
        rang = {path for path, stamp in self._stamps.items() if _stamp(path) != stamp}
        self._stamps.update({path: _stamp(path) for path in rang})
        return rang


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _inotify() -> int | None:
    """A descriptor that becomes readable when the times of a watched file are set. None if there is no inotify."""
    if sys.platform != "linux":
        return None
    fd: int = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    return fd if fd >= 0 else None  # no free instance (fs.inotify.max_user_instances): poll instead
