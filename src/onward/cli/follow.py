"""Reads a subscription in order, shows it, and settles what was shown."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from onward import clock
from onward.brokers.base import Assigned, Fenced, Message, Moved, Progress, Reached, Revoked, Subscription
from onward.event import Delivery, Event, Partition

_BATCH = 500
_BATCH_BYTES = 8 << 20
_WAIT_S = 1.0
_SETTLE_S = 1.0  # longer would delay retention, shorter would write for every event
_MOST_FRESH = 5_000

Answer = TypeVar("Answer")


class EventScreen(Protocol):
    @property
    def full(self) -> bool:
        """It shows no more events."""

    def show(self, event: Event) -> None: ...

    def flush(self) -> None:
        """Raises BrokenPipeError if the reader of our output has closed it, also when there is nothing to write."""


async def follow(subscription: Subscription, screen: EventScreen, stop: asyncio.Event) -> None:
    """Show events until `stop` is set or the screen is full. Then settle what was shown, and release the partitions."""
    reading = ReadPlaces()
    settle_at = clock.now() + _SETTLE_S
    while not screen.full:
        messages = await _unless(stop, subscription.receive(_BATCH, _BATCH_BYTES, _WAIT_S))
        if messages is None:
            break
        revoked = reading.take(messages, screen)
        screen.flush()
        if revoked or clock.now() >= settle_at or reading.fresh >= _MOST_FRESH:
            await _settle(subscription, reading)
            settle_at = clock.now() + _SETTLE_S
        if revoked:
            await _release(subscription, reading, revoked)
    await _settle(subscription, reading)
    await _release(subscription, reading, reading.partitions)


async def _settle(subscription: Subscription, reading: "ReadPlaces") -> None:
    if progress := reading.progress():
        reading.settled(await subscription.settle(progress))


async def _release(subscription: Subscription, reading: "ReadPlaces", partitions: Sequence[Partition]) -> None:
    if partitions:
        await subscription.release(partitions, drained=True)
        reading.forget(partitions)


class ReadPlaces:
    """How far each partition was read. Events are shown in order, one at a time, so a watermark is enough."""

    def __init__(self) -> None:
        self.fresh = 0  # positions read and not settled
        self._open: dict[Partition, _Open] = {}

    @property
    def partitions(self) -> list[Partition]:
        return list(self._open)

    def take(self, messages: Sequence[Message], screen: EventScreen) -> list[Partition]:
        """Show the events until the screen is full. Returns the partitions that we must release."""
        revoked: list[Partition] = []
        for message in messages:
            if screen.full:
                break
            match message:
                case Delivery():
                    if self._read(message):
                        screen.show(message.event)
                case Assigned():
                    self._open[message.partition] = _Open(message.epoch)
                case Reached() if message.partition in self._open:
                    self._open[message.partition].watermark = message.position
                case Revoked():
                    revoked += message.partitions
                case Fenced():
                    self.forget(message.partitions)
                case Reached() | Moved():
                    pass
        return revoked

    def _read(self, delivery: Delivery) -> bool:
        place = self._open.get(delivery.partition)
        if place is None or place.epoch != delivery.epoch:
            return False  # we lost the partition; its new owner shows the event
        place.watermark = delivery.position + 1
        place.fresh.append(delivery.position)
        self.fresh += 1
        return True

    def progress(self) -> list[Progress]:
        return [
            Progress(partition, place.epoch, place.watermark, fresh=tuple(place.fresh))
            for partition, place in self._open.items()
            if place.watermark is not None
        ]

    def settled(self, lost: Sequence[Partition]) -> None:
        self.forget(lost)
        for place in self._open.values():
            place.watermark = None
            place.fresh.clear()
        self.fresh = 0

    def forget(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self._open.pop(partition, None)


class _Open:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.watermark: int | None = None  # None: nothing since the last settle
        self.fresh: list[int] = []


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, Answer]) -> Answer | None:
    """Return what the work returns. If `stop` is set first, cancel the work and return None."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait([working, stopping])
    return None if working.cancelled() else working.result()
