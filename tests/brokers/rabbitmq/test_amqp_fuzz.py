"""A server that sends garbage, or almost the right bytes: every connection and every call ends, with an AmqpError."""

import asyncio
import random
import ssl as tls
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.brokers.rabbitmq.amqp import (
    AmqpError,
    ChannelClosed,
    ConnectFailed,
    Connection,
    ConnectionLost,
    Outbound,
    PublishAnswer,
    Received,
    frames,
)
from onward.brokers.rabbitmq.amqp.assembly import Assembly
from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.frames import frame, method_frame
from tests.brokers.rabbitmq.fake_amqp import (
    DECLARED,
    DIALOGUE,
    FRAME_MAX,
    HOST,
    MESSAGE,
    content,
    delivery,
    fake_server,
)

ALWAYS_S = 5.0  # whatever the server does, all is over by then
HASTE_S = 0.01
OUT = Outbound("", "q", MESSAGE, b"body")


async def session(port: int, **options: Any) -> tuple[list[Received], list[PublishAnswer]]:
    """Uses what the brokers use. Whatever comes, each call returns or raises, and all answers add up."""
    received: list[Received] = []
    answers: list[PublishAnswer] = []
    numbers = 0
    connection = await Connection.open(HOST, port, timeout_s=ALWAYS_S, **options)
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
    async with asyncio.timeout(ALWAYS_S), fake_server(answers, patience_s=HASTE_S) as port:
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
        async with asyncio.timeout(ALWAYS_S), fake_server(DIALOGUE, patience_s=ALWAYS_S) as port:
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


def named(consumer: str, exchange: str) -> bytes:
    return method_frame(1, frames.DELIVER, consumer, 1, False, exchange, "key")


@pytest.mark.parametrize(
    ("start", "endless", "times"),
    [
        (b"", lambda: frames.HEARTBEAT_FRAME * 1000, 10),
        (named("c", "") + content(5), lambda: frame(frames.BODY, 1, b"") * 1000, 10),
        (b"", lambda: named("c", random.randbytes(99).hex()) + content(0), 10_000),
        (b"", lambda: named(random.randbytes(99).hex(), "") + content(0), 10_000),
    ],
    ids=["heartbeats", "empty bodies", "new exchanges", "new consumers"],
)
def test_an_endless_server_takes_no_more_memory(start: bytes, endless: Callable[[], bytes], times: int) -> None:
    assembly = Assembly(FRAME_MAX)
    assembly.feed(start)
    tracemalloc.start()
    try:
        for _ in range(times):
            assembly.feed(endless())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4_000_000


def test_garbage_is_refused_at_once() -> None:
    """A length beyond what was agreed is not waited for."""

    async def main() -> None:
        async with fake_server([b"\x01\x00\x00\xff\xff\xff\xff" + bytes(100)], patience_s=ALWAYS_S) as port:
            begun = time.monotonic()
            with pytest.raises(AmqpError, match=r"does not keep to AMQP.*were agreed"):
                await Connection.open(HOST, port, timeout_s=60.0)
            assert time.monotonic() - begun < 1.0

    asyncio.run(main())


def test_a_channel_that_was_never_opened_ends_the_connection() -> None:
    async def main() -> None:
        for answer in (method_frame(9, frames.QOS_OK), method_frame(9, frames.CHANNEL_CLOSE, 404, "", 0, 0)):
            async with fake_server([*DIALOGUE[:3], answer], patience_s=ALWAYS_S) as port:
                connection = await Connection.open(HOST, port)
                with suppress(ChannelClosed, ConnectionLost):
                    await connection.channel()
                assert "channel 9" in str(await connection.closing)
                await connection.close()

    asyncio.run(main())


def test_a_delivery_without_a_consumer_ends_the_connection() -> None:
    """In silence the message would stay unacknowledged for ever."""

    async def main() -> None:
        async with fake_server([*DIALOGUE[:4], DECLARED + delivery(1)], patience_s=ALWAYS_S) as port:
            connection = await Connection.open(HOST, port)
            await (await connection.channel()).declare_queue("q")
            assert "'c', which is no consumer" in str(await connection.closing)
            await connection.close()

    asyncio.run(main())


def test_the_same_over_tls_with_a_certificate_that_is_checked() -> None:
    authority = trustme.CA()
    server = tls.SSLContext(tls.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(server)
    trusting = tls.create_default_context()
    authority.configure_trust(trusting)

    async def main() -> None:
        async with asyncio.timeout(ALWAYS_S), fake_server(DIALOGUE, patience_s=ALWAYS_S, ssl=server) as port:
            received, _ = await session(port, ssl=trusting)
        assert len(received) == 3
        async with asyncio.timeout(ALWAYS_S), fake_server([], patience_s=ALWAYS_S, ssl=server) as port:
            with pytest.raises(ConnectFailed, match=r"cannot be reached: .*CERTIFICATE_VERIFY_FAILED"):
                await session(port, ssl=tls.create_default_context())
            with pytest.raises(ConnectFailed):
                await session(port)  # without TLS

    asyncio.run(main())
