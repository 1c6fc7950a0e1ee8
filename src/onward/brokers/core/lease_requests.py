"""What a subscription asks of the next turn of its leases, which another thread takes."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Generic, TypeVar

from onward.brokers.core.bell import resolve
from onward.brokers.core.holdings import Hold

T = TypeVar("T")

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Requests(Generic[T]):
    """What the subscription asked of the next turn. The holdings' lock guards it."""

    def __init__(self) -> None:
        self.asked: dict[Hold[T], bool] = {}  # by ownership: a later one of the same partition was not meant
        self.waiters: list[Waiter] = []
        self.retiring = False  # it released unasked: it keeps what it has, claims nothing and counts no more
        self.leaving = False

    def taken(self) -> "Requests[T]":
        """A copy, for a turn."""
        copy: Requests[T] = Requests()
        copy.asked, copy.waiters = dict(self.asked), list(self.waiters)
        copy.retiring, copy.leaving = self.retiring, self.leaving
        return copy

    def done(self, taken: "Requests[T]") -> None:
        """A turn has done these; others may have come since."""
        for hold in taken.asked:
            self.asked.pop(hold, None)
        self.waiters = [waiter for waiter in self.waiters if waiter not in taken.waiters]


def answer(waiters: Sequence[Waiter]) -> None:
    for loop, future in waiters:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits there
            loop.call_soon_threadsafe(resolve, future)
