"""A server that sends garbage, or almost the right bytes: every connection and every call ends, with an AmqpError."""

import asyncio
import random
import time
import tracemalloc
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.brokers.rabbitmq.amqp import (
    AmqpError,
    ChannelClosed,
    Connection,
    ConnectionLost,
    Outbound,
    Properties,
    PublishAnswer,
    Received,
    encoded_properties,
    frames,
)
from onward.brokers.rabbitmq.amqp.assembly import Assembly
from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.frames import frame, method_frame

HOST = "127.0.0.1"
FRAME_MAX = 131072
ALWAYS_S = 5.0  # whatever the server does, all is over by then
SILENCE_S = 0.02
MESSAGE = encoded_properties(Properties(headers={"a": 1, "b": ["x", None]}, message_id="id", timestamp=7))
OUT = Outbound("", "q", MESSAGE, b"body")


def content(size: int) -> bytes:
    return frame(frames.HEADER, 1, b"\x00\x3c\x00\x00" + size.to_bytes(8, "big") + MESSAGE)


def delivery(tag: int, body: bytes = b"body") -> bytes:
    method = method_frame(1, frames.DELIVER, "c", tag, False, "exchange", "key")
    halves = (body[: len(body) // 2], body[len(body) // 2 :]) if body else ()
    return method + content(len(body)) + b"".join(frame(frames.BODY, 1, half) for half in halves)


RETURNED = method_frame(1, frames.RETURN, 312, "NO_ROUTE", "", "q") + content(4) + frame(frames.BODY, 1, b"body")
ACKED = method_frame(1, frames.ACK, 1, False)
DECLARED = method_frame(1, frames.QUEUE_DECLARE_OK, "q", 3, 1)

# What a server answers to the steps of `session`, one after the other.
DIALOGUE = [
    method_frame(0, frames.START, 0, 9, {"product": "Fake", "version": "3.9"}, b"PLAIN AMQPLAIN", b"en_US"),
    method_frame(0, frames.TUNE, 2047, FRAME_MAX, 60),
    method_frame(0, frames.OPEN_OK, ""),
    method_frame(1, frames.CHANNEL_OPEN_OK, b""),
    DECLARED,
    method_frame(1, frames.CONSUME_OK, "c") + delivery(1) + delivery(2, b"") + frames.HEARTBEAT_FRAME + delivery(3),
    method_frame(1, frames.CONFIRM_SELECT_OK),
    RETURNED + ACKED + method_frame(0, frames.BLOCKED, "low on memory") + DECLARED,
    method_frame(1, frames.CHANNEL_CLOSE_OK),
    method_frame(0, frames.CLOSE_OK),
]


@asynccontextmanager
async def fake_server(answers: list[bytes]) -> Any:
    """Sends the next answer whenever the client has written, then closes. Yields the port."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(OSError):
            for answer in answers:
                await heard(reader)
                writer.write(answer)
            while await heard(reader):
                pass
        writer.transport.abort()
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_server(serve, HOST)
    try:
        yield server.sockets[0].getsockname()[1]
        await over.wait()
    finally:
        server.close()
        await server.wait_closed()


async def heard(reader: StreamReader) -> bytes:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await reader.read(1 << 16)
    except TimeoutError:
        return b""


async def session(port: int) -> tuple[list[Received], list[PublishAnswer]]:
    """Uses what the brokers use. Whatever comes, each call returns or raises, and all answers add up."""
    received: list[Received] = []
    answers: list[PublishAnswer] = []
    numbers = 0
    connection = await Connection.open(HOST, port, timeout_s=ALWAYS_S)
    try:
        channel = await connection.channel()
        channel.on_answers = answers.extend
        await channel.declare_queue("q")
        await channel.consume("q", received.extend, tag="c")
        await channel.confirm_select()
        numbers = channel.send([OUT])
        assert numbers == 1
        assert (await channel.declare_queue("q")).name == "q"
        await channel.close()
    finally:
        await connection.close(timeout_s=1.0)
        assert connection.is_closed
        assert isinstance(await connection.closing, ConnectionLost)
        assert [(each.first, each.last) for each in answers] == [(1, 1)][:numbers]
    return received, answers


async def survive(answers: list[bytes]) -> None:
    async with asyncio.timeout(ALWAYS_S), fake_server(answers) as port:
        with suppress(AmqpError):
            await session(port)


def mutated(data: bytes, dice: random.Random) -> bytes:
    raw = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        at = dice.randrange(len(raw)) if raw else 0
        change = dice.randrange(6)
        if change == 0 and raw:
            raw[at] = dice.randrange(256)
        elif change == 1 and raw:
            raw[at] ^= 1 << dice.randrange(8)
        elif change == 2:
            raw[at:at] = dice.randbytes(dice.randrange(1, 9))
        elif change == 3:
            del raw[at : at + dice.randrange(1, 9)]
        elif change == 4:
            raw[at:at] = dice.choice(DIALOGUE)
        else:
            del raw[at:]
    return bytes(raw)


def test_the_dialogue_is_right_as_it_stands() -> None:
    async def main() -> None:
        async with asyncio.timeout(ALWAYS_S), fake_server(DIALOGUE) as port:
            received, answers = await session(port)
        assert [(each.tag, each.body) for each in received] == [(1, b"body"), (2, b""), (3, b"body")]
        assert answers == [(1, 1, "exchange '', routing key 'q': 312 NO_ROUTE", False)]

    asyncio.run(main())


def test_a_mutated_dialogue_always_ends() -> None:
    async def main() -> None:
        for seed in range(200):
            dice = random.Random(seed)
            answers = list(DIALOGUE)
            for _ in range(dice.choice((1, 1, 3))):
                at = dice.randrange(len(answers))
                answers[at] = mutated(answers[at], dice)
            await survive(answers)

    asyncio.run(main())


def test_random_bytes_at_any_step_always_end() -> None:
    async def main() -> None:
        for seed in range(100):
            dice = random.Random(seed)
            step = dice.randrange(len(DIALOGUE))
            await survive([*DIALOGUE[:step], dice.randbytes(dice.randrange(1, 5000))])

    asyncio.run(main())


# -- without a socket: more of it --------------------------------------------------------------------------------------


def fed(data: bytes, step: int) -> Assembly:
    assembly = Assembly(FRAME_MAX)
    with suppress(Malformed):
        for at in range(0, len(data), step):
            assembly.feed(data[at : at + step])
    return assembly


@settings(max_examples=300)
@given(st.binary(max_size=2000), st.integers(1, 500))
def test_random_bytes_are_read_or_malformed(data: bytes, step: int) -> None:
    fed(data, step)


def test_mutated_frames_are_read_or_malformed() -> None:
    whole = b"".join(DIALOGUE)
    for seed in range(3000):
        dice = random.Random(seed)
        fed(mutated(whole, dice), dice.choice((1, 7, 64, 1 << 20)))


@pytest.mark.parametrize(
    "endless",
    [
        lambda: frames.HEARTBEAT_FRAME * 1000,
        lambda: frame(frames.BODY, 1, b"") * 1000,
        lambda: method_frame(1, frames.DELIVER, "c", 1, False, random.randbytes(20).hex(), "key") + content(0),
        lambda: method_frame(1, frames.DELIVER, random.randbytes(20).hex(), 1, False, "", "key") + content(0),
    ],
    ids=["heartbeats", "empty bodies", "new names", "new consumers"],
)
def test_an_endless_server_takes_no_more_memory(endless: Callable[[], bytes]) -> None:
    assembly = Assembly(FRAME_MAX)
    assembly.feed(method_frame(1, frames.DELIVER, "c", 1, False, "exchange", "key") + content(5))
    chunk_count = 10 if len(endless()) > 5000 else 6000
    tracemalloc.start()
    try:
        with suppress(Malformed):  # a method in the middle of a body
            assembly.feed(endless())
            assembly = Assembly(FRAME_MAX)
        for _ in range(chunk_count):
            with suppress(Malformed):
                assembly.feed(endless())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4_000_000


def test_garbage_is_refused_at_once() -> None:
    """A length beyond what was agreed is not waited for."""

    async def main() -> None:
        async with fake_server([b"\x01\x00\x00\xff\xff\xff\xff" + bytes(100)]) as port:
            begun = time.monotonic()
            with pytest.raises(AmqpError, match=r"does not keep to AMQP.*were agreed"):
                await Connection.open(HOST, port, timeout_s=60.0)
            assert time.monotonic() - begun < 1.0

    asyncio.run(main())


def test_a_channel_that_was_never_opened_ends_the_connection() -> None:
    async def main() -> None:
        for answer in (method_frame(9, frames.QOS_OK), method_frame(9, frames.CHANNEL_CLOSE, 404, "", 0, 0)):
            async with fake_server([*DIALOGUE[:3], answer]) as port:
                connection = await Connection.open(HOST, port)
                with suppress(ChannelClosed, ConnectionLost):
                    await connection.channel()
                assert "channel 9" in str(await connection.closing)
                await connection.close()

    asyncio.run(main())
