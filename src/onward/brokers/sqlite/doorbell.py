"""The doorbell: readers wait until something was committed, in this process or another.

A committing process rings by setting the times of a file. The lock file rings for every process. Each member of this
process has a bell of its own beside it. A ring of another process arrives by inotify, or by polling. A lost ring costs
latency, never an event: waits are bounded.
"""

import asyncio
import contextlib
import ctypes
import os
import sys
from pathlib import Path

from onward.brokers.core.bell import Bell

_POLL_S = 0.01  # where there is no inotify
_IN_ATTRIB = 0x4
_READ_BYTES = 1 << 16  # 4,096 rings


class Doorbell(Bell):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = _inotify()
        self._stamps: dict[Path, int] = {}  # of the files to poll
        self._polling: set[asyncio.AbstractEventLoop] = set()
        if self._fd is not None and not self.watch(path):  # out of watches (fs.inotify.max_user_watches)
            os.close(self._fd)
            self._fd = None
        if self._fd is None:
            self.watch(path)

    def watch(self, path: Path) -> bool:
        """Hear rings of this file too. False: the system has no watch left."""
        with self._lock:
            if self._fd is not None:
                return int(_libc().inotify_add_watch(self._fd, os.fsencode(path), _IN_ATTRIB)) >= 0
            self._stamps[path] = _stamp(path)
            return True

    def unwatch(self, path: Path) -> None:
        """The file is gone, and with it the kernel's own watch."""
        with self._lock:
            self._stamps.pop(path, None)

    def listen(self) -> int:
        self._absorb()
        return super().listen()

    def close(self) -> None:
        with self._lock:
            loops = list(self._waiters)
            fd, self._fd = self._fd, None
        self.ring()
        if fd is not None:
            for loop in loops:
                with contextlib.suppress(RuntimeError):
                    loop.remove_reader(fd)
            os.close(fd)

    def _attend(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._fd is not None:
            loop.add_reader(self._fd, self._absorb)
        elif loop not in self._polling:
            self._polling.add(loop)
            loop.call_later(_POLL_S, self._poll, loop)

    def _depart(self, loop: asyncio.AbstractEventLoop) -> None:
        # Nothing waits on this loop: a busy consumer is not woken for every commit.
        if self._fd is not None:
            loop.remove_reader(self._fd)

    def _absorb(self) -> None:
        if self._fd is None:
            rang = self._has_new_stamps()
        else:
            try:
                rang = bool(os.read(self._fd, _READ_BYTES))  # all that wait; what is left beyond rings again
            except BlockingIOError:
                rang = False
        if rang:
            self.ring()

    def _has_new_stamps(self) -> bool:
        with self._lock:
            found = {path: _stamp(path) for path in self._stamps}
            rang, self._stamps = found != self._stamps, found
        return rang

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        self._absorb()
        if self._waiters.get(loop):
            loop.call_later(_POLL_S, self._poll, loop)
        else:
            self._polling.discard(loop)


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
