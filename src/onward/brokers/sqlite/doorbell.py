"""The doorbell: readers sleep until something was committed, in this process or another.

A ring is a hint and nothing more. Whoever waits takes the count before looking into the database, so a ring between
the look and the wait is not lost; and waits are bounded, so a lost ring costs latency, never an event.
"""

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
from pathlib import Path

_POLL_S = 0.01  # where there is no inotify
_IN_ATTRIB = 0x4


class Doorbell:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = _inotify(path)
        self._lock = threading.Lock()
        self._count = 0
        self._stamp = _stamp(path)
        self._waiters: dict[asyncio.AbstractEventLoop, set[asyncio.Future[None]]] = {}
        self._polling: set[asyncio.AbstractEventLoop] = set()

    def listen(self) -> int:
        """How often it rang until now. Take this before looking, and hand it to `wait`."""
        self._absorb()
        return self._count

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Return when it rang since `seen` was taken, or after the time."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiters.setdefault(loop, set()).add(waiter)
        self._attend(loop)
        timer = loop.call_later(max(0.0, timeout_s), _wake, waiter)
        try:
            if self.listen() == seen:
                await waiter
        finally:
            timer.cancel()
            self._leave(loop, waiter)

    def nudge(self) -> None:
        """Ring for this process only. Any thread may call it."""
        with self._lock:
            self._count += 1
            loops = list(self._waiters)
        for loop in loops:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there
                loop.call_soon_threadsafe(self._wake_all, loop)

    def close(self) -> None:
        with self._lock:
            loops = list(self._waiters)
            fd, self._fd = self._fd, None
        self.nudge()
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

    def _leave(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiters[loop]
            waiting.discard(waiter)
            if waiting:
                return
            del self._waiters[loop]
        # Nobody listens on this loop: a busy consumer is not woken for every commit.
        if self._fd is not None:
            loop.remove_reader(self._fd)

    def _absorb(self) -> None:
        if self._fd is None:
            stamp = _stamp(self._path)
            rang, self._stamp = stamp != self._stamp, stamp
        else:
            try:
                rang = bool(os.read(self._fd, 4096))  # equal events are merged by the kernel: one is waiting at most
            except BlockingIOError:
                rang = False
        if rang:
            self.nudge()

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        self._absorb()
        if self._waiters.get(loop):
            loop.call_later(_POLL_S, self._poll, loop)
        else:
            self._polling.discard(loop)

    def _wake_all(self, loop: asyncio.AbstractEventLoop) -> None:
        for waiter in tuple(self._waiters.get(loop, ())):
            _wake(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


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
