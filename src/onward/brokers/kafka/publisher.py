"""Publishing: calls queue up in the loop, a thread carries them out in windows, each awaited whole.

One window is under way at a time, so that what fails takes down what stands behind it before that is sent. Within a
window the courier sees to it.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError

from onward import clock
from onward.brokers.core.partitioner import partition_of
from onward.brokers.kafka.client import Client
from onward.brokers.kafka.courier import Courier
from onward.brokers.kafka.message import headers_of
from onward.brokers.kafka.parting import parted
from onward.brokers.kafka.window import BEHIND, LOST, OF_ONE, PURGED, Fate, Key, Outgoing, Window
from onward.errors import Backlogged, Closed, OnwardError, PublishError, TooLarge, Unserialisable
from onward.event import Event
from onward.settings import Settings

_WINDOW_EVENTS = 10_000
_WINDOW_BYTES = 16 << 20
_MOST_CAUSES = 5  # told in one error


class Parcel:
    """What is left of one publish call."""

    __slots__ = ("deadline", "failed", "future", "items", "size", "unsent")

    def __init__(self, items: Sequence[Outgoing], deadline: float, future: "asyncio.Future[None]") -> None:
        self.items: deque[Outgoing] = deque(items)  # not yet in a window
        self.unsent = len(items)  # not yet answered for
        self.size = sum([item.size for item in items])
        self.deadline = deadline
        self.future = future
        self.failed: list[Failed] = []


class Failed(NamedTuple):
    event: Event
    why: str
    unknown: bool


class Publisher:
    def __init__(self, client: Client, settings: Settings) -> None:
        self._settings = settings
        self._parcels: deque[Parcel] = deque()
        self._queued_bytes = 0
        self._spread = itertools.count()
        self._courier = Courier(client)
        self._busy = False
        self._closed = False
        self._idle: asyncio.Future[None] | None = None

    def pack(self, events: Sequence[Event], counts: Mapping[str, int]) -> list[Outgoing]:
        """PayloadError: nothing has been written."""
        try:
            return [self._outgoing(event, counts[event.topic]) for event in events]
        except (AttributeError, TypeError, ValueError) as error:
            raise Unserialisable(
                f"an event cannot be stored: {error}; value takes bytes, headers map str to str"
            ) from error

    def _outgoing(self, event: Event, partitions: int) -> Outgoing:
        size = event.size
        if size > self._settings.max_event_bytes:
            raise TooLarge(f"event {event.id} of {size} bytes exceeds max_event_bytes")
        if event.value is not None and not isinstance(event.value, bytes):
            raise TypeError(f"value of event {event.id} is {type(event.value).__name__}")
        if event.key is None:
            return Outgoing(event, next(self._spread) % partitions, None, headers_of(event), size)
        return Outgoing(event, partition_of(event.key, partitions), event.key.encode(), headers_of(event), size)

    def enter(self, items: Sequence[Outgoing]) -> "asyncio.Future[None]":
        """Done when all are accepted. Whoever cancels leaves them on their way: others may stand behind them."""
        if self._closed:
            raise Closed("the broker is closed")
        loop = asyncio.get_running_loop()
        parcel = Parcel(items, clock.now() + self._settings.publish_timeout_s, loop.create_future())
        if self._queued_bytes and self._queued_bytes + parcel.size > self._settings.max_outgoing_bytes:
            raise Backlogged(
                f"{self._queued_bytes} bytes wait to be published; slow down, or raise max_outgoing_bytes",
                refused=[item.event for item in items],
            )
        self._parcels.append(parcel)
        self._queued_bytes += parcel.size
        self._next_window(loop)
        return asyncio.shield(parcel.future)

    def warm(self) -> None:
        self._courier.warm()

    async def close(self) -> None:
        """Finish what was entered; what cannot be sent in its time is refused."""
        self._closed = True
        if self._busy:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        await parted(self._courier.close)

    def _next_window(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._busy or not self._parcels:
            return
        items: list[Outgoing] = []
        parcels: list[Parcel] = []  # beside the items
        room, deadline = _WINDOW_BYTES, self._parcels[0].deadline
        while self._parcels and room > 0 and len(items) < _WINDOW_EVENTS:
            parcel = self._parcels[0]
            while parcel.items and room > 0 and len(items) < _WINDOW_EVENTS:
                item = parcel.items.popleft()
                room -= item.size
                items.append(item)
                parcels.append(parcel)
            if not parcel.items:
                self._parcels.popleft()
                self._queued_bytes -= parcel.size
        self._busy = True
        self._courier.take(
            Window(items, deadline), lambda done: loop.call_soon_threadsafe(self._finished, done, parcels, loop)
        )

    def _finished(self, window: Window, parcels: Sequence[Parcel], loop: asyncio.AbstractEventLoop) -> None:
        self._busy = False
        failed: set[Key] = set()
        for at, (item, parcel) in enumerate(zip(window.items, parcels, strict=True)):
            fate = window.fates.get(at, LOST)
            parcel.unsent -= 1
            if fate is not None:
                parcel.failed.append(Failed(item.event, self._why(item.event, fate), fate.unknown))
                failed.add(item.lane)
        if failed:
            self._bring_down(failed)
        for parcel in dict.fromkeys(parcels):
            _answer(parcel)
        self._next_window(loop)
        if not self._busy and self._idle is not None:
            self._idle.set_result(None)

    def _why(self, event: Event, fate: Fate) -> str:
        if isinstance(fate.cause, str):
            return fate.cause
        if fate.code in PURGED:
            return f"no answer from Kafka in publish_timeout_s={self._settings.publish_timeout_s:g}; is it running?"
        if fate.code == KafkaError.MSG_SIZE_TOO_LARGE:
            return (
                f"event {event.id} of {event.size} bytes is more than topic {event.topic} takes; raise its "
                f"max.message.bytes, or publish less ({fate.cause.str()})"
            )
        return f"event {event.id}: {fate.cause.str()}" if fate.code in OF_ONE else str(fate.cause.str())

    def _bring_down(self, failed: set[Key]) -> None:
        """No event of a key that failed goes out, of the calls that have been entered."""
        failed = {key for key in failed if key[1] is not None}
        for parcel in tuple(self._parcels):
            kept: deque[Outgoing] = deque()
            for item in parcel.items:
                if item.lane in failed:
                    parcel.failed.append(Failed(item.event, str(BEHIND.cause), BEHIND.unknown))
                    parcel.unsent -= 1
                else:
                    kept.append(item)
            parcel.items = kept
            if not kept:
                self._parcels.remove(parcel)
                self._queued_bytes -= parcel.size
                _answer(parcel)


def _answer(parcel: Parcel) -> None:
    if parcel.unsent or parcel.future.done():
        return
    if not parcel.failed:
        parcel.future.set_result(None)
        return
    parcel.future.set_exception(_error(parcel.failed))
    parcel.future.exception()  # a caller that was cancelled does not look


def _error(failed: Iterable[Failed]) -> OnwardError:
    failed = list(failed)
    causes = list(dict.fromkeys(each.why for each in failed))
    more = [f"and {len(causes) - _MOST_CAUSES} causes more"] if len(causes) > _MOST_CAUSES else []
    return PublishError(
        f"Kafka: {len(failed)} events were not accepted: {', '.join([*causes[:_MOST_CAUSES], *more])}",
        refused=[each.event for each in failed if not each.unknown],
        unknown=[each.event for each in failed if each.unknown],
    )
