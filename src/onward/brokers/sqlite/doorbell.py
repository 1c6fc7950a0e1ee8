"""The doorbell: readers wait until something was committed, in this process or another.

A ring of another process arrives by inotify, or by polling. A lost ring costs latency, never an event: waits are
bounded.
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


class Doorbell(Bell):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._fd = _inotify(path)
        self._stamp = _stamp(path)
        self._polling: set[asyncio.AbstractEventLoop] = set()

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
            stamp = _stamp(self._path)
            rang, self._stamp = stamp != self._stamp, stamp
        else:
            try:
                rang = bool(os.read(self._fd, 4096))  # the kernel merges equal events: at most one is waiting
            except BlockingIOError:
                rang = False
        if rang:
            self.ring()

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


def _inotify(path: Path) -> int | None:
    """A descriptor that is readable after the file's times were set; None where the system has no such thing."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:  # out of instances (fs.inotify.max_user_instances): polling does
        return None
    if libc.inotify_add_watch(fd, os.fsencode(path), _IN_ATTRIB) < 0:
        os.close(fd)
        return None
    return fd
