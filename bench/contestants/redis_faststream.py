"""FastStream on Redis streams at its best: a group, 1,000 entries a read, no log lines, no dependency injection.

It acknowledges each event after its handler. Each stream has a subscriber of its own, so the keys stay in order.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from faststream.redis import RedisBroker, StreamSub

from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import Item, Order

COUNT = 1_000
STUCK_S = 100.0


def fill(url: str, events: Iterable[tuple[str, Item]]) -> None:
    """Publish each event to its stream."""
    asyncio.run(_fill(url, events))


async def _fill(url: str, events: Iterable[tuple[str, Item]]) -> None:
    async with RedisBroker(url) as broker:
        for stream, (_, data) in events:
            await broker.publish(data, stream=stream)


def run(url: str, streams: Sequence[str], group: str, events: int) -> Ran:
    return looped(_run(url, streams, group, Lap(events)))


async def _run(url: str, streams: Sequence[str], group: str, lap: Lap) -> Ran:
    logging.disable(logging.CRITICAL)
    broker: Any = RedisBroker(url, apply_types=False, logger=None)  # type: ignore[arg-type]
    decode, over = msgspec.json.Decoder(Order).decode, asyncio.Event()

    async def handle(value: bytes) -> None:
        order = decode(value)
        if lap.saw(order.customer, order.number):
            over.set()

    for stream in streams:
        place = StreamSub(stream, group=group, consumer="bench", last_id="0", max_records=COUNT)
        broker.subscriber(stream=place, decoder=_undecoded)(handle)
    await broker.start()
    try:
        await asyncio.wait_for(over.wait(), STUCK_S)
    finally:
        await broker.stop()
    return lap.ran()


async def _undecoded(message: Any) -> Any:
    """Return the raw value. FastStream's own decoder would decode the JSON, and the handler would decode it again."""
    return message.body
