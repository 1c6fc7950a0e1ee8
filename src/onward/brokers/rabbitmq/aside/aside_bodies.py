"""Reads the bodies of records again, at their places in the streams of an aside."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from onward.brokers.core.folded_aside import AsideRow
from onward.brokers.rabbitmq.amqp import ChannelClosed, Received
from onward.brokers.rabbitmq.aside.aside_entries import decoded, generation_and_offset
from onward.brokers.rabbitmq.aside.aside_reader import STALLED_S, AsideSource
from onward.brokers.rabbitmq.server_errors import explained, is_missing
from onward.brokers.rabbitmq.stream_reader import follow, offset_of
from onward.errors import BrokerError

_GAP = 16  # up to so many messages between two wanted ones are read and dropped
_MOST_AHEAD = 50  # messages that the server sends ahead

Bodies = dict[str, bytes]  # by record id
Wanted = dict[int, set[str]]  # by offset: the ids of records in that message


async def bodies(source: AsideSource, rows: Sequence[AsideRow]) -> Bodies:
    """The bodies of these rows, without those that no longer exist. BrokerError: a stream cannot be read."""
    found = {row.id: row.body for row in rows if row.body is not None}
    absent: dict[int, Wanted] = {}
    for row in rows:
        if row.body is None:
            generation, offset = generation_and_offset(row.offset)
            absent.setdefault(generation, {}).setdefault(offset, set()).add(row.id)
    for generation, wanted in absent.items():
        for run in _runs(sorted(wanted)):
            found |= await _read(source, source.stream(generation), run, wanted)
    return found


def _runs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of offsets that are near enough to each other to be read in one go."""
    first = last = offsets[0]
    for offset in offsets[1:]:
        if offset - last > _GAP:
            yield first, last
            first = offset
        last = offset
    yield first, last


async def _read(source: AsideSource, stream: str, run: tuple[int, int], wanted: Wanted) -> Bodies:
    found: Bodies = {}
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(messages: list[Received]) -> None:
        for message in messages:
            offset = offset_of(message)
            if offset <= run[1]:
                found.update(_bodies_in(message, wanted.get(offset, set())))
            if offset >= run[1] and not done.done():
                done.set_result(None)

    try:
        ahead = min(_MOST_AHEAD, run[1] - run[0] + 1)
        channel = await follow(source.connection, stream, offset=run[0], on_messages=take, prefetch=ahead)
    except ChannelClosed as error:
        if is_missing(error):
            return {}
        raise BrokerError(f"RabbitMQ: {explained(error, f'stream {stream}')}") from error
    try:
        ends: list[asyncio.Future[Any]] = [done, channel.closing]
        await asyncio.wait(ends, timeout=STALLED_S, return_when=asyncio.FIRST_COMPLETED)
        if not any(end.done() for end in ends):
            raise BrokerError(f"RabbitMQ: records in {stream} cannot be read: no answer in {STALLED_S:g} s")
        return found
    finally:
        await channel.close()


def _bodies_in(message: Received, wanted: set[str]) -> Bodies:
    try:
        batch = decoded(message.body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return {entry.key: entry.value for entry in batch.entries if entry.key in wanted and entry.value is not None}
