"""Finds where a new owner goes on in the log, after its token."""

import asyncio
import functools
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from onward import clock
from onward.brokers.base import Start
from onward.brokers.rabbitmq.amqp import Channel, Connection, Outbound, Properties, Received, encoded_properties
from onward.brokers.rabbitmq.message import FOUNDING, scanned
from onward.brokers.rabbitmq.ordered.log_anchors import LogVerdict, judged, mark_of
from onward.brokers.rabbitmq.ordered.token import Anchor, Token
from onward.brokers.rabbitmq.server_errors import explained
from onward.brokers.rabbitmq.stream_reader import EmptyStream, consuming, end_by_writing, end_of, offset_of, read
from onward.errors import BrokerError

_SILENT_S = 1.0  # then ask where the log ends
_PATIENCE_S = 10.0


class LogStart(NamedTuple):
    """The token with the progress that is valid in this log, and what the operator should know. `is_empty`: the log has
    no message, so the first one that comes must be checked."""

    token: Token
    verdict: LogVerdict
    note: str = ""
    is_empty: bool = False


async def checked(connection: Connection, stream: str, token: Token) -> LogStart:
    """Check that the log is the one that the token's progress is for. If it has lost its end, the token goes back to
    the newest anchor that is left. The log has a new id then, because positions are used again."""
    if not token.anchors:
        return LogStart(token, LogVerdict.SAME)
    anchor, *older = token.anchors
    first = await _first_from(connection, stream, anchor.offset)
    if first is None:
        return LogStart(token, LogVerdict.SAME, is_empty=True)
    verdict = judged(anchor, token.watermark, first)
    if verdict is LogVerdict.SAME:
        return LogStart(token, verdict)
    if verdict is LogVerdict.TRIMMED:
        count = first.offset - token.watermark
        events = "1 event was" if count == 1 else f"{count:,} events were"
        note = f"{events} removed by retention before they were read; raise retention_s, or consume faster"
        return LogStart(token, verdict, note)
    for at, each in enumerate(older):
        found = await _first_from(connection, stream, each.offset)
        if found == each:
            return _gone_back(token, tuple(older[at:]), each.offset + 1)
    return _gone_back(token, (), 0)


def _gone_back(token: Token, anchors: tuple[Anchor, ...], watermark: int) -> LogStart:
    back = msgspec.structs.replace(token, log_id=uuid4().hex, watermark=watermark, progress="", anchors=anchors)
    note = (
        f"the log has lost its newest events, as after a power cut: it does not have the event at offset "
        f"{token.anchors[0].offset} any more. It is read again from offset {watermark}, so some events run again"
    )
    return LogStart(back, LogVerdict.CUT, note)


async def _first_from(connection: Connection, stream: str, offset: int) -> Anchor | None:
    """The first message at this offset or behind it. An anchor with a lower offset: the log ends before. None: the log
    has no message at all."""
    first: asyncio.Future[Anchor] = asyncio.get_running_loop().create_future()

    def arrived(_: Channel, messages: list[Received]) -> None:
        if not first.done():
            first.set_result(anchor_of(messages[0]))

    channel = await consuming(connection, stream, offset=offset, on_messages=arrived, prefetch=1)
    either: list[asyncio.Future[Any]] = [first, channel.closing]
    try:
        patience = clock.now() + _PATIENCE_S
        while clock.now() < patience:
            await asyncio.wait(either, timeout=_SILENT_S, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                return first.result()
            if channel.closing.done():
                raise BrokerError(explained(channel.closing.result(), f"stream {stream}"))
            try:
                end = await end_of(connection, stream)
            except EmptyStream:
                return None
            if end <= offset:  # or this node lags behind the leader of the stream, as after its restart
                end = await end_by_writing(connection, stream, functools.partial(_marker, stream))
                patience = clock.now() + _PATIENCE_S
            if end <= offset:
                return Anchor(end - 1, 0)
    finally:
        await channel.close()
    raise BrokerError(f"stream {stream} does not deliver offset {offset}; check the health of its node")


def _marker(stream: str, id_: str) -> Outbound:
    """A message that readers pass over."""
    properties = Properties(delivery_mode=2, message_id=id_, headers={FOUNDING: ""})
    return Outbound("", stream, encoded_properties(properties), b"")


def anchor_of(message: Received) -> Anchor:
    return Anchor(offset_of(message), mark_of(message.properties, message.body))


class LogEnd(NamedTuple):
    """The newest message of a log."""

    anchor: Anchor
    sent: float  # Unix time; 0: unknown


async def newest_of(connection: Connection, stream: str) -> LogEnd | None:
    """None: the log has no message."""
    found: list[Received] = []
    try:
        end = await end_of(connection, stream)
        await read(connection, stream, offset="last", until=end, on_messages=lambda each: found.append(each[-1]))
    except EmptyStream:
        return None
    return LogEnd(anchor_of(found[-1]), sent_at(found[-1]))


def sent_at(message: Received) -> float:
    return scanned(message.properties, "").at_ms / 1000


async def start_of(connection: Connection, stream: str, start: Start) -> tuple[int, tuple[Anchor, ...]]:
    """Where a new group starts, and the anchor below that place."""
    newest = None if start == "earliest" else await newest_of(connection, stream)
    if newest is None:
        return 0, ()
    if start == "latest" or newest.sent < float(start):
        return newest.anchor.offset + 1, (newest.anchor,)
    return await _at_time(connection, stream, float(start), newest.anchor.offset + 1)


async def _at_time(connection: Connection, stream: str, start: float, end: int) -> tuple[int, tuple[Anchor, ...]]:
    """The first event that was sent at this Unix time or later. The server finds only the chunk, by the second."""
    before: list[Anchor] = []
    found: list[int] = []

    def arrived(messages: list[Received]) -> None:
        for message in messages:
            if found:
                return
            if sent_at(message) >= start:
                found.append(offset_of(message))
            else:
                before[:] = [anchor_of(message)]

    second = datetime.fromtimestamp(max(0.0, start - 1.0), UTC)
    await read(connection, stream, offset=second, until=end, on_messages=arrived)
    return (found[0], tuple(before)) if found else (end, tuple(before))
