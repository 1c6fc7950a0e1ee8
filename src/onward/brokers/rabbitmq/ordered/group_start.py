"""Creates an ordered group: its token queues, and the first token of each partition. Deletes damaged token queues."""

import asyncio
from collections.abc import Mapping, Sequence
from uuid import uuid4

import msgspec

from onward.brokers.base import Start
from onward.brokers.rabbitmq import names, presence
from onward.brokers.rabbitmq.amqp import (
    AmqpError,
    Channel,
    ChannelClosed,
    Connection,
    Outbound,
    Properties,
    encoded_properties,
)
from onward.brokers.rabbitmq.ordered.log_start import start_of
from onward.brokers.rabbitmq.ordered.token import Token, encoded
from onward.brokers.rabbitmq.registry.registry import TopicRegistry
from onward.brokers.rabbitmq.registry.registry_fold import TopicEntry
from onward.brokers.rabbitmq.server_errors import explained
from onward.errors import BrokerError
from onward.event import Partition

_PERSISTENT = encoded_properties(Properties(delivery_mode=2, content_type="application/msgpack"))

_ATTEMPTS, _PAUSE_S = 50, 0.1
_CHECK_S = 10.0  # for a new queue to store a message
_DELETE_S = 20.0  # 3.10 takes 5 s to delete a queue that it has forgotten
_EXPIRES_MS = 60_000

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


async def delete_silent(connection: Connection, queue: str) -> None:
    """Delete a token queue that neither delivers nor confirms, with its messages. Raises BrokerError.

    A queue is also silent while most of its nodes are down, and then it may come back. So it is deleted only if a new
    queue stores a message."""
    await _check_that_queues_work(connection, queue)
    channel = await connection.channel()
    try:
        async with asyncio.timeout(_DELETE_S):
            await channel.delete_queue(queue)
    except TimeoutError as error:
        raise BrokerError(
            f"queue {queue} does not answer and cannot be deleted; restart its node, or delete the queue with "
            f"`rabbitmqctl delete_queue {queue}`"
        ) from error
    except ChannelClosed as error:
        raise BrokerError(explained(error, f"queue {queue} does not answer; deleting it")) from error
    finally:
        await channel.close()


async def _check_that_queues_work(connection: Connection, queue: str) -> None:
    """Raises BrokerError if a new queue does not work either."""
    check = f"{queue}.check.{uuid4().hex[:8]}"
    channel = await connection.channel()
    try:
        async with asyncio.timeout(_CHECK_S):
            await channel.declare_queue(check, arguments={**names.QUORUM_ARGUMENTS, "x-expires": _EXPIRES_MS})
            refused = await stored(channel, [Outbound("", check, _PERSISTENT, b"")])
            await channel.delete_queue(check)
    except TimeoutError:
        refused = "no answer"
    except ChannelClosed as error:
        refused = explained(error, f"queue {check}")
    finally:
        await channel.close()
    if refused:
        raise BrokerError(
            f"queue {queue} does not answer, and a new queue does not work either ({refused}): check that most nodes "
            "of the server run"
        )
