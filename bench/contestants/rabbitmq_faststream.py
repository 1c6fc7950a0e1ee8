"""FastStream on RabbitMQ at its best: a quorum queue, a prefetch, no log lines, no dependency injection.

It acknowledges each message after its handler.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import msgspec
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue

from bench.amqp_frames import Outgoing, Wire, plain_properties, publish
from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import Item, Order

PREFETCH = 200
STUCK_S = 100.0


def fill(url: str, queue: str, items: Iterable[Item]) -> None:
    """Declare the queue as FastStream does, and publish plain JSON to it."""
    asyncio.run(_declare(url, queue))
    with Wire(url) as wire:
        properties = plain_properties({}, "bench", "order")
        publish(wire, [Outgoing("", queue, properties, data) for _, data in items])


async def _declare(url: str, queue: str) -> None:
    async with RabbitBroker(url) as broker:
        await broker.declare_queue(_quorum(queue))


def _quorum(queue: str) -> Any:
    return RabbitQueue(queue, queue_type=QueueType.QUORUM, durable=True)


def run(url: str, queue: str, events: int) -> Ran:
    return looped(_run(url, queue, Lap(events)))


async def _run(url: str, queue: str, lap: Lap) -> Ran:
    logging.disable(logging.CRITICAL)
    broker: Any = RabbitBroker(url, apply_types=False, logger=None, default_channel=Channel(prefetch_count=PREFETCH))
    decode, over = msgspec.json.Decoder(Order).decode, asyncio.Event()

    @broker.subscriber(_quorum(queue), decoder=_undecoded)  # type: ignore[untyped-decorator]
    async def handle(value: bytes) -> None:
        order = decode(value)
        if lap.saw(order.customer, order.number):
            over.set()

    await broker.start()
    try:
        await asyncio.wait_for(over.wait(), STUCK_S)
    finally:
        await broker.stop()
    return lap.ran()


async def _undecoded(message: Any) -> Any:
    """Return the raw value. FastStream's own decoder would decode the JSON, and the handler would decode it again."""
    return message.body
