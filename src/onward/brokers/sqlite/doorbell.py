"""The doorbell: how a process hears that something was committed, in this process or another.

A committing process rings by setting the times of a file. The lock file rings for every member, a member's own file for
that member alone. A ring arrives by inotify, or by polling. A lost ring costs latency, never an event: waits are
bounded.
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

_POLL_S = 0.01  # where there is no inotify
_IN_ATTRIB = 0x4
_RING = struct.Struct("iIII")  # watch, mask, cookie, length of a name; a watched file comes without its name
_READ_BYTES = 4_096 * _RING.size


class MemberBell(Bell):
    """What the receive of one subscription waits for."""

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
    """Hands the rings of the files on to the bells of this process's members."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._guard = threading.Lock()
        self._bells: weakref.WeakValueDictionary[Path, MemberBell] = weakref.WeakValueDictionary()
        self._waiting: dict[asyncio.AbstractEventLoop, set[MemberBell]] = {}
        self._watches: dict[int, Path] = {}
        self._stamps: dict[Path, int] = {}  # of the files to poll
        self._fd = _inotify()
        if not self.watch(lock):
            self.close()  # and poll
            self.watch(lock)

    def bell(self, path: Path) -> MemberBell:
        """A member's bell. It rings with the lock file, and with its own file once that is watched."""
        with self._guard:
            bell = self._bells[path] = MemberBell(self)
        return bell

    def watch(self, path: Path) -> bool:
        """False: the system has no watch left (fs.inotify.max_user_watches)."""
        with self._guard:
            if self._fd is None:
                self._stamps[path] = _stamp(path)
                return True
            watch: int = _libc().inotify_add_watch(self._fd, os.fsencode(path), _IN_ATTRIB)
            if watch >= 0:
                self._watches[watch] = path
            return watch >= 0

    def unwatch(self, path: Path) -> None:
        """The file is gone, and the kernel's watch with it."""
        with self._guard:
            self._stamps.pop(path, None)
            self._watches = {watch: watched for watch, watched in self._watches.items() if watched != path}

    def absorb(self) -> None:
        """Hand on what rang since the last time."""
        with self._guard:
            rang = self._polled() if self._fd is None else self._read(self._fd)
            everyone = self._lock in rang
            bells = [bell for path, bell in self._bells.items() if everyone or path in rang] if rang else ()
        for bell in bells:
            bell.ring()

    def attend(self, loop: asyncio.AbstractEventLoop, bell: MemberBell) -> None:
        """This bell is waited for on this loop."""
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
                # Nothing waits on this loop: a busy consumer is not woken for every commit.
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
        # A watch that is not known: too many rings waited, and some were lost.
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
    """A descriptor that is readable after a watched file's times were set; None where the system has no such thing."""
    if sys.platform != "linux":
        return None
    fd: int = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    return fd if fd >= 0 else None  # out of instances (fs.inotify.max_user_instances): polling does
