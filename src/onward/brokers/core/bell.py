"""Wakes a waiting receive. Any thread can ring the bell."""

import asyncio
import contextlib
import threading


class Bell:
    """A bell with a counter. A ring is only a hint to look.

    A receiver reads the count, then looks, then waits for a higher count. So a ring between the look and the wait is
    not lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._waiters: dict[asyncio.AbstractEventLoop, set[asyncio.Future[None]]] = {}

    def listen(self) -> int:
        """How often the bell has rung. Call this before looking, and pass the result to `wait`."""
        return self._count

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Wait until the bell has rung more often than `seen`, or until the timeout."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiters.setdefault(loop, set()).add(waiter)
        self._attend(loop)
        timer = loop.call_later(max(0.0, timeout_s), resolve, waiter)
        try:
            if self.listen() == seen:
                await waiter
        finally:
            timer.cancel()
            self._leave(loop, waiter)

    def ring(self) -> None:
        """Wake all tasks of this process that wait."""
        with self._lock:
            self._count += 1
            loops = list(self._waiters)
        for loop in loops:
            if loop is _running_loop():
                self._wake_all(loop)
                continue
            with contextlib.suppress(RuntimeError):  # that loop is closed, so no task waits there
                loop.call_soon_threadsafe(self._wake_all, loop)

    def _attend(self, loop: asyncio.AbstractEventLoop) -> None:
        """A task of this loop starts to wait."""

    def _depart(self, loop: asyncio.AbstractEventLoop) -> None:
        """The last task of this loop has stopped waiting."""

    def _leave(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiters[loop]
            waiting.discard(waiter)
            if waiting:
                return
            del self._waiters[loop]
        self._depart(loop)

    def _wake_all(self, loop: asyncio.AbstractEventLoop) -> None:
        for waiter in tuple(self._waiters.get(loop, ())):
            resolve(waiter)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
