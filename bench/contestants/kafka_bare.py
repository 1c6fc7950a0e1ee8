"""The limit on Kafka: a bare `consume(1000)` loop that decodes and calls the handler, without order, retry or owner."""

import time
from collections.abc import Awaitable, Callable

import msgspec
from confluent_kafka import Consumer

from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import Order, burn

STUCK_S = 30.0


def run(servers: str, topic: str, group: str, events: int, loops: int = 0) -> Ran:
    """With `loops` the handler computes that long."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    lap = Lap(events)

    async def handle(order: Order) -> None:
        if loops:
            burn(loops)
        lap.saw(order.customer, order.number)

    try:
        looped(_read(consumer, lap, handle))
    finally:
        consumer.close()  # commits too
    return lap.ran()


async def _read(consumer: Consumer, lap: Lap, handle: Callable[[Order], Awaitable[None]]) -> None:
    orders = msgspec.json.Decoder(Order)
    received_at = time.monotonic()
    while not lap.is_over and time.monotonic() < received_at + STUCK_S:
        messages = consumer.consume(1_000, 0.1)
        received_at = time.monotonic() if messages else received_at
        for message in messages:
            value = message.value()
            if message.error() is None and value is not None:
                await handle(orders.decode(value))
