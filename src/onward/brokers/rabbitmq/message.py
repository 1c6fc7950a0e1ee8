"""Events as messages, and back. Pure.

The key, the time of sending and CloudEvents' attributes are headers of the message; id, type and time are also in its
properties, for other programs. Names that the server or Onward give a meaning to (`CC`, `x-…`, `onward-…`) travel with
a prefix if an event has them as headers of its own. A stream returns headers sorted by name.
"""

import logging
import struct
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from onward.brokers.core.cloudevents import RESERVED, Header, event_of, headers_of, own_headers, text
from onward.brokers.core.late_event import HEADERS, TIME, TYPE, LateEvent
from onward.brokers.rabbitmq.amqp import AmqpError, Properties, Received, properties_of
from onward.brokers.rabbitmq.amqp.tables import decoded_table
from onward.brokers.rabbitmq.names import MAX_NAME_BYTES, MAX_TYPE_BYTES
from onward.errors import TooLarge, Unserialisable
from onward.event import Event, text_bytes

log = logging.getLogger("onward")

KEY, AT, TOMBSTONE, FOUNDING = "onward-key", "onward-at", "onward-tombstone", "onward-founding"
PRIORITY = "onward-priority"  # a header of the event, which sets the message's priority
OFFSET = "x-stream-offset"
MAX_PROPERTIES_BYTES = 120_000  # they must fit into one frame, also after the server has added headers
JSON, BINARY = "application/json", "application/octet-stream"

_PREFIX = "onward-header."
_EXPIRES = "onward-expires"  # other programs may set it too
_OURS = ("onward-", "x-")
_ROUTING = frozenset({"CC", "BCC"})  # the server sends copies of the message to the queues that these name
_JSON_STARTS = frozenset(b'{["-0123456789')
_SERVERS = frozenset(
    {
        *(OFFSET, "x-delivery-count", "x-acquired-count", "x-death", "x-exchange", "x-routing-key"),
        *(f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason")),
    }
)

_HAS_CONTENT_TYPE, _HAS_ENCODING, _HAS_HEADERS = 0x8000, 0x4000, 0x2000
_HAS_MODE, _HAS_PRIORITY, _HAS_ID, _HAS_TIME, _HAS_TYPE = 0x1000, 0x0800, 0x0080, 0x0040, 0x0020
_TEXT, _LONG = ord("S"), ord("l")
_PERSISTENT = b"\x02"
_length = struct.Struct(">I")
_long = struct.Struct(">q")
_flags = struct.Struct(">H")
_size_at, _long_at = _length.unpack_from, _long.unpack_from


class PackedEvent(NamedTuple):
    """An event as a message, but for the time of sending, which stands between `head` and `tail`."""

    head: bytes
    tail: bytes
    body: bytes

    def properties(self, at_ms: int) -> bytes:
        return self.head + _long.pack(at_ms) + self.tail


def packed(event: Event, extra: Mapping[str, str] | None = None) -> PackedEvent:
    """`extra`: further headers of the message, which do not belong to the event. Raises Unserialisable or TooLarge."""
    priority = _priority(event)
    content_type = _short(JSON if event.value and event.value[0] in _JSON_STARTS else BINARY)
    type_, id_ = event.type.encode(), event.id.encode()
    if len(type_) > MAX_TYPE_BYTES:
        raise Unserialisable(
            f"the type of event {event.id} has {len(type_)} bytes; RabbitMQ takes {MAX_TYPE_BYTES} at most, because it "
            "is the routing key"
        )
    flags = _HAS_CONTENT_TYPE | _HAS_HEADERS | _HAS_MODE
    rest = [_PERSISTENT]
    if priority is not None:
        flags |= _HAS_PRIORITY
        rest.append(bytes((priority,)))
    if len(id_) <= MAX_NAME_BYTES:
        flags |= _HAS_ID
        rest.append(bytes((len(id_),)) + id_)
    if event.time >= 0:
        flags |= _HAS_TIME
        rest.append(_long.pack(int(event.time)))
    if type_:
        flags |= _HAS_TYPE
        rest.append(bytes((len(type_),)) + type_)
    table = b"".join([_entry(name, value, event) for name, value in _headers(event, extra)])
    size = _length.pack(len(_AT_NAME) + 8 + len(table))
    made = PackedEvent(
        b"".join((_flags.pack(flags), content_type, size, _AT_NAME)), b"".join((table, *rest)), event.value or b""
    )
    if len(made.head) + len(made.tail) > MAX_PROPERTIES_BYTES:
        raise TooLarge(
            f"the key and headers of event {event.id} have {len(made.tail):,} bytes; RabbitMQ takes "
            f"{MAX_PROPERTIES_BYTES:,} at most: put them into the value"
        )
    return made


def _headers(event: Event, extra: Mapping[str, str] | None) -> list[Header]:
    headers = headers_of(event)
    if event.headers:
        headers = [(_sent_name(name), value) for name, value in headers]
    if event.key is not None:
        headers.insert(0, (KEY, event.key.encode()))
    if event.value is None:
        headers.append((TOMBSTONE, b""))
    return headers if not extra else [*headers, *((name, value.encode()) for name, value in extra.items())]


def _sent_name(name: str) -> str:
    return f"{_PREFIX}{name}" if name in _ROUTING or name.startswith(_OURS) else name


def _entry(name: str, value: bytes, event: Event) -> bytes:
    raw = name.encode()
    if len(raw) > MAX_NAME_BYTES:
        raise Unserialisable(
            f"header {name[:40]!r}… of event {event.id}: RabbitMQ takes names of {MAX_NAME_BYTES} bytes at most"
        )
    return b"".join((bytes((len(raw),)), raw, b"S", _length.pack(len(value)), value))


def _short(value: str) -> bytes:
    raw = value.encode()
    return bytes((len(raw),)) + raw


_AT_NAME = _short(AT) + b"l"


def _priority(event: Event) -> int | None:
    given = event.headers.get(PRIORITY) if event.headers else None
    if given is None:
        return None
    if not given.isdecimal() or not given.isascii() or int(given) > 255:
        raise Unserialisable(f"header {PRIORITY}={given!r} of event {event.id}: use a number from 0 to 255")
    return int(given)


class RabbitEvent(LateEvent, frozen=True, gc=False, array_like=True):
    """Until they are decoded, its id holds the properties and its type where it came from. Its time holds when it was
    sent, in milliseconds. The headers are always decoded."""

    @property  # type: ignore[misc]
    def headers(self) -> Mapping[str, str]:
        found: Mapping[str, str] = HEADERS.__get__(self)
        return found

    @property
    def size(self) -> int:
        size = len(self.value or b"") + text_bytes(self.key or "")
        if headers := self.headers:
            size += sum(text_bytes(name) + text_bytes(value) for name, value in headers.items())
        return size

    def _decoded(self, held: bytes) -> Event:
        properties = _properties(held, self.topic)
        sent = properties.headers or {}
        source: str | tuple[str, str] = TYPE.__get__(self)
        fallback_id, fallback_type = (source, "") if isinstance(source, str) else source
        place = f"/{sent[OFFSET]}" if OFFSET in sent else ""
        event = event_of(
            [(name, value.encode()) for name in RESERVED if isinstance(value := sent.get(name), str)],
            topic=self.topic,
            key=self.key,
            value=self.value,
            id_=properties.message_id or f"{fallback_id}{place}",
            time=float(properties.timestamp or 0),
        )
        type_ = event.type or ("" if "ce_type" in sent else properties.type or fallback_type)
        return msgspec.structs.replace(event, type=type_, headers=self.headers)


class Scanned(NamedTuple):
    """What every reader needs of a message's headers."""

    offset: int | None
    at_ms: int  # when it was sent; 0: unknown
    key: str | None
    headers: Mapping[str, str]  # the event's own
    is_tombstone: bool
    is_founding: bool


def received(properties: bytes, body: bytes, topic: str, fallback_id: str, fallback_type: str = "") -> RabbitEvent:
    """The event of a message. Its id and type are the fallbacks if the publisher gave it none."""
    source: Any = (fallback_id, fallback_type) if fallback_type else fallback_id
    return _event(scanned(properties, topic), properties, body, topic, source)


def from_stream(message: Received, topic: str, source: str) -> tuple[int, RabbitEvent | None]:
    """The offset of a stream's message, and its event. None: it is no event, but a message that marks the log.

    `source`, such as orders/0, and the offset make the id of an event whose publisher gave it none."""
    found = scanned(message.properties, topic)
    assert found.offset is not None, "a message from a stream has an offset"
    if found.is_founding and not message.body:  # another program may use the header, and its body must not be skipped
        return found.offset, None
    return found.offset, _event(found, message.properties, message.body, topic, source)


def appended(event: RabbitEvent) -> float:
    """When the event was sent, in Unix time. If another program sent it: the event's own time, which may be 0.0."""
    at_ms: Any = TIME.__get__(event)
    return at_ms / 1000 if at_ms else event.time


def _event(found: Scanned, properties: bytes, body: bytes, topic: str, source: str) -> RabbitEvent:
    held: Any = properties
    value = None if found.is_tombstone and not body else body
    return RabbitEvent(held, topic, found.key, value, found.headers, source, found.at_ms)


def scanned(raw: bytes, topic: str) -> Scanned:
    """Read the headers of `Received.properties` once. Only texts and the numbers of our own are read here; a message
    with other values, from another program, takes a slower way."""
    try:
        at, end = _table(raw)
        offset, at_ms, key, marks, pairs = None, 0, None, 0, list[tuple[bytes, bytes]]()
        while at < end:
            start = at + 2 + raw[at]
            head = raw[at:start]
            what = _HEADS.get(head)
            if what is None:
                if head[-1] != _TEXT:
                    return _slowly_scanned(raw, topic)
                at = start + 4 + _size_at(raw, start)[0]
                pairs.append((head[1:-1], raw[start + 4 : at]))
            elif what < _IS_NUMBER:
                at = start + 4 + _size_at(raw, start)[0]
                if what:
                    marks |= what
                    if what == _IS_KEY:
                        key = text(raw[start + 4 : at])
            else:
                at = start + 8
                if what == _IS_OFFSET:
                    (offset,) = _long_at(raw, start)
                else:
                    (at_ms,) = _long_at(raw, start)
        if at != end:
            raise IndexError
    except (IndexError, struct.error):
        return _slowly_scanned(raw, topic)
    headers = _own([(text(name), value) for name, value in pairs]) if pairs else _NO_HEADERS
    return Scanned(offset, at_ms, key, headers, bool(marks & _IS_TOMBSTONE), bool(marks & _IS_FOUNDING))


_IS_KEY, _IS_TOMBSTONE, _IS_FOUNDING = 1, 2, 4
_IS_NUMBER = 8
_IS_OFFSET, _IS_AT = _IS_NUMBER, _IS_NUMBER + 1
_OFFSET = OFFSET.encode()


def _head(name: str, kind: int) -> bytes:
    """How an entry of the headers begins."""
    return _short(name) + bytes((kind,))


_HEADS = {_head(name, _TEXT): 0 for name in RESERVED}  # entries that are no headers of the event
_HEADS |= {
    _head(name, _TEXT): mark for name, mark in ((KEY, _IS_KEY), (TOMBSTONE, _IS_TOMBSTONE), (FOUNDING, _IS_FOUNDING))
}
_HEADS |= {_head(OFFSET, _LONG): _IS_OFFSET, _head(AT, _LONG): _IS_AT}
_NO_HEADERS: Mapping[str, str] = {}


def _table(raw: bytes) -> tuple[int, int]:
    """Where the entries of the headers begin and end."""
    flags, at = _flags.unpack_from(raw)[0], 2
    if flags & _HAS_CONTENT_TYPE:
        at += 1 + raw[at]
    if flags & _HAS_ENCODING:
        at += 1 + raw[at]
    if not flags & _HAS_HEADERS:
        return at, at
    end: int = at + 4 + _length.unpack_from(raw, at)[0]
    if end > len(raw):
        raise IndexError
    return at + 4, end


def _slowly_scanned(raw: bytes, topic: str) -> Scanned:
    headers = _properties(raw, topic).headers or {}
    offset, at_ms, key = headers.get(OFFSET), headers.get(AT), headers.get(KEY)
    return Scanned(
        offset if isinstance(offset, int) else None,
        at_ms if isinstance(at_ms, int) else 0,
        None if key is None else _text(key).decode(),
        _own([(name, _text(value)) for name, value in headers.items()]),
        TOMBSTONE in headers,
        FOUNDING in headers,
    )


def _own(pairs: list[tuple[str, bytes]]) -> dict[str, str]:
    """The event's own headers, under their own names."""
    return own_headers(
        [
            (name.removeprefix(_PREFIX), value)
            for name, value in pairs
            if name.startswith(_PREFIX) or name == _EXPIRES or (name not in _SERVERS and not name.startswith("onward-"))
        ]
    )


def _text(value: object) -> bytes:
    """A header of another program, rendered as text."""
    match value:
        case bytes():
            return text(value).encode()
        case str():
            return value.encode()
        case None:
            return b""
        case datetime():
            return value.isoformat().encode()
        case bool() | dict() | list():
            return msgspec.json.encode(value, enc_hook=str)
        case _:
            return str(value).encode()


def _properties(raw: bytes, topic: str) -> Properties:
    """Without headers, if they cannot be read."""
    try:
        return properties_of(raw)
    except AmqpError as error:
        if topic not in _reported:
            _reported.add(topic)
            log.warning(
                "RabbitMQ: a message of %s has properties that cannot be read (%s); such messages of this topic are "
                "handled without their headers",
                *(topic, error),
            )
        return Properties(headers=_offset_of(raw))


def _offset_of(raw: bytes) -> dict[str, Any]:
    """The offset of a message whose headers cannot be read."""
    at = raw.rfind(b"\x0f" + _OFFSET + b"l")
    return {} if at < 0 else decoded_table(raw[at : at + 25])


_reported: set[str] = set()  # topics
