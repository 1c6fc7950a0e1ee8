"""What a subscription asks of the next turn of its leases. Another thread runs the turns."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Generic, TypeVar

from onward.brokers.core.bell import resolve
from onward.brokers.core.holdings import Hold

T = TypeVar("T")

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Requests(Generic[T]):
    """What the subscription asks of the next turn. The lock of the holdings guards it."""

    def __init__(self) -> None:
        self.asked: dict[Hold[T], bool] = {}  # by ownership, so that a later one of the same partition is not released
        self.waiters: list[Waiter] = []
        # It released partitions that were not revoked. It keeps its other partitions, claims none, and no longer
        # counts as a member.
        self.retiring = False
        self.leaving = False

    def taken(self) -> "Requests[T]":
        """A copy, for a turn."""
        copy: Requests[T] = Requests()
        copy.asked, copy.waiters = dict(self.asked), list(self.waiters)
        copy.retiring, copy.leaving = self.retiring, self.leaving
        return copy

    def done(self, taken: "Requests[T]") -> None:
        """Remove the requests that a turn has done. Newer ones stay."""
        for hold in taken.asked:
            self.asked.pop(hold, None)
        self.waiters = [waiter for waiter in self.waiters if waiter not in taken.waiters]


def answer(waiters: Sequence[Waiter]) -> None:
    for loop, future in waiters:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits there
            loop.call_soon_threadsafe(resolve, future)
