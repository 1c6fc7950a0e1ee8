"""A server that speaks AMQP by a script: it sends the next answer whenever the client has written."""

import asyncio
import ssl as tls
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from onward.brokers.rabbitmq.amqp import Properties, encoded_properties, frames
from onward.brokers.rabbitmq.amqp.frames import frame, method_frame

HOST = "127.0.0.1"
FRAME_MAX = 131072
MESSAGE = encoded_properties(Properties(headers={"a": 1, "b": ["x", None]}, message_id="id", timestamp=7))


def content(size: int) -> bytes:
    return frame(frames.HEADER, 1, b"\x00\x3c\x00\x00" + size.to_bytes(8, "big") + MESSAGE)


def delivery(tag: int, body: bytes = b"body") -> bytes:
    method = method_frame(1, frames.DELIVER, "c", tag, False, "exchange", "key")
    halves = (body[: len(body) // 2], body[len(body) // 2 :]) if body else ()
    return method + content(len(body)) + b"".join(frame(frames.BODY, 1, half) for half in halves)


RETURNED = method_frame(1, frames.RETURN, 312, "NO_ROUTE", "", "q") + content(4) + frame(frames.BODY, 1, b"body")
ACKED = method_frame(1, frames.ACK, 1, False)
DECLARED = method_frame(1, frames.QUEUE_DECLARE_OK, "q", 3, 1)

# What a server answers to the steps of a client, one after the other.
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
async def fake_server(
    answers: list[bytes], *, patience_s: float, ssl: tls.SSLContext | None = None
) -> AsyncIterator[int]:
    """Sends the next answer whenever the client has written, or after `patience_s`, then closes. Yields the port."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        over.clear()
        with suppress(OSError):
            for answer in answers:
                await heard(reader, patience_s)
                writer.write(answer)
            while await heard(reader, patience_s):
                pass
        writer.transport.abort()
        over.set()

    over = asyncio.Event()
    over.set()
    server = await asyncio.start_server(serve, HOST, ssl=ssl)
    try:
        yield server.sockets[0].getsockname()[1]
        await over.wait()
    finally:
        server.close()
        await server.wait_closed()


async def heard(reader: StreamReader, patience_s: float) -> bytes:
    try:
        async with asyncio.timeout(patience_s):
            return await reader.read(1 << 16)
    except TimeoutError:
        return b""
