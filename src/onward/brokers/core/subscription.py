"""The base of a subscription: the receive loop, pause and resume, sure_until, close. A broker adds settle, release, lag
and how to leave."""

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from onward import clock
from onward.brokers.base import Message, Start
from onward.brokers.core.holdings import Holdings
from onward.errors import BadSetting, Closed, OnwardError
from onward.event import Partition

T = TypeVar("T")

_LOOK_S = 1.0  # look at least this often, in case a ring of the bell was lost
_UNSURE_LOOK_S = 0.1  # while ownership is uncertain, look again after this time


def check_start(start: Start) -> None:
    """Raise BadSetting if a group cannot start there."""
    if not isinstance(start, int | float) and start not in ("earliest", "latest"):
        raise BadSetting(f"start={start!r}: use earliest, latest or a Unix time")


class Keeper(Protocol):
    """Keeps a member in its group, such as a lease manager."""

    @property
    def group(self) -> str: ...

    @property
    def sure_until(self) -> float:
        """The time until which this member is surely in the group, so that no other member gets its partitions."""

    @property
    def failure(self) -> OnwardError | None:
        """Why this member can never receive again. None if it can."""

    @property
    def troubles(self) -> Sequence[str]:
        """Why some of the group's events are not delivered."""

    def polled(self) -> None:
        """Called with every receive. If the calls stop, the membership may end."""


class SubscriptionShell(Generic[T]):
    def __init__(self, keeper: Keeper, holdings: Holdings[T], *, look_s: float = _LOOK_S) -> None:
        self._keeper = keeper
        self._holdings = holdings
        self._look_s = look_s
        self._closing: asyncio.Future[None] | None = None

    async def receive(self, limit: int, max_bytes: int, wait_s: float) -> Sequence[Message]:
        if self._holdings.closed:
            raise Closed(f"the subscription of group {self._keeper.group} is closed")
        holdings, bell = self._holdings, self._holdings.bell
        end = clock.now() + wait_s
        while not self.is_closed:
            self._keeper.polled()
            rung = bell.listen()
            await self._read(limit, max_bytes)
            now = clock.now()
            sure = now < self.sure_until()
            messages = holdings.collect(limit, max_bytes, now, sure=sure)
            self._collected(now, sure=sure)
            if messages:
                return messages
            if (failure := self._keeper.failure) is not None:
                raise failure
            if now >= end:
                return messages
            look_at = holdings.ripe_at() if sure else now + _UNSURE_LOOK_S
            await bell.wait(rung, min(end, look_at, now + self._look_s) - now)
        return []

    async def _read(self, limit: int, max_bytes: int) -> None:
        """Read events for a receive of this size. A broker whose own thread reads need not override it."""

    def _collected(self, now: float, *, sure: bool) -> None:
        """Called after a receive has collected its messages, for brokers that act on deadlines or uncertainty."""

    def troubles(self) -> Sequence[str]:
        return self._keeper.troubles

    def sure_until(self) -> float:
        holdings = self._holdings
        with holdings.lock:
            if holdings.closed or holdings.has_unreported_loss:
                return 0.0
            # After the deadline of a release, the broker may free the partition before our memory follows.
            return min(self._keeper.sure_until, holdings.deadline)

    async def pause(self, partitions: Sequence[Partition]) -> None:
        self._holdings.set_paused(partitions, paused=True)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        self._holdings.set_paused(partitions, paused=False)

    @property
    def is_closed(self) -> bool:
        return self._holdings.closed

    async def close(self) -> None:
        if self._closing is None:
            self._holdings.close()
            self._closing = asyncio.ensure_future(self._leave())
        await asyncio.shield(self._closing)

    async def _leave(self) -> None:
        """Leave the group in bounded time, and end all threads and tasks of this subscription."""
        raise NotImplementedError
