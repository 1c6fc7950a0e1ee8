"""Reads streams: a stretch, for ever, or only where a stream ends."""

import asyncio
import functools
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import uuid4

from onward import clock
from onward.brokers.rabbitmq.amqp import Channel, ChannelClosed, Connection, Outbound, Received, properties_of
from onward.brokers.rabbitmq.connecting import pauses
from onward.brokers.rabbitmq.message import scanned
from onward.brokers.rabbitmq.server_errors import explained, is_passing, lacks_replica
from onward.errors import BrokerError

PREFETCH = 500  # 200 to 1,000 are equally fast; 10,000 cost the server twenty times as much
LARGEST_CHUNK = 8_192  # messages: the server never writes more of them at once
SILENCE_S = 2.0  # after this time without a message, a stream has none from that place on
PATIENCE_S = 10.0  # with a node that has just started
REPLICA_S = 2.0  # with a node that has no replica: another process may just declare the stream

OnMessages = Callable[[list[Received]], None]


class EmptyStream(BrokerError):
    """The stream has no message: retention has removed all of them, or nothing was ever written."""


def offset_of(message: Received) -> int:
    """The offset of a message from a stream."""
    offset = scanned(message.properties, message.routing_key).offset
    assert offset is not None, "a message from a stream has an offset"
    return offset


async def end_of(connection: Connection, stream: str, *, timeout_s: float = SILENCE_S) -> int:
    """The first offset behind everything that was confirmed before this call. It writes nothing.

    A consumer at "last" gets the newest chunk of messages from its beginning. The server sends what it has before it
    answers the next call on the channel, so after that answer the highest offset is known. Beside busy publishers it
    stops behind the largest possible chunk. In a cluster, a node that follows the stream's leader may know of a
    confirmed message some milliseconds late.

    Raises EmptyStream, and ChannelClosed if the stream does not exist."""
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    newest: list[Received] = []
    count = acked = 0

    def arrived(_: Channel, messages: list[Received]) -> None:
        nonlocal count
        count += len(messages)
        newest[:] = messages[-1:]
        if not first.done():
            first.set_result(None)

    channel = await consuming(connection, stream, offset="last", on_messages=arrived)
    try:
        await _first_of(first, channel.closing, timeout_s=timeout_s)
        if not newest and not channel.is_closed:
            raise EmptyStream(f"stream {stream} has no message")
        await channel.qos(PREFETCH)
        while count - acked >= PREFETCH and count < LARGEST_CHUNK:  # the server may have stopped within the chunk
            acked = count
            channel.ack(newest[-1].tag, multiple=True)
            await channel.qos(PREFETCH)
        return offset_of(newest[-1]) + 1
    finally:
        await channel.close()


async def end_by_writing(connection: Connection, stream: str, message: Callable[[str], Outbound]) -> int:
    """The first offset behind everything that was confirmed before this call, however far this node lags behind the
    leader of the stream. It writes one message and waits until it arrives. `message`: makes it, with this message id.

    Raises BrokerError if it does not arrive, and AmqpError if the connection ends or the stream does not exist."""
    id_, written = uuid4().hex, asyncio.get_running_loop().create_future()

    def arrived(messages: list[Received]) -> None:
        for each in messages:
            if not written.done() and properties_of(each.properties).message_id == id_:
                written.set_result(offset_of(each))

    reading = await follow(connection, stream, offset="last", on_messages=arrived)
    writing = await connection.channel()
    try:
        (why,) = await writing.publish([message(id_)])
        if why is not None:
            raise BrokerError(f"stream {stream} did not store a message: {why}")
        await _first_of(written, reading.closing, timeout_s=PATIENCE_S)
        if not written.done():
            raise BrokerError(f"stream {stream} on this node lags behind its leader; check the health of the cluster")
        return int(written.result())
    finally:
        await writing.close()
        await reading.close()


async def read(
    connection: Connection, stream: str, *, offset: int | str | datetime, until: int, on_messages: OnMessages
) -> None:
    """Read from `offset` to `until`, which is what end_of returned. `on_messages` may also get some messages behind
    it. Raises BrokerError if the stream is silent before that, or has ended."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    heard = clock.now()

    def arrived(messages: list[Received]) -> None:
        nonlocal heard
        heard = clock.now()
        if done.done():
            return
        try:
            on_messages(messages)
            if offset_of(messages[-1]) + 1 >= until:
                done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    channel = await follow(connection, stream, offset=offset, on_messages=arrived)
    try:
        while not done.done():
            await _first_of(done, channel.closing, timeout_s=SILENCE_S)
            if channel.closing.done() and not done.done():
                raise BrokerError(explained(channel.closing.result(), f"stream {stream}"))
            if clock.now() - heard > PATIENCE_S:
                raise BrokerError(f"stream {stream} is silent before offset {until}; check the health of its node")
        done.result()
    finally:
        await channel.close()


async def follow(
    connection: Connection,
    stream: str,
    *,
    offset: int | str | datetime,
    on_messages: OnMessages,
    prefetch: int = PREFETCH,
) -> Channel:
    """Give every message from `offset` on to `on_messages`, until the channel is closed. If the server cancels the
    consumer, for example because the stream was deleted, the channel is closed too."""
    step, open_ = max(1, prefetch // 4), 0

    def arrived(channel: Channel, messages: list[Received]) -> None:
        nonlocal open_
        on_messages(messages)
        open_ += len(messages)
        if open_ >= step:
            open_ = 0
            channel.ack(messages[-1].tag, multiple=True)

    return await consuming(connection, stream, offset=offset, on_messages=arrived, prefetch=prefetch)


async def consuming(
    connection: Connection,
    stream: str,
    *,
    offset: int | str | datetime,
    on_messages: Callable[[Channel, list[Received]], None],
    prefetch: int = PREFETCH,
) -> Channel:
    """A channel with a consumer of the stream, which acknowledges nothing. The server's cancel closes the channel.

    A node that has just started says for some seconds that the stream is away, and one that just declares it says that
    it has no replica. Raises ChannelClosed if that lasts. If another host may have a replica, the connection is given
    up, and this raises ConnectionLost."""
    began = clock.now()
    for pause_s in pauses():
        channel = await connection.channel()
        try:
            await channel.qos(prefetch)
            await channel.consume(
                stream,
                functools.partial(on_messages, channel),
                arguments={"x-stream-offset": offset},
                on_cancel=lambda gone=channel: close_soon(gone),  # type: ignore[misc]
            )
        except ChannelClosed as error:
            patience_s = PATIENCE_S if is_passing(error) else REPLICA_S if lacks_replica(error) else 0.0
            if clock.now() >= began + patience_s:
                if lacks_replica(error) and connection.is_elsewhere(stream):
                    connection.abandon(f"its node has no replica of stream {stream}; trying the next host")
                    raise connection.closing.result() from error
                raise
        except BaseException:
            await channel.close()
            raise
        else:
            return channel
        await asyncio.sleep(pause_s)
    raise AssertionError("pauses never end")


async def _first_of(*futures: asyncio.Future[Any], timeout_s: float) -> None:
    """Return when one of them is done, or after the time."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def close_soon(channel: Channel) -> None:
    """Close it without waiting for the answer of the server."""
    closing = asyncio.ensure_future(channel.close())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Future[None]] = set()
