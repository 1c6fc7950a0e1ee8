"""AMQP 0.9.1 written by hand, over a blocking socket: the least that a client has to do.

It fills queues for every contestant, and it is the limit that Onward is compared with. It opens no second connection,
sends no heartbeats and never reconnects.
"""

import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

METHOD, HEADER, BODY, END = 1, 2, 3, b"\xce"
FRAME_MAX = 131_072
CHANNEL_MAX = 2_047
RECV_BYTES = 1 << 20
TIMEOUT_S = 60.0
WINDOW = 2_000  # messages that are sent and not confirmed yet
BURST = 500  # messages in one write
PUBLISHING = 1_000  # the number of a channel

Command = tuple[int, int]  # class and method
CONNECTION_START, CONNECTION_TUNE, CONNECTION_OPENED, CONNECTION_CLOSED = (10, 10), (10, 30), (10, 41), (10, 51)
CONNECTION_CLOSE, CHANNEL_CLOSE, CHANNEL_CLOSED, CHANNEL_OPENED = (10, 50), (20, 40), (20, 41), (20, 11)
EXCHANGE_DECLARED, QUEUE_DECLARED, QUEUE_BOUND, QUEUE_DELETED = (40, 11), (50, 11), (50, 21), (50, 41)
QOS_SET, DELIVERED, RETURNED, ACKED, NACKED, CONFIRMING = (60, 11), (60, 60), (60, 50), (60, 80), (60, 120), (85, 11)

Arguments = Mapping[str, str | int | bool]
Handle = Callable[[bytes], Awaitable[None]]

_prefix = struct.Struct(">BHI")
_quad = struct.Struct(">Q")


class Refused(Exception):
    """The server closed the channel or the connection, returned a message, or did not confirm one."""


class Outgoing(NamedTuple):
    """A message to publish. `properties`: the content header after the body's size, that is flags and fields."""

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


class QueueState(NamedTuple):
    ready: int
    consumers: int


class Wire:
    """One connection. Its channels are numbers that the caller chooses, from 1 on."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        login = f"\0{unquote(parts.username or 'guest')}\0{unquote(parts.password or 'guest')}".encode()
        self.socket = socket.create_connection((parts.hostname or "localhost", parts.port or 5672), TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rest = b""  # bytes that were received and belong to no whole frame yet
        self.socket.sendall(b"AMQP\0\0\x09\x01")
        self._expect(0, CONNECTION_START)
        start = long(b"") + short("PLAIN") + long(login) + short("en_US")
        self.ask(0, (10, 11), start, CONNECTION_TUNE)
        self.socket.sendall(method(0, (10, 31), struct.pack(">HIH", CHANNEL_MAX, FRAME_MAX, 0)))
        self.ask(0, (10, 40), short(unquote(parts.path[1:]) or "/") + short("") + b"\0", CONNECTION_OPENED)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self.socket:
            if error is None:
                self.ask(0, CONNECTION_CLOSE, struct.pack(">H", 200) + short("") + bytes(4), CONNECTION_CLOSED)

    def ask(self, channel: int, command: Command, arguments: bytes, answer: Command) -> bytes:
        """Send a method and return the arguments of the answer. Everything else that arrives before it is dropped."""
        self.socket.sendall(method(channel, command, arguments))
        return self._expect(channel, answer)

    def _expect(self, channel: int, answer: Command) -> bytes:
        while True:
            kind, number, payload = self.frame()
            command = struct.unpack_from(">HH", payload) if kind == METHOD else None
            if (number, command) == (channel, answer):
                return payload[4:]
            if command in (CONNECTION_CLOSE, CHANNEL_CLOSE):
                raise Refused(_reason(payload[4:]))

    def frame(self) -> tuple[int, int, bytes]:
        """Wait for the next frame: its kind, channel and payload."""
        while True:
            if len(self.rest) >= 7:
                kind, channel, size = _prefix.unpack_from(self.rest)
                if len(self.rest) >= size + 8:
                    payload, self.rest = self.rest[7 : 7 + size], self.rest[size + 8 :]
                    return kind, channel, payload
            self.rest += self.receive()

    def receive(self) -> bytes:
        data = self.socket.recv(RECV_BYTES)
        if not data:
            raise Refused("the server closed the connection")
        return data

    def open(self, channel: int = 1) -> None:
        self.ask(channel, (20, 10), short(""), CHANNEL_OPENED)

    def close(self, channel: int = 1) -> None:
        """The server has handled every acknowledgement of this channel when this returns."""
        self.ask(channel, CHANNEL_CLOSE, struct.pack(">H", 200) + short("") + bytes(4), CHANNEL_CLOSED)

    def declare(self, queue: str, arguments: Arguments, channel: int = 1) -> None:
        flags = b"\x02"  # durable
        self.ask(channel, (50, 10), bytes(2) + short(queue) + flags + table(arguments), QUEUE_DECLARED)

    def look(self, queue: str, channel: int = 1) -> QueueState:
        """A passive declare."""
        found = self.ask(channel, (50, 10), bytes(2) + short(queue) + b"\x01" + table({}), QUEUE_DECLARED)
        return QueueState(*struct.unpack(">II", found[-8:]))

    def delete(self, queue: str, channel: int = 1) -> None:
        self.ask(channel, (50, 40), bytes(2) + short(queue) + b"\0", QUEUE_DELETED)

    def declare_topic_exchange(self, name: str, channel: int = 1) -> None:
        self.ask(channel, (40, 10), bytes(2) + short(name) + short("topic") + b"\x02" + table({}), EXCHANGE_DECLARED)

    def bind(self, queue: str, exchange: str, key: str, channel: int = 1) -> None:
        self.ask(
            channel,
            (50, 20),
            bytes(2) + short(queue) + short(exchange) + short(key) + b"\0" + table({}),
            QUEUE_BOUND,
        )


# -- publishing ----------------------------------------------------------------------------------------------------


def publish(wire: Wire, messages: Iterable[Outgoing]) -> None:
    """Publish them in bursts on a channel of their own. Returns when the server has confirmed all of them."""
    wire.open(PUBLISHING)
    wire.ask(PUBLISHING, (85, 10), b"\0", CONFIRMING)
    _publish(wire, [published(PUBLISHING, message) for message in messages])
    wire.close(PUBLISHING)


def published(channel: int, message: Outgoing) -> bytes:
    """The frames of one message. A message that no queue gets is returned."""
    where = bytes(2) + short(message.exchange) + short(message.routing_key) + b"\x01"  # mandatory
    header = struct.pack(">HHQ", 60, 0, len(message.body)) + message.properties
    return method(channel, (60, 40), where) + frame(HEADER, channel, header) + frame(BODY, channel, message.body)


def _publish(wire: Wire, frames: Sequence[bytes]) -> None:
    sent, open_ = 0, 0
    confirmed: set[int] = set()  # single answers above the lowest open number
    while open_ < len(frames):
        while sent < len(frames) and sent - open_ <= WINDOW - BURST:
            wire.socket.sendall(b"".join(frames[sent : sent + BURST]))
            sent = min(sent + BURST, len(frames))
        kind, _, payload = wire.frame()
        command = struct.unpack_from(">HH", payload) if kind == METHOD else None
        if command == ACKED:
            number, multiple = struct.unpack_from(">QB", payload, 4)
            open_ = _counted(open_, confirmed, number, bool(multiple))
        elif command is not None:
            raise Refused("the server did not store a message" if command == NACKED else _reason(payload[4:]))


def _counted(open_: int, confirmed: set[int], number: int, multiple: bool) -> int:
    """How many messages from the first on are confirmed."""
    if multiple and number > open_:
        confirmed -= set(range(open_ + 1, number + 1))
        open_ = number
    elif number > open_:
        confirmed.add(number)
    while open_ + 1 in confirmed:
        open_ += 1
        confirmed.discard(open_)
    return open_


# -- consuming -----------------------------------------------------------------------------------------------------


async def consume(
    wire: Wire, queues: Sequence[str], arguments: Arguments, prefetch: int, handle: Handle, is_over: Callable[[], bool]
) -> None:
    """Handle the messages of these queues until `is_over`, a channel for each queue. A quarter of the prefetch is
    acknowledged at once, after the handlers of these messages have returned."""
    channels = range(1, len(queues) + 1)
    for channel in channels:
        wire.open(channel)
        wire.ask(channel, (60, 10), struct.pack(">IHB", 0, prefetch, 0), QOS_SET)
    for channel, queue in zip(channels, queues, strict=True):
        where = bytes(2) + short(queue) + short(f"bare-{channel}") + b"\0" + table(arguments)
        wire.socket.sendall(method(channel, (60, 20), where))
    await _deliveries(wire, len(queues), prefetch // 4, handle, is_over)
    for channel in channels:
        wire.close(channel)


async def _deliveries(wire: Wire, channels: int, step: int, handle: Handle, is_over: Callable[[], bool]) -> None:
    """The hot loop. Frames are looked at in the buffer; only bodies are copied. A body is one frame."""
    tags, open_ = [0] * (channels + 1), [0] * (channels + 1)
    prefix, quad, deliver = _prefix.unpack_from, _quad.unpack_from, struct.pack(">HH", *DELIVERED)
    rest, receive = wire.rest, wire.receive
    while not is_over():
        data, at = rest + receive(), 0
        end = len(data)
        while end - at >= 7:
            kind, channel, size = prefix(data, at)
            next_ = at + size + 8
            if next_ > end:
                break
            if kind == BODY:
                await handle(data[at + 7 : next_ - 1])
                open_[channel] += 1
            elif kind == METHOD:
                if data[at + 7 : at + 11] == deliver:
                    tags[channel] = quad(data, at + 12 + data[at + 11])[0]
                elif struct.unpack_from(">HH", data, at + 7) in (CONNECTION_CLOSE, CHANNEL_CLOSE):
                    raise Refused(_reason(data[at + 11 : next_]))
            at = next_
        rest = data[at:]
        done = [channel for channel, count in enumerate(open_) if count >= step or (count and is_over())]
        if done:
            wire.socket.sendall(b"".join([acked(channel, tags[channel]) for channel in done]))
            for channel in done:
                open_[channel] = 0
    wire.rest = rest


def acked(channel: int, tag: int) -> bytes:
    """Acknowledge everything up to this tag."""
    return method(channel, ACKED, struct.pack(">QB", tag, 1))


# -- encoding ------------------------------------------------------------------------------------------------------


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return _prefix.pack(kind, channel, len(payload)) + payload + END


def method(channel: int, command: Command, arguments: bytes) -> bytes:
    return frame(METHOD, channel, struct.pack(">HH", *command) + arguments)


def short(text: str) -> bytes:
    encoded = text.encode()
    return bytes([len(encoded)]) + encoded


def long(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def table(fields: Arguments) -> bytes:
    return long(b"".join([short(name) + _field(value) for name, value in fields.items()]))


def _field(value: str | int | bool) -> bytes:
    if isinstance(value, bool):
        return b"t" + bytes([value])
    return b"l" + struct.pack(">q", value) if isinstance(value, int) else b"S" + long(value.encode())


def plain_properties(headers: Arguments, message_id: str, type_: str) -> bytes:
    """JSON, persistent, with headers, an id, a time and a type: what a usual publisher sets."""
    flags = 0x8000 | 0x2000 | 0x1000 | 0x0080 | 0x0040 | 0x0020
    fields = short("application/json") + table(headers) + b"\x02" + short(message_id)
    return struct.pack(">H", flags) + fields + _quad.pack(1_700_000_000) + short(type_)


def _reason(arguments: bytes) -> str:
    """The code and the text of a close or a return."""
    (code,) = struct.unpack_from(">H", arguments)
    return f"{code} {arguments[3 : 3 + arguments[2]].decode(errors='replace')}"
