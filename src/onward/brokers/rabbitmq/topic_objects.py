"""The exchange and the streams of a topic at the server: create, check, delete."""

import logging

from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import (
    AmqpError,
    ChannelClosed,
    Connection,
    Outbound,
    Properties,
    encoded_properties,
)
from onward.brokers.rabbitmq.message import FOUNDING
from onward.brokers.rabbitmq.registry_fold import TopicEntry
from onward.brokers.rabbitmq.server_errors import explained, is_missing
from onward.errors import BrokerError

log = logging.getLogger("onward")


async def create(connection: Connection, topic: TopicEntry) -> None:
    """Create what is missing, and write the founding message into each stream. Raises BrokerError."""
    name = names.exchange(topic.name)
    what = f"exchange {name}"
    try:
        channel = await connection.channel()
        await channel.declare_exchange(name, "topic", arguments=topic.exchange_arguments)
        for index in range(topic.partitions):
            stream = names.stream(topic.name, index)
            what = f"stream {stream}"
            await channel.declare_queue(stream, arguments=topic.arguments)
            await channel.bind_queue(stream, name, names.stream_binding(index))
        what = f"the first message of the streams of topic {topic.name}"
        reasons = await channel.publish([_founding(topic, index) for index in range(topic.partitions)])
        if refused := next(filter(None, reasons), None):
            raise BrokerError(f"{what} was not accepted: {refused}")
        await channel.close()
    except AmqpError as error:
        raise BrokerError(_why(error, what)) from error


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


def _founding(topic: TopicEntry, index: int) -> Outbound:
    """So a stream is never empty, and its end can be found without writing."""
    properties = Properties(delivery_mode=2, headers={FOUNDING: topic.log_id})
    return Outbound("", names.stream(topic.name, index), encoded_properties(properties), b"")


def _why(error: AmqpError, what: str) -> str:
    if isinstance(error, ChannelClosed) and "x-queue-type" in error.text and "inequivalent" not in error.text:
        return f"{what}: {error.text}; this server has no streams: upgrade it, or enable the feature flag stream_queue"
    return explained(error, what)
