"""A proxy that reads the AMQP frames which it forwards, and cuts a connection in the middle of a chosen step."""

import asyncio
import struct
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from tests.servers.proxy import CHUNK_BYTES, HOST, Proxy
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.server import free_port

_HEADER_BYTES = 8  # "AMQP" and the version, which a client sends first
_METHOD, _CONTENT_HEADER, _BODY = 1, 2, 3
PUBLISH, DELIVER, ACK, CONSUME, CONSUME_OK = (60, 40), (60, 60), (60, 80), (60, 20), (60, 21)
_LAST_WORDS_S = 2.0


class Frame(NamedTuple):
    """A method with its content, if it has one."""

    from_client: bool
    method: tuple[int, int]  # its class and number; (0, 0): none, such as a heartbeat
    data: bytes

    def has(self, text: str) -> bool:
        """Whether a name or a value in it contains this text."""
        return text.encode() in self.data


Step = Callable[[Frame], bool]


class CuttingProxy(Proxy):
    """`cut_at(step)` cuts the connection on which the next frame of this step is sent."""

    def __init__(self, server: RabbitMQServer) -> None:
        self._step: Step | None = None
        self._delivered = False
        self._did_cut = threading.Event()
        port = free_port()
        super().__init__(port=port, target_port=server.port, url=server.address.format(port=port))

    def cut_at(self, step: Step, *, delivered: bool) -> None:
        """Cut once. `delivered`: the other side still gets the frame; otherwise it is lost with the connection."""
        self._did_cut.clear()
        self._delivered, self._step = delivered, step

    @property
    def has_cut(self) -> bool:
        return self._did_cut.is_set()

    async def _forward(self, reader: StreamReader, writer: StreamWriter) -> None:
        writers = [writer]
        try:
            await self._flowing.wait()
            with suppress(OSError):
                server_reader, server_writer = await asyncio.open_connection(HOST, self._target_port)
                writers.append(server_writer)
                await asyncio.gather(
                    self._carry(reader, server_writer, from_client=True),
                    self._carry(server_reader, writer, from_client=False),
                )
        finally:
            for each in writers:
                each.transport.abort()

    async def _carry(self, source: StreamReader, sink: StreamWriter, *, from_client: bool) -> None:
        splitter = Splitter(from_client=from_client)
        while data := await source.read(CHUNK_BYTES):
            await self._flowing.wait()
            await self._answering.wait()
            for frame in splitter.feed(data):
                if self._step is not None and frame.method != (0, 0) and self._step(frame):
                    await self._cut_off(sink, frame)
                sink.write(frame.data)
            await sink.drain()
        raise ConnectionResetError("one side has closed")

    async def _cut_off(self, sink: StreamWriter, frame: Frame) -> None:
        self._step = None
        if self._delivered:
            sink.write(frame.data)
            sink.write_eof()  # the receiver reads everything, then the end; a reset could take the frame with it
            await asyncio.sleep(_LAST_WORDS_S if not frame.from_client else 0.1)
        self._did_cut.set()
        raise ConnectionResetError("cut")


class Splitter:
    """Splits what one side sends into frames. A method and its content stay together."""

    def __init__(self, *, from_client: bool) -> None:
        self._from_client = from_client
        self._rest = b""
        self._is_new = from_client
        self._open: dict[int, list[bytes]] = {}  # by channel: a method whose content is not complete
        self._missing: dict[int, int] = {}  # by channel: bytes of the content that are still to come

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._rest += data
        if self._is_new and len(self._rest) >= _HEADER_BYTES:
            header, self._rest, self._is_new = self._rest[:_HEADER_BYTES], self._rest[_HEADER_BYTES:], False
            yield Frame(self._from_client, (0, 0), header)
        while not self._is_new and len(self._rest) >= 7:
            size = 8 + struct.unpack_from(">I", self._rest, 3)[0]
            if len(self._rest) < size:
                return
            raw, self._rest = self._rest[:size], self._rest[size:]
            yield from self._frame(raw)

    def _frame(self, raw: bytes) -> Iterator[Frame]:
        kind, channel = struct.unpack_from(">BH", raw)
        if kind == _METHOD:
            method = struct.unpack_from(">HH", raw, 7)
            if method in (PUBLISH, DELIVER, (60, 50)):  # with a returned message
                self._open[channel] = [raw]
                return
            yield Frame(self._from_client, method, raw)
        elif kind in (_CONTENT_HEADER, _BODY) and channel in self._open:
            self._open[channel].append(raw)
            if kind == _CONTENT_HEADER:
                self._missing[channel] = struct.unpack_from(">Q", raw, 11)[0]
            else:
                self._missing[channel] -= len(raw) - 8
            if self._missing[channel] <= 0:
                whole = self._open.pop(channel)
                yield Frame(self._from_client, struct.unpack_from(">HH", whole[0], 7), b"".join(whole))
        else:
            yield Frame(self._from_client, (0, 0), raw)
