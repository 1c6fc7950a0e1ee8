"""FastStream on aiokafka, the faster of its two Kafka clients, at its best: no log lines, no dependency injection.

It commits at fixed times, also events whose handlers have not ended. With `batch` the handler gets lists of events,
which is a different contract.
"""

import asyncio
import logging
from typing import Any

import msgspec
from faststream.kafka import KafkaBroker

from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import Order

STUCK_S = 100.0


def run(servers: str, topic: str, group: str, events: int, batch: bool = False) -> Ran:
    return looped(_run(servers, topic, group, lap=Lap(events), batch=batch))


async def _run(servers: str, topic: str, group: str, *, lap: Lap, batch: bool) -> Ran:
    logging.disable(logging.CRITICAL)
    broker = KafkaBroker(servers, apply_types=False, logger=None)
    decode, over = msgspec.json.Decoder(Order).decode, asyncio.Event()

    async def one(value: bytes) -> None:
        order = decode(value)
        if lap.saw(order.customer, order.number):
            over.set()

    async def many(values: list[bytes]) -> None:
        for value in values:
            await one(value)

    options: dict[str, Any] = {"batch": True, "max_records": 1_000} if batch else {}
    subscriber = broker.subscriber(topic, group_id=group, auto_offset_reset="earliest", decoder=_undecoded, **options)
    subscriber(many if batch else one)
    await broker.start()
    try:
        await asyncio.wait_for(over.wait(), STUCK_S)
    finally:
        await broker.stop()
    return lap.ran()


async def _undecoded(message: Any) -> Any:
    """Return the raw value. FastStream's own decoder would decode the JSON, and the handler would decode it again."""
    return message.body
