"""From the bytes of the server to what they say: deliveries, returned messages, confirms and other methods. Pure.

This is the hot path. A message whose three frames stand in the buffer is read in one go. All others, large ones and
those that a read has cut, go frame by frame through `_Content`.
"""

import struct
from typing import Any, NamedTuple

from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.frames import (
    ACK,
    BASIC,
    BODY,
    DELIVER,
    FRAME_END,
    FRAME_ROOM,
    HEADER,
    HEARTBEAT,
    METHOD,
    NACK,
    RETURN,
    Method,
    decoded_method,
)
from onward.brokers.rabbitmq.amqp.tables import text_of

MAX_BODY_BYTES = 512 * 1024 * 1024  # the most that RabbitMQ can be configured to accept
_MAX_NAMES = 4096

_FRAME = struct.Struct(">BHI").unpack_from
_TAG_AND_BIT = struct.Struct(">QB").unpack_from
_CONTENT = struct.Struct(">BHIHHQ").unpack_from
_SIZE = struct.Struct(">HHQ").unpack_from
_FRAME_BYTES = 7  # before the payload
_CONTENT_BYTES = 19  # of a header frame, before the properties
_LEAST_HEADER = 14  # bytes in the payload of a header frame without properties
_DELIVER_ID, _ACK_ID, _NACK_ID = (struct.pack(">I", each.id) for each in (DELIVER, ACK, NACK))


class Received(NamedTuple):
    """A message for a consumer. `properties`: see frames.properties_of and frames.header_table."""

    tag: int
    redelivered: bool
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    consumer: str


class ReturnedMessage(NamedTuple):
    """A message of ours that went to no queue."""

    code: int
    text: str
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


class Confirm(NamedTuple):
    """The server answers for the publish number `tag`, or for all up to it."""

    tag: int
    multiple: bool
    accepted: bool


class ServerMethod(NamedTuple):
    method: Method
    arguments: tuple[Any, ...]


class Deliveries(list[Received]):
    """Neighbouring deliveries of one channel to one consumer."""


class Answered(list[Confirm | ReturnedMessage]):
    """Neighbouring answers of one channel to what was published on it."""


Arrival = Deliveries | Answered | ServerMethod
_Read = Received | ReturnedMessage | Confirm | ServerMethod | None


class _Content:
    """A message whose frames have not all arrived."""

    __slots__ = ("body", "has_header", "left", "method", "properties")

    def __init__(self, method: Received | ReturnedMessage) -> None:
        self.method = method
        self.has_header = False
        self.properties = b""
        self.left = 0
        self.body: list[bytes] = []


class Assembly:
    """Takes the bytes of one connection as they come."""

    def __init__(self, frame_max: int) -> None:
        self._largest = frame_max - FRAME_ROOM
        self._tail: list[bytes] = []  # of a frame that is not complete
        self._missing = 0  # bytes until the frame can be complete
        self._contents: dict[int, _Content] = {}
        self._consumers: dict[bytes, str] = {}
        self._names: dict[bytes, tuple[str, str]] = {}

    def feed(self, data: bytes) -> list[tuple[int, Arrival]]:
        """What these bytes complete, each with its channel. The order within a channel is that of the server.

        Neighbouring deliveries to one consumer come as one list. Raises Malformed; the assembly is then of no use.
        """
        self._tail.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return []
        if len(self._tail) > 1:
            data = b"".join(self._tail)
        try:
            found, at = self._read(data)
        except (struct.error, IndexError) as error:
            raise Malformed("a frame is cut off") from error
        rest = data[at:]
        self._tail = [rest] if rest else []
        whole = _FRAME(rest)[2] + FRAME_ROOM if len(rest) >= _FRAME_BYTES else _FRAME_BYTES
        self._missing = whole - len(rest)
        return found

    def _read(self, data: bytes) -> tuple[list[tuple[int, Arrival]], int]:
        """Read all whole frames. Returns what they say, and where the first incomplete frame begins."""
        found: list[tuple[int, Arrival]] = []
        batches: dict[int, Deliveries | Answered] = {}  # by channel: the list that its next message may go to
        contents, largest = self._contents, self._largest
        read: _Read
        at, end = 0, len(data)
        while end - at >= _FRAME_BYTES:
            kind, channel, size = _FRAME(data, at)
            after = at + size + FRAME_ROOM
            if size > largest:
                raise Malformed(f"a frame of type {kind} and {size} bytes, and at most {largest} were agreed")
            if after > end:
                break
            if data[after - 1] != FRAME_END:
                raise Malformed("a frame does not end where its size says")
            if kind == METHOD and data[at + 7 : at + 11] == _DELIVER_ID and channel not in contents:
                read, at = self._delivery(data, at, after, channel)
            else:
                read, at = self._frame(kind, channel, data[at + 7 : after - 1]), after
            batch = batches.get(channel)
            if isinstance(read, Received):
                if type(batch) is Deliveries and batch[0].consumer == read.consumer:
                    batch.append(read)
                else:
                    batches[channel] = batch = Deliveries((read,))
                    found.append((channel, batch))
            elif isinstance(read, ServerMethod):
                batches.pop(channel, None)
                found.append((channel, read))
            elif read is not None:
                if type(batch) is Answered:
                    batch.append(read)
                else:
                    batches[channel] = batch = Answered((read,))
                    found.append((channel, batch))
        return found, at

    def _delivery(self, data: bytes, at: int, after: int, channel: int) -> tuple[Received | None, int]:
        """Read a delivery whose method frame is at `at`: all of it, or only this frame if the others are not here."""
        tag_at = at + 12 + data[at + 11]
        tag, bits = _TAG_AND_BIT(data, tag_at)
        names = data[tag_at + 9 : after - 1]
        exchange, key = self._names.get(names) or self._named(names)
        consumer = self._consumers.get(data[at + 12 : tag_at]) or self._consumer(data[at + 12 : tag_at])
        end = len(data)
        if end - after >= _CONTENT_BYTES:
            kind, where, size, family, _, body_size = _CONTENT(data, after)
            body_at = after + size + FRAME_ROOM
            if kind == HEADER and where == channel and family == BASIC and _LEAST_HEADER <= size <= self._largest:
                properties = data[after + _CONTENT_BYTES : body_at - 1]
                if body_size == 0 and body_at <= end and data[body_at - 1] == FRAME_END:
                    return Received(tag, bits & 1 == 1, exchange, key, properties, b"", consumer), body_at
                if end - body_at >= _FRAME_BYTES and data[body_at - 1] == FRAME_END:
                    kind, where, size = _FRAME(data, body_at)
                    last = body_at + size + _FRAME_BYTES
                    if (
                        kind == BODY
                        and where == channel
                        and size == body_size
                        and last < end
                        and data[last] == FRAME_END
                    ):
                        body = data[body_at + _FRAME_BYTES : last]
                        return Received(tag, bits & 1 == 1, exchange, key, properties, body, consumer), last + 1
        self._contents[channel] = _Content(Received(tag, bits & 1 == 1, exchange, key, b"", b"", consumer))
        return None, after

    def _named(self, raw: bytes) -> tuple[str, str]:
        """The exchange and the routing key of a delivery. Few differ, so they are remembered."""
        middle = 1 + raw[0]
        if middle + 1 + raw[middle] != len(raw):
            raise Malformed("basic.deliver is cut off")
        if len(self._names) >= _MAX_NAMES:
            self._names.clear()
        named = self._names[raw] = text_of(raw[1:middle]), text_of(raw[middle + 1 :])
        return named

    def _consumer(self, raw: bytes) -> str:
        if len(self._consumers) >= _MAX_NAMES:
            self._consumers.clear()
        consumer = self._consumers[raw] = text_of(raw)
        return consumer

    def _frame(self, kind: int, channel: int, payload: bytes) -> _Read:
        content = self._contents.get(channel)
        if kind == METHOD and content is None:
            return self._method(channel, payload)
        if kind == HEADER and content is not None and not content.has_header:
            return self._header(channel, content, payload)
        if kind == BODY and content is not None and content.has_header:
            return self._body(channel, content, payload)
        if kind == HEARTBEAT and channel == 0 and not payload:
            return None
        raise Malformed(f"a frame of type {kind} on channel {channel} that may not come here")

    def _method(self, channel: int, payload: bytes) -> ReturnedMessage | Confirm | ServerMethod | None:
        if len(payload) == 13 and payload[:4] in (_ACK_ID, _NACK_ID):
            tag, bits = _TAG_AND_BIT(payload, 4)
            return Confirm(tag, bits & 1 == 1, payload[:4] == _ACK_ID)
        method, arguments = decoded_method(payload)
        if method is RETURN:
            self._contents[channel] = _Content(ReturnedMessage(*(*arguments, b"", b"")))
            return None
        return ServerMethod(method, arguments)

    def _header(self, channel: int, content: _Content, payload: bytes) -> Received | ReturnedMessage | None:
        family, _, size = _SIZE(payload)
        if family != BASIC or len(payload) < _LEAST_HEADER or size > MAX_BODY_BYTES:
            raise Malformed(f"a content header of class {family} for {size} bytes")
        content.has_header = True
        content.properties = payload[12:]
        content.left = size
        return None if size else self._complete(channel, content)

    def _body(self, channel: int, content: _Content, payload: bytes) -> Received | ReturnedMessage | None:
        if len(payload) > content.left:
            raise Malformed(f"a body is {len(payload) - content.left} bytes longer than its header says")
        if payload:
            content.body.append(payload)
            content.left -= len(payload)
        return None if content.left else self._complete(channel, content)

    def _complete(self, channel: int, content: _Content) -> Received | ReturnedMessage:
        del self._contents[channel]
        return content.method._replace(properties=content.properties, body=b"".join(content.body))
