"""What others ask of the task that writes tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any

from onward.brokers.base import Progress


class WriteOrders:
    """All of it runs in one loop. `progress` is the latest that was asked for."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self._settles: list[asyncio.Future[bool]] = []
        self._ended: asyncio.Future[None] | None = None
        self._drained = False
        self._closed = False
        self._wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_ending(self) -> bool:
        return self._ended is not None

    @property
    def is_drained(self) -> bool:
        return self._drained

    @property
    def has_settles(self) -> bool:
        return bool(self._settles)

    async def settle(self, progress: Progress) -> bool:
        if self._closed or self.is_ending:
            return False
        self.progress = progress
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._settles.append(stored)
        self.wake()
        return await stored

    async def end(self, *, drained: bool) -> None:
        """Returns when the ownership has ended. The first call decides how."""
        self.begin_end(drained=drained)
        if self._ended is not None:
            await asyncio.wait([self._ended])

    def begin_end(self, *, drained: bool) -> None:
        """As `end`, but does not wait."""
        if self._ended is None and not self._closed:
            self._ended = asyncio.get_running_loop().create_future()
            self._drained = drained
            self.wake()

    def wake(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    async def wait(self, timeout_s: float, lost: "asyncio.Future[Any]") -> None:
        """Wait until something is asked for, the token is lost, or the time is over."""
        either: list[asyncio.Future[Any]] = [self._wake, lost]
        if timeout_s > 0:
            timeout = timeout_s if timeout_s < float("inf") else None
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._wake.done():
            self._wake = asyncio.get_running_loop().create_future()

    def taken(self) -> "list[asyncio.Future[bool]]":
        """The settles that the next write answers."""
        settles, self._settles = self._settles, []
        return settles

    def answer(self, settles: "Sequence[asyncio.Future[bool]]", *, stored: bool) -> None:
        for each in settles:
            if not each.done():
                each.set_result(stored)

    def fail(self) -> None:
        """The ownership has ended. Nothing that still waits was stored."""
        self._closed = True
        self.answer(self.taken(), stored=False)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
