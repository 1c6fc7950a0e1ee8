"""Frames, methods and message properties of AMQP 0.9.1, as far as this client uses them. Pure."""

import struct
from typing import Any, NamedTuple

import msgspec

from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.tables import decoded_table, encoded_table, long_string, short_string, text_of

PROTOCOL = b"AMQP\x00\x00\x09\x01"
METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = 0xCE
FRAME_ROOM = 8  # bytes of a frame around its payload
BASIC = 60

_FRAME = struct.Struct(">BHI")
_SHORT, _LONG, _LONGLONG = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")


class Method(NamedTuple):
    """A method and the types of its arguments: B, H, I, Q are unsigned numbers of 1, 2, 4, 8 bytes, s and S a short and
    a long string, t a table, and b a bit. Bits beside each other share a byte."""

    name: str
    family: int
    number: int
    fields: str = ""

    @property
    def id(self) -> int:
        return self.family << 16 | self.number


START = Method("connection.start", 10, 10, "BBtSS")
START_OK = Method("connection.start-ok", 10, 11, "tsSs")
TUNE = Method("connection.tune", 10, 30, "HIH")
TUNE_OK = Method("connection.tune-ok", 10, 31, "HIH")
OPEN = Method("connection.open", 10, 40, "ssb")
OPEN_OK = Method("connection.open-ok", 10, 41, "s")
CLOSE = Method("connection.close", 10, 50, "HsHH")
CLOSE_OK = Method("connection.close-ok", 10, 51)
BLOCKED = Method("connection.blocked", 10, 60, "s")
UNBLOCKED = Method("connection.unblocked", 10, 61)
CHANNEL_OPEN = Method("channel.open", 20, 10, "s")
CHANNEL_OPEN_OK = Method("channel.open-ok", 20, 11, "S")
CHANNEL_CLOSE = Method("channel.close", 20, 40, "HsHH")
CHANNEL_CLOSE_OK = Method("channel.close-ok", 20, 41)
EXCHANGE_DECLARE = Method("exchange.declare", 40, 10, "Hssbbbbbt")
EXCHANGE_DECLARE_OK = Method("exchange.declare-ok", 40, 11)
EXCHANGE_DELETE = Method("exchange.delete", 40, 20, "Hsbb")
EXCHANGE_DELETE_OK = Method("exchange.delete-ok", 40, 21)
EXCHANGE_BIND = Method("exchange.bind", 40, 30, "Hsssbt")
EXCHANGE_BIND_OK = Method("exchange.bind-ok", 40, 31)
EXCHANGE_UNBIND = Method("exchange.unbind", 40, 40, "Hsssbt")
EXCHANGE_UNBIND_OK = Method("exchange.unbind-ok", 40, 51)
QUEUE_DECLARE = Method("queue.declare", 50, 10, "Hsbbbbbt")
QUEUE_DECLARE_OK = Method("queue.declare-ok", 50, 11, "sII")
QUEUE_BIND = Method("queue.bind", 50, 20, "Hsssbt")
QUEUE_BIND_OK = Method("queue.bind-ok", 50, 21)
QUEUE_DELETE = Method("queue.delete", 50, 40, "Hsbbb")
QUEUE_DELETE_OK = Method("queue.delete-ok", 50, 41, "I")
QUEUE_UNBIND = Method("queue.unbind", 50, 50, "Hssst")
QUEUE_UNBIND_OK = Method("queue.unbind-ok", 50, 51)
QOS = Method("basic.qos", BASIC, 10, "IHb")
QOS_OK = Method("basic.qos-ok", BASIC, 11)
CONSUME = Method("basic.consume", BASIC, 20, "Hssbbbbt")
CONSUME_OK = Method("basic.consume-ok", BASIC, 21, "s")
CANCEL = Method("basic.cancel", BASIC, 30, "sb")
CANCEL_OK = Method("basic.cancel-ok", BASIC, 31, "s")
PUBLISH = Method("basic.publish", BASIC, 40, "Hssbb")
RETURN = Method("basic.return", BASIC, 50, "Hsss")
DELIVER = Method("basic.deliver", BASIC, 60, "sQbss")
ACK = Method("basic.ack", BASIC, 80, "Qb")
NACK = Method("basic.nack", BASIC, 120, "Qbb")
CONFIRM_SELECT = Method("confirm.select", 85, 10, "b")
CONFIRM_SELECT_OK = Method("confirm.select-ok", 85, 11)

METHODS = {each.id: each for each in list(globals().values()) if isinstance(each, Method)}


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return _FRAME.pack(kind, channel, len(payload)) + payload + b"\xce"


HEARTBEAT_FRAME = frame(HEARTBEAT, 0, b"")


def method_frame(channel: int, method: Method, *arguments: Any) -> bytes:
    return frame(METHOD, channel, encoded_method(method, *arguments))


def encoded_method(method: Method, *arguments: Any) -> bytes:
    """The payload of a method frame."""
    parts = [struct.pack(">HH", method.family, method.number)]
    bits = used = 0
    for kind, value in zip(method.fields, arguments, strict=True):
        if kind == "b":
            bits |= bool(value) << used
            used += 1
            continue
        if used:
            parts.append(bytes((bits,)))
            bits = used = 0
        parts.append(_argument(kind, value))
    if used:
        parts.append(bytes((bits,)))
    return b"".join(parts)


def _argument(kind: str, value: Any) -> bytes:
    match kind:
        case "s":
            return short_string(value)
        case "S":
            return long_string(value)
        case "t":
            return encoded_table(value)
        case _:
            return struct.pack(f">{kind}", value)


def decoded_method(payload: bytes) -> tuple[Method, tuple[Any, ...]]:
    """The method of a frame and its arguments. Raises Malformed if it is unknown or cut off."""
    method = METHODS.get(_LONG.unpack_from(payload)[0]) if len(payload) >= 4 else None
    if method is None:
        raise Malformed(f"a method that this client does not know: {payload[:4].hex()}")
    found: list[Any] = []
    at, bit = 4, 0
    try:
        for kind in method.fields:
            if kind == "b":
                at, bit = (at, bit) if bit else (at + 1, 1)
                found.append(bool(payload[at - 1] & bit))
                bit <<= 1
                continue
            bit = 0
            value, at = _read(kind, payload, at)
            found.append(value)
    except (struct.error, IndexError) as error:
        raise Malformed(f"{method.name} is cut off") from error
    if at != len(payload):
        raise Malformed(f"{method.name} has {len(payload)} bytes, and its arguments {at}")
    return method, tuple(found)


def _read(kind: str, raw: bytes, at: int) -> tuple[Any, int]:
    """The argument at `at`, and where the next one begins. The caller checks that it lies within the frame."""
    match kind:
        case "s":
            end = at + 1 + raw[at]
            return text_of(raw[at + 1 : end]), end
        case "S" | "t":
            start = at + 4
            end = start + _LONG.unpack_from(raw, at)[0]
            if end > len(raw):
                raise IndexError
            return (raw[start:end] if kind == "S" else decoded_table(raw[start:end])), end
        case _:
            return struct.unpack_from(f">{kind}", raw, at)[0], at + struct.calcsize(f">{kind}")


class Properties(msgspec.Struct, frozen=True):
    """The properties of a message; None where absent. `timestamp` is in seconds."""

    content_type: str | None = None
    content_encoding: str | None = None
    headers: dict[str, Any] | None = None
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: int | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None


# In the order of their flags, from the highest bit on.
PROPERTY_FIELDS = tuple(
    zip(Properties.__struct_fields__, "sstBBssssQssss", (1 << bit for bit in range(15, 1, -1)), strict=True)
)
_HEADERS_FLAG = 1 << 13
_MESSAGE_ID_FLAG = 1 << 7
_WIDTHS = {"B": 1, "Q": 8}


def encoded_properties(properties: Properties) -> bytes:
    """As they stand in a content header: the flags, then the fields."""
    flags, parts = 0, [b""]
    for name, kind, flag in PROPERTY_FIELDS:
        value = getattr(properties, name)
        if value is not None:
            flags |= flag
            parts.append(_argument(kind, value))
    parts[0] = _SHORT.pack(flags)
    return b"".join(parts)


def properties_of(raw: bytes) -> Properties:
    """Decode `Received.properties`. Raises Malformed if they are cut off."""
    try:
        flags, at = _flags(raw), 2
        found: dict[str, Any] = {}
        for name, kind, flag in PROPERTY_FIELDS:
            if flags & flag:
                found[name], at = _read(kind, raw, at)
    except (struct.error, IndexError) as error:
        raise Malformed("the properties of a message are cut off") from error
    if at != len(raw):
        raise Malformed(f"the properties of a message have {len(raw)} bytes, and their fields {at}")
    return Properties(**found)


def header_table(raw: bytes) -> bytes:
    """The entries of the headers in `Received.properties`, undecoded and without their length; empty if absent."""
    start, end = _extent(raw, _HEADERS_FLAG)
    return raw[start + 4 : end]


def message_id(raw: bytes) -> bytes:
    """The message id in `Received.properties`; empty if absent."""
    start, end = _extent(raw, _MESSAGE_ID_FLAG)
    return raw[start + 1 : end]


def _extent(raw: bytes, wanted: int) -> tuple[int, int]:
    """Where the property with this flag begins and ends; the same place twice if it is absent."""
    try:
        flags, at = _flags(raw), 2
        if not flags & wanted:
            return at, at
        for _, kind, flag in PROPERTY_FIELDS:
            if flags & flag:
                end = field_end(kind, raw, at)
                if flag == wanted:
                    if end > len(raw):
                        break
                    return at, end
                at = end
    except (struct.error, IndexError) as error:
        raise Malformed("the properties of a message are cut off") from error
    raise Malformed("the properties of a message are cut off")


def field_end(kind: str, raw: bytes, at: int) -> int:
    """Where the property of this kind at `at` ends. It may be beyond the end of `raw`."""
    match kind:
        case "s":
            return at + 1 + raw[at]
        case "t":
            end: int = at + 4 + _LONG.unpack_from(raw, at)[0]
            return end
        case _:
            return at + _WIDTHS[kind]


def _flags(raw: bytes) -> int:
    flags: int = _SHORT.unpack_from(raw)[0]
    if flags & 3:
        raise Malformed("a message has properties that AMQP 0.9.1 does not know")
    return flags
