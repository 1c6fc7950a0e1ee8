"""FastStream on aiokafka, the faster of its two Kafka clients, at its best: no log lines, no dependency injection.

It commits by the clock, also what no handler has seen to its end. "batch" hands over lists, which is another contract.
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
    """The value as it is: its own decoder would try JSON, and then we would do it again."""
    return message.body
