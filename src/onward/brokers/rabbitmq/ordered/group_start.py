"""Creates an ordered group: its token queues, and the first token of each partition."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from onward.brokers.base import Start
from onward.brokers.rabbitmq import names, presence
from onward.brokers.rabbitmq.amqp import AmqpError, Channel, Connection, Outbound, Properties, encoded_properties
from onward.brokers.rabbitmq.ordered.log_start import start_of
from onward.brokers.rabbitmq.ordered.token import Token, encoded
from onward.brokers.rabbitmq.registry.registry import TopicRegistry
from onward.brokers.rabbitmq.registry.registry_fold import TopicEntry
from onward.brokers.rabbitmq.server_errors import explained
from onward.errors import BrokerError
from onward.event import Partition

_PERSISTENT = encoded_properties(Properties(delivery_mode=2, content_type="application/msgpack"))

_ATTEMPTS, _PAUSE_S = 50, 0.1

FirstTokens = Mapping[Partition, Token]


def first_token(topic: TopicEntry, fence: int) -> Token:
    """The token of a group that reads from the beginning."""
    return Token(fence, 0, "first", topic.log_id, topic.log_id, 0, is_seed=True)


async def start_tokens(
    connection: Connection, topic: TopicEntry, start: Start, fence: int = 0
) -> dict[Partition, Token]:
    """The first tokens of a group that starts there."""
    tokens: dict[Partition, Token] = {}
    for index in range(topic.partitions):
        watermark, anchors = await start_of(connection, names.stream(topic.name, index), start)
        first = first_token(topic, fence)
        tokens[Partition(topic.name, index)] = msgspec.structs.replace(first, watermark=watermark, anchors=anchors)
    return tokens


async def joined(
    connection: Connection, registry: TopicRegistry, topic: TopicEntry, group: str, start: Start
) -> FirstTokens:
    """Create the group if it does not exist. Returns the first tokens that this call has written. Raises BrokerError.

    The group is registered last: if this process dies before, the next one does all of it again. A late first token is
    harmless, because every other token is newer."""
    await registry.catch_up()
    known = registry.groups(topic.name).get(group)
    tokens: FirstTokens = {}
    if known is None:
        try:
            tokens = await _create(connection, topic, group, start, registry.fence_floor(topic.name, group))
        except AmqpError as error:
            raise BrokerError(explained(error, f"group {group} of topic {topic.name}")) from error
    await registry.add_group(topic.name, group, "ordered")
    return tokens


async def _create(
    connection: Connection, topic: TopicEntry, group: str, start: Start, fence_floor: int
) -> dict[Partition, Token]:
    fence = fence_floor + 1 if fence_floor else 0
    channel = await connection.channel()
    try:
        await presence.declare(channel, topic.name, group)
        for index in range(topic.partitions):
            await channel.declare_queue(names.token_queue(topic.name, index, group), arguments=names.TOKEN_ARGUMENTS)
        tokens = await start_tokens(connection, topic, start, fence)
        first = [
            Outbound("", names.token_queue(*partition, group), _PERSISTENT, encoded(token))
            for partition, token in tokens.items()
        ]
        if refused := await stored(channel, first):
            raise BrokerError(f"group {group} of topic {topic.name} cannot be created: {refused}")
        return tokens
    finally:
        await channel.close()


async def stored(channel: Channel, messages: Sequence[Outbound]) -> str | None:
    """Store the messages. Returns why the server refuses one of them.

    A quorum queue that another process declares at this moment refuses messages until it has started."""
    for _ in range(_ATTEMPTS):
        reasons = await channel.publish(messages)
        messages = [message for message, reason in zip(messages, reasons, strict=True) if reason]
        if not messages:
            return None
        await asyncio.sleep(_PAUSE_S)
    return next(filter(None, reasons))
