"""A real RabbitMQ of the tests, without plugins, and the events in it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.servers.rabbitmq import RabbitMQServer

from bench.amqp_frames import Arguments, Outgoing, QueueState, Wire, plain_properties, publish
from bench.kit import server_cpu_s
from bench.workload import PARTITIONS, Item, batches, items
from onward import Onward, TopicSpec
from onward.brokers.base import Ordering
from onward.brokers.rabbitmq import names

KEYS = 1_000
VALUE_BYTES = 200
QUORUM: Arguments = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000_000}
QUIET_SHARE, QUIET_S, PATIENCE_S = 0.1, 0.3, 15.0
TYPE = "order"


class Target(NamedTuple):
    """The server, or a virtual host of it."""

    url: str
    pid: int


@contextmanager
def rabbitmq() -> Iterator[Target]:
    server = RabbitMQServer(plugins=())
    try:
        server.start()
        yield Target(server.url, server.pid)
    finally:
        server.close()


def quieten(server: Target) -> None:
    """Wait until the server has written to its files what it was given, so that no contestant pays for another."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        before = server_cpu_s(server.pid)
        time.sleep(QUIET_S)
        if server_cpu_s(server.pid) - before < QUIET_SHARE * QUIET_S:
            return


def orders(events: int) -> Iterator[Item]:
    return items(events, keys=KEYS, value_bytes=VALUE_BYTES)


def fill(server: Target, topic: str, events: int) -> str:
    """Publish them with Onward."""
    asyncio.run(_fill(server.url, topic, events))
    return topic


def fill_group(server: Target, topic: str, group: str, events: int) -> None:
    """Publish them with Onward to a topic whose work queue exists already: it gets what is published from then on."""
    asyncio.run(declare_group(server.url, topic, group, "none"))
    fill(server, topic, events)


def fill_plain(server: Target, queue: str, events: int) -> None:
    """The same events in a quorum queue, as any program publishes them."""
    with Wire(server.url) as wire:
        wire.open()
        wire.declare(queue, QUORUM)
        publish(wire, [Outgoing("", queue, properties(key), data) for key, data in orders(events)])


def properties(key: str) -> bytes:
    return plain_properties({"onward-key": key}, message_id(key), TYPE)


def message_id(key: str) -> str:
    """As long as a UUID. No contestant looks at it."""
    return f"{key:036}"


async def _fill(url: str, topic: str, events: int) -> None:
    async with _opened(url, topic) as app:
        for batch in batches(orders(events), 1_000):
            await app.publish_many(topic, batch, type=TYPE)


async def declare_group(url: str, topic: str, group: str, ordering: Ordering) -> None:
    """Create the topic and the group."""
    async with _opened(url, topic) as app:
        subscription = await app.broker.subscribe(
            [topic], group=group, member="bench", ordering=ordering, start="earliest"
        )
        await subscription.close()


def _opened(url: str, topic: str) -> Onward:
    app = Onward(url)
    app.topology(TopicSpec(topic, PARTITIONS))
    return app


def drop(server: Target, topic: str) -> None:
    """Remove a topic with everything that belongs to it."""
    asyncio.run(_drop(server.url, topic))


async def _drop(url: str, topic: str) -> None:
    async with Onward(url) as app:
        await app.broker.drop_topic(topic)


def delete(server: Target, queue: str) -> None:
    with Wire(server.url) as wire:
        wire.open()
        wire.delete(queue)


def left_in(server: Target, queue: str) -> int:
    """How many messages of a queue are not acknowledged. Those of a consumer that has ended are counted too."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = look(server, queue)
        if not found.consumers or time.monotonic() > deadline:
            return found.ready
        time.sleep(0.05)


def look(server: Target, queue: str) -> QueueState:
    with Wire(server.url) as wire:
        wire.open()
        return wire.look(queue)


def streams(topic: str) -> list[str]:
    return [names.stream(topic, index) for index in range(PARTITIONS)]


async def unsettled(server: Target, topic: str, group: str) -> list[int]:
    """The partitions in which the group has not settled all events."""
    async with Onward(server.url) as app:
        (found,) = [info for info in await app.broker.groups(topic) if info.group == group]
    return [index for index, each in found.partitions.items() if each.end is None or each.watermark < each.end]
