"""Reading streams: the end of a stream is found without writing, and reads end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from onward import settings
from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.amqp import (
    Channel,
    ChannelClosed,
    Connection,
    Outbound,
    Properties,
    Received,
    encoded_properties,
)
from onward.brokers.rabbitmq.connecting import connected
from onward.brokers.rabbitmq.names import LOG_ARGUMENTS
from onward.brokers.rabbitmq.stream_reader import EmptyStream, end_of, follow, offset_of, read
from onward.errors import BrokerError
from tests.brokers.rabbitmq.harness import RabbitHarness, harness
from tests.brokers.rabbitmq.stage import played, until

__all__ = ["harness"]

pytestmark = pytest.mark.servers

STREAM = "stream"
PLAIN = encoded_properties(Properties())


@asynccontextmanager
async def connection_to(harness: RabbitHarness) -> AsyncIterator[Connection]:
    loaded = settings.load(harness.url)
    connection = await connected(RabbitAddress.of(loaded.url, loaded), name="test", patience_s=5)
    try:
        yield connection
    finally:
        await connection.close()


async def declared(connection: Connection, **arguments: object) -> Channel:
    channel = await connection.channel()
    table = {**LOG_ARGUMENTS, **{name.replace("_", "-"): value for name, value in arguments.items()}}
    await channel.declare_queue(STREAM, arguments=table)
    return channel


async def write(channel: Channel, count: int, body: bytes = b"x") -> None:
    assert not any(await channel.publish([Outbound("", STREAM, PLAIN, body)] * count))


@played
async def test_the_end_is_behind_everything_that_was_confirmed(harness: RabbitHarness) -> None:
    async with connection_to(harness) as connection:
        channel = await declared(connection)
        with pytest.raises(EmptyStream):
            await end_of(connection, STREAM, timeout_s=0.2)
        total = 0
        for count in (1, 1, 499, 500, 501, 3_000, 7, 1):
            await write(channel, count)
            total += count
            assert await end_of(connection, STREAM) == total


@played
async def test_the_end_beside_writers_is_never_too_low(harness: RabbitHarness) -> None:
    async with connection_to(harness) as connection, connection_to(harness) as other:
        await declared(connection)
        confirmed = 0

        async def keep_writing() -> None:
            nonlocal confirmed
            channel = await other.channel()
            while True:
                await write(channel, 300)
                confirmed += 300

        writers = [asyncio.ensure_future(keep_writing()) for _ in range(3)]
        await until(lambda: confirmed)
        for _ in range(30):
            least = confirmed
            assert await end_of(connection, STREAM) >= least
        for each in writers:
            each.cancel()
        await asyncio.wait(writers)


@played
async def test_the_end_over_many_segments_is_right(harness: RabbitHarness) -> None:
    """The server uses one offset itself at each segment, so offsets have gaps there."""
    async with connection_to(harness) as connection:
        channel = await declared(connection, x_stream_max_segment_size_bytes=8_000)
        written = 0
        for count in (10, 200, 1, 37, 200, 5):
            await write(channel, count, b"x" * 200)
            written += count
            end, got = await end_of(connection, STREAM), list[Received]()
            await read(connection, STREAM, offset="first", until=end, on_messages=got.extend)
            assert len(got) == written
            assert offset_of(got[-1]) + 1 == end


@played
async def test_a_stretch_is_read_from_any_offset(harness: RabbitHarness) -> None:
    async with connection_to(harness) as connection:
        channel = await declared(connection)
        await write(channel, 1_200)
        got: list[Received] = []
        await read(connection, STREAM, offset=700, until=1_200, on_messages=got.extend)
        assert [offset_of(each) for each in got] == list(range(700, 1_200))
        with pytest.raises(LookupError):
            await read(connection, STREAM, offset=0, until=1_200, on_messages=_fail)


def _fail(_: list[Received]) -> None:
    raise LookupError("of the caller")


@played
async def test_a_follower_gets_what_comes_and_ends_with_the_stream(harness: RabbitHarness) -> None:
    async with connection_to(harness) as connection:
        channel = await declared(connection)
        await write(channel, 3)
        got: list[Received] = []
        following = await follow(connection, STREAM, offset=1, on_messages=got.extend)
        await write(channel, 2_000)
        await until(lambda: len(got) == 2_002)
        await channel.delete_queue(STREAM)
        await until(lambda: following.is_closed)
        with pytest.raises(ChannelClosed, match="no queue"):
            await end_of(connection, STREAM)


@played
async def test_a_read_ends_when_the_stream_is_deleted(harness: RabbitHarness) -> None:
    async with connection_to(harness) as connection:
        channel = await declared(connection)
        await write(channel, 3)
        reading = asyncio.ensure_future(read(connection, STREAM, offset=0, until=10, on_messages=lambda _: None))
        await asyncio.sleep(0.1)
        await channel.delete_queue(STREAM)
        with pytest.raises(BrokerError, match="stream stream"):
            await reading
