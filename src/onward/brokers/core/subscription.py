"""The shell of a subscription: the receive loop, pause and resume, certainty, close. A broker adds how it settles,
releases, asks for lag and leaves."""

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from onward import clock
from onward.brokers.base import Message, Start
from onward.brokers.core.holdings import Holdings
from onward.errors import BadSetting, Closed, OnwardError
from onward.event import Partition

T = TypeVar("T")

_LOOK_S = 1.0  # how long a lost ring of the bell may go unnoticed
_UNSURE_LOOK_S = 0.1  # how soon to look again whether ownership is certain


def check_start(start: Start) -> None:
    """BadSetting: a group cannot start there."""
    if not isinstance(start, int | float) and start not in ("earliest", "latest"):
        raise BadSetting(f"start={start!r}: use earliest, latest or a Unix time")


class Keeper(Protocol):
    """What keeps a member in its group."""

    @property
    def group(self) -> str: ...

    @property
    def sure_until(self) -> float:
        """Until then the broker gives none of our partitions to another member, as far as the membership goes."""

    @property
    def failure(self) -> OnwardError | None:
        """Why this member can never receive again."""

    @property
    def troubles(self) -> Sequence[str]:
        """Why some of the group's events are not delivered."""

    def polled(self) -> None:
        """Receive is being called, so the membership is worth keeping."""


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
        """Read ahead for a receive of this size; does nothing where a thread of the broker reads."""

    def _collected(self, now: float, *, sure: bool) -> None:
        """A receive has collected; for a broker that must act on deadlines or doubt."""

    def troubles(self) -> Sequence[str]:
        return self._keeper.troubles

    def sure_until(self) -> float:
        holdings = self._holdings
        with holdings.lock:
            if holdings.closed or holdings.has_unreported_loss:
                return 0.0
            # What should have been released by now may be free at the broker before memory follows.
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
        """Leave the group, in bounded time, and end what runs for this subscription."""
        raise NotImplementedError
