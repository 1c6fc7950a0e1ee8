"""A real Kafka server of the tests, filled with the events that every contestant reads."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.servers.kafka import KafkaServer

from bench.workload import PARTITIONS, batches, items
from onward import Onward

KEYS = 2_000
VALUE_BYTES = 200
REQUEST_S = 30.0


@contextmanager
def kafka() -> Iterator[KafkaServer]:
    server = KafkaServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


def fill(server: KafkaServer, topic: str, events: int) -> str:
    """Create the topic with this many events: plain records without headers, as any program writes them."""
    admin = AdminClient({"bootstrap.servers": server.bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(REQUEST_S)
    producer = Producer(
        {
            "bootstrap.servers": server.bootstrap,
            "partitioner": "murmur2_random",
            "enable.idempotence": True,
            "linger.ms": 20,
            "queue.buffering.max.messages": 2_000_000,
        }
    )
    for key, value in items(events, keys=KEYS, value_bytes=VALUE_BYTES):
        producer.produce(topic, value, key)
    if left := producer.flush(REQUEST_S):
        raise RuntimeError(f"{left:,} events could not be written to Kafka")
    return topic


def fill_by_onward(server: KafkaServer, topic: str, events: int) -> str:
    """The same events, published by Onward: five headers each."""
    asyncio.run(_publish(server, topic, events))
    return topic


async def _publish(server: KafkaServer, topic: str, events: int) -> None:
    async with Onward(server.url, partitions=PARTITIONS) as app:
        for batch in batches(items(events, keys=KEYS, value_bytes=VALUE_BYTES), 1_000):
            await app.publish_many(topic, batch)


async def settled(server: KafkaServer, topic: str, group: str) -> int:
    """How many events the group has settled, as the broker stores it."""
    async with Onward(server.url) as app:
        groups = {info.group: info for info in await app.broker.groups(topic)}
    return sum(each.watermark for each in groups[group].partitions.values()) if group in groups else 0
