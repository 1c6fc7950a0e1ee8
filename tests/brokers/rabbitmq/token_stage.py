"""What the tests of ordered groups share: members at a real server, and tokens as an operator sees them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Broker
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, Connection, Outbound, Properties, Received, encoded_properties
from onward.brokers.rabbitmq.ordered.token import Probe, Token, decoded, encoded
from onward.brokers.rabbitmq.ordered.token_channel import TokenChannel
from onward.event import Event, new_id
from onward.testing.scenario import Member
from tests.brokers.rabbitmq.harness import RabbitHarness

LEASE_S = 2.0
PERSISTENT = encoded_properties(Properties(delivery_mode=2))


@asynccontextmanager
async def brokers(harness: RabbitHarness, **options: Any) -> AsyncIterator[Callable[[], Any]]:
    """Opens brokers with short leases and one partition, and closes them at the end."""
    given: dict[str, Any] = {"partitions": 1, "lease_s": LEASE_S, "takeover_grace_s": 0.1, **options}
    opened: list[Broker] = []

    async def open_one() -> Broker:
        opened.append(await open_broker(settings.load(harness.url, **given)))
        return opened[-1]

    try:
        yield open_one
    finally:
        for broker in opened:
            await broker.close()


def event(topic: str, n: int) -> Event:
    return Event(new_id(), topic, "k", str(n).encode())


async def joined(broker: Broker, group: str = "group", topic: str = "orders", **options: Any) -> Member:
    """A member that owns the only partition."""
    return await (await Member.join(broker, topic, group, **options)).hold(1)


@asynccontextmanager
async def connected(harness: RabbitHarness) -> AsyncIterator[Connection]:
    """A connection of an operator."""
    connection = await Connection.open("127.0.0.1", harness.server.port, vhost=harness.vhost)
    try:
        yield connection
    finally:
        await connection.close()


async def peeked(connection: Connection, group: str = "group", topic: str = "orders") -> Token | None:
    """The newest token of a group that has no member."""
    desk = await TokenChannel.open(connection, names.token_queue(topic, 0, group), tenure="test:1", lease_s=5.0)
    try:
        return await desk.newest()
    finally:
        await desk.close()


async def write(connection: Connection, token: Token | Probe, group: str = "group", topic: str = "orders") -> None:
    """Put a message into a token queue, as a former owner or a program may do."""
    channel = await connection.channel()
    queue = names.token_queue(topic, 0, group)
    assert await channel.publish([Outbound("", queue, PERSISTENT, encoded(token))]) == [None]
    await channel.close()


async def emptied(connection: Connection, group: str = "group", topic: str = "orders") -> int:
    """Remove every message of a token queue that has no consumer. Returns how many tokens there were."""
    channel = await connection.channel()
    found: list[Received] = []
    await channel.qos(500)
    await channel.consume(names.token_queue(topic, 0, group), found.extend, no_ack=True)
    await asyncio.sleep(0.3)
    await channel.close()
    return sum(isinstance(decoded(each.body), Token) for each in found)


__all__ = ["AmqpError", "brokers", "connected", "emptied", "event", "joined", "peeked", "write"]
