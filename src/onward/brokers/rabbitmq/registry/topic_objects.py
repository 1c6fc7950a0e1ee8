"""The streams and the exchange of a topic at the server: create, check, delete."""

import asyncio
import contextlib

from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import (
    AmqpError,
    ChannelClosed,
    Connection,
    ConnectionLost,
    Outbound,
    Properties,
    encoded_properties,
)
from onward.brokers.rabbitmq.message import FOUNDING
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.brokers.rabbitmq.registry.registry_fold import TopicEntry
from onward.brokers.rabbitmq.server_errors import explained, is_missing
from onward.brokers.rabbitmq.stream_reader import consuming
from onward.errors import BrokerError, PartitionsDiffer

_AT_ONCE = 32  # streams that are looked at
_FIRST_MESSAGE_S = 0.2  # a stream that has messages shows the first one within this time


async def create(connection: Connection, topic: TopicEntry, *, is_new: bool) -> None:
    """Create what is missing, and write the founding message into each stream that has no message. Raises BrokerError.

    `is_new`: no other process can have written to the streams yet. Raises ConnectionLost if the connection ends: the
    server closes it if another process is creating the same streams. Try again on a new one."""
    name = names.exchange(topic.name)
    what = f"exchange {name}"
    try:
        channel = await connection.channel()
        await channel.declare_exchange(name, "topic", arguments=topic.exchange_arguments)
        for index in range(topic.partitions):
            stream = names.stream(topic.name, index)
            what = f"stream {stream}"
            await channel.declare_queue(stream, arguments=topic.arguments)
        what = f"the first message of the streams of topic {topic.name}"
        empty = await _empty(connection, topic, wait_s=0.0 if is_new else _FIRST_MESSAGE_S)
        reasons = await channel.publish([_founding(topic, index) for index in empty])
        if refused := next(filter(None, reasons), None):
            raise BrokerError(f"{what} was not accepted: {refused}")
        await channel.close()
    except ConnectionLost:
        raise
    except AmqpError as error:
        raise BrokerError(_why(error, what)) from error


async def _empty(connection: Connection, topic: TopicEntry, *, wait_s: float) -> list[int]:
    """The partitions whose stream shows no message in that time.

    A stream that another process has just declared is not complete yet, and a publish to it would crash our connection
    at the server. It is complete when it can be read."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def is_empty(index: int) -> bool:
        async with limit:
            first = asyncio.Event()
            reading = await consuming(
                connection, names.stream(topic.name, index), offset="first", on_messages=lambda *_: first.set()
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await first.wait()
            await reading.close()
            return not first.is_set()

    found = await asyncio.gather(*[is_empty(index) for index in range(topic.partitions)])
    return [index for index, is_empty_ in enumerate(found) if is_empty_]


async def missing(connection: Connection, topic: TopicEntry) -> list[int]:
    """The partitions whose stream does not exist. Raises AmqpError if that cannot be found out."""
    found: list[int] = []
    channel = await connection.channel()
    for index in range(topic.partitions):
        try:
            await channel.declare_queue(names.stream(topic.name, index), passive=True)
        except ChannelClosed as error:
            if not is_missing(error):
                raise
            found.append(index)
            channel = await connection.channel()
    await channel.close()
    return found


async def check_unlisted(connection: Connection, name: str, partitions: int) -> None:
    """Raise PartitionsDiffer if the topic, which is not in the registry, has another number of streams. The registry
    was deleted, so keys would change their partitions, and some events would never be read."""
    probe = ProbeChannel(connection)
    try:
        count = 0
        while await probe.has_queue(names.stream(name, count)):
            count += 1
    finally:
        await probe.close()
    if count not in (0, partitions):
        raise PartitionsDiffer(
            f"topic {name} has {count} streams, and it is not listed in stream {names.REGISTRY}, which was probably "
            f"deleted. This process would list {partitions} of them; set partitions={count} here"
        )


async def has_exchange(connection: Connection, topic: TopicEntry) -> bool:
    """Raises AmqpError if that cannot be found out."""
    channel = await connection.channel()
    try:
        await channel.declare_exchange(names.exchange(topic.name), "topic", passive=True)
    except ChannelClosed as error:
        if not is_missing(error):
            raise
        return False
    await channel.close()
    return True


async def delete(connection: Connection, topic: TopicEntry) -> None:
    """Delete the streams with their events, and the exchange. Raises BrokerError."""
    what = f"exchange {names.exchange(topic.name)}"
    try:
        channel = await connection.channel()
        await channel.delete_exchange(names.exchange(topic.name))
        for index in range(topic.partitions):
            what = f"stream {names.stream(topic.name, index)}"
            await channel.delete_queue(names.stream(topic.name, index))
        await channel.close()
    except AmqpError as error:
        raise BrokerError(_why(error, what)) from error


def cure_of_a_deleted_stream(topic: str) -> str:
    return (
        f"stop its members, drop the topic with `await app.broker.drop_topic({topic!r})`, which deletes its other "
        "events too, and publish again to create it"
    )


def _founding(topic: TopicEntry, index: int) -> Outbound:
    """So a stream is never empty, and its end can be found without writing."""
    properties = Properties(delivery_mode=2, headers={FOUNDING: topic.log_id})
    return Outbound("", names.stream(topic.name, index), encoded_properties(properties), b"")


def _why(error: AmqpError, what: str) -> str:
    if isinstance(error, ChannelClosed) and "x-queue-type" in error.text and "inequivalent" not in error.text:
        return f"{what}: {error.text}; this server has no streams: upgrade it, or enable the feature flag stream_queue"
    return explained(error, what)
