"""What operators ask about ordered groups: who is in them, how far they are, and to drop one.

Everything runs in the loop of the I/O thread.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from uuid import uuid4

from onward.brokers.base import GroupInfo, MemberInfo, Standing
from onward.brokers.rabbitmq import names, presence
from onward.brokers.rabbitmq.amqp import AmqpError, ChannelClosed, Connection
from onward.brokers.rabbitmq.aside.aside import RabbitAsides
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.ordered.token import Token
from onward.brokers.rabbitmq.ordered.token_channel import TokenChannel, TokenLost
from onward.brokers.rabbitmq.presence import PresenceNote
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry, TopicEntry
from onward.brokers.rabbitmq.server_errors import explained
from onward.brokers.rabbitmq.stream_reader import end_of
from onward.errors import BrokerError

_FOUNDED = 1  # where the events of a stream begin: its first message is no event
_PEEK_S = 2.0
_BUSY_PEEK_S = 0.5  # while the group has members: one of them is about to have the token


async def infos(ground: RabbitGround, topic: TopicEntry, entries: Sequence[GroupEntry]) -> list[GroupInfo]:
    if not entries:
        return []
    connection = await ground.query()
    ends = await asyncio.gather(*[_end(connection, topic, index) for index in range(topic.partitions)])
    return [await _info(connection, topic, entry.group, ends) for entry in entries]


async def _info(connection: Connection, topic: TopicEntry, group: str, ends: Sequence[int | None]) -> GroupInfo:
    notes = await presence.asked(connection, topic.name, group)
    standings: dict[int, Standing] = {}
    for note in notes:
        name = MemberInfo.parse(note.member).name
        for index, (fence, watermark) in note.held.items():
            standings[index] = _standing(watermark, ends[index], name, fence)
    free = [index for index in range(topic.partitions) if index not in standings]
    within_s = _BUSY_PEEK_S if notes else _PEEK_S
    tokens = await asyncio.gather(*[_peeked(connection, topic, group, index, within_s) for index in free])
    for index, token in zip(free, tokens, strict=True):
        if token is not None:
            standings[index] = _standing(token.watermark, ends[index], None, token.fence)
    members = [MemberInfo.parse(note.member) for note in _sorted(notes)]
    return GroupInfo(group, topic.name, members, dict(sorted(standings.items())))


def _standing(watermark: int, end: int | None, owner: str | None, fence: int | None) -> Standing:
    """A group that has read nothing is at the end of a stream that has nothing but its founding message."""
    return Standing(max(watermark, _FOUNDED), end, owner, fence)


async def owners(ground: RabbitGround, topic: TopicEntry, group: str) -> list[MemberInfo]:
    notes = await presence.asked(await ground.query(), topic.name, group)
    return [MemberInfo.parse(note.member) for note in _sorted(notes) if note.held]


async def drop(ground: RabbitGround, asides: RabbitAsides, topic: TopicEntry, group: str) -> None:
    """Delete the group. Raises BrokerError while a member is alive."""
    if alive := await presence.living(await ground.query(), topic.name, group):
        raise BrokerError(f"group {group} of topic {topic.name} is in use by {', '.join(alive)}; stop them first")
    connection = await ground.query()
    try:
        async with contextlib.AsyncExitStack() as stack:
            fences = [await _taken(stack, connection, topic, group, index) for index in range(topic.partitions)]
            await asides.delete(connection, topic.name, group, range(topic.partitions))
            await ground.registry.drop_group(topic.name, group, max(fences, default=0))
            await _delete(connection, topic, group)
    except AmqpError as error:
        raise BrokerError(explained(error, f"group {group} of topic {topic.name}")) from error


async def _delete(connection: Connection, topic: TopicEntry, group: str) -> None:
    channel = await connection.channel()
    try:
        for index in range(topic.partitions):
            await channel.delete_queue(names.token_queue(topic.name, index, group))
        await presence.delete(channel, topic.name, group)
    finally:
        await channel.close()


async def _taken(
    stack: contextlib.AsyncExitStack, connection: Connection, topic: TopicEntry, group: str, index: int
) -> int:
    """Be the active consumer of a token queue, so that no member is. Returns the fence of its token."""
    try:
        desk = await _opened(connection, topic, group, index)
    except ChannelClosed as error:
        if error.code == 404:
            return 0
        raise
    stack.push_async_callback(desk.close)
    try:
        async with asyncio.timeout(_PEEK_S):
            token = await desk.newest()
    except (TimeoutError, TokenLost):
        raise BrokerError(
            f"group {group} of topic {topic.name} is in use: another consumer has the token of partition {index}; "
            "stop its members first"
        ) from None
    return 0 if token is None else token.fence


async def _peeked(connection: Connection, topic: TopicEntry, group: str, index: int, within_s: float) -> Token | None:
    """The token of a partition that has no owner. None if it cannot be read now."""
    try:
        desk = await _opened(connection, topic, group, index)
    except ChannelClosed:
        return None
    try:
        async with asyncio.timeout(within_s):
            token = await desk.newest()
        desk.tidy()
        return token
    except (TimeoutError, TokenLost):
        return None
    finally:
        await desk.close()


async def _opened(connection: Connection, topic: TopicEntry, group: str, index: int) -> TokenChannel:
    queue = names.token_queue(topic.name, index, group)
    desk = await TokenChannel.open(connection, queue, tenure=f"operator:{uuid4().hex}", lease_s=_PEEK_S)
    desk.nudge()  # an empty queue would deliver nothing
    return desk


async def _end(connection: Connection, topic: TopicEntry, index: int) -> int | None:
    try:
        return await end_of(connection, names.stream(topic.name, index))
    except (ChannelClosed, BrokerError):
        return None


def _sorted(notes: Sequence[PresenceNote]) -> list[PresenceNote]:
    return sorted(notes, key=lambda note: note.member)
