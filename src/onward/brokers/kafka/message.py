"""Events as Kafka messages, in CloudEvents' binary mode, and back. What nobody reads is not decoded."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from confluent_kafka import Message

from onward.errors import Unserialisable
from onward.event import Event

_SPEC = b"1.0"
_SOURCE = b"onward"
_UNTYPED = "onward.event"  # CloudEvents has no event without a type
RESERVED = frozenset({"ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time"})

Header = tuple[str, bytes]


def headers_of(event: Event) -> list[Header]:
    headers = [
        ("ce_id", event.id.encode()),
        ("ce_specversion", _SPEC),
        ("ce_source", _SOURCE),
        ("ce_type", (event.type or _UNTYPED).encode()),
        ("ce_time", _timestamp(event.time)),
    ]
    for name, value in event.headers.items():
        if name in RESERVED:
            raise Unserialisable(f"header {name!r} of event {event.id} is CloudEvents' own; give it another name")
        headers.append((name, value.encode()))
    return headers


class LateEvent(Event, frozen=True, gc=False, array_like=True):
    """An event whose id, headers, type and time stand in its message until somebody asks: they cost half the path.

    Until then its fields hold the message in their place, which no encoder takes: encode `whole()`.
    """

    @property  # type: ignore[misc]
    def id(self) -> str:
        return self.whole().id

    @property  # type: ignore[misc]
    def headers(self) -> Mapping[str, str]:
        """Without the rest: of every event it is asked whether it has expired, and most have no header of their own."""
        held: Any = _ID.__get__(self)
        if isinstance(held, Event):
            return held.headers
        headers = held.headers()
        return _own(headers) if headers else {}

    @property  # type: ignore[misc]
    def type(self) -> str:
        return self.whole().type

    @property  # type: ignore[misc]
    def time(self) -> float:
        return self.whole().time

    def __eq__(self, other: object) -> bool:
        return self.whole() == other.whole() if isinstance(other, Event) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.whole().id)

    def __repr__(self) -> str:
        return repr(self.whole())

    @property
    def size(self) -> int:
        """The value and the key: the length of headers that nobody read is not known."""
        return len(self.value or b"") + len(self.key or "")

    def whole(self) -> Event:
        held: Any = _ID.__get__(self)
        if isinstance(held, Event):
            return held
        event = _decoded(self, held)
        _ID.__set__(self, event)
        return event


def appended(event: Event) -> float:
    """When the event was written to the log, in Unix time."""
    message: Any = _HEADERS.__get__(event)
    return float(message.timestamp()[1]) / 1000


_HEADERS: Any = Event.__dict__["headers"]
_ID: Any = Event.__dict__["id"]


def received(message: Message, topic: str) -> LateEvent:
    held: Any = message
    key = message.key()
    return LateEvent(held, topic, _text(key) if key is not None else None, message.value(), held, held, held)


def _own(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """The event's headers, without those of CloudEvents; of several with one name the last."""
    return {name: _text(value or b"") for name, value in headers if name not in RESERVED}


def _decoded(late: Event, message: Message) -> Event:
    headers = message.headers() or ()
    found: dict[str, bytes] = {name: value or b"" for name, value in headers}
    id_ = found.get("ce_id")
    if id_ is None:  # not published by us: a name that every delivery of it has
        id_ = f"{late.topic}/{message.partition()}/{message.offset()}".encode()
    type_ = _text(found.get("ce_type", b""))
    time = _seconds(found.get("ce_time"))
    return Event(
        _text(id_),
        late.topic,
        late.key,
        late.value,
        _own(headers),
        "" if type_ == _UNTYPED else type_,
        message.timestamp()[1] / 1000 if time is None else time,
    )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _timestamp(seconds: float) -> bytes:
    """RFC 3339, with as many digits as a float of our time holds."""
    whole = int(seconds // 1)
    return f"{_second(whole)}.{round((seconds - whole) * 1e9):09d}Z".encode()


@lru_cache(16)
def _second(whole: int) -> str:
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}"


def _seconds(text: bytes | None) -> float | None:
    """The time that a CloudEvents header names; None where there is none, or none that can be read."""
    if text is None:
        return None
    try:
        if text[19:20] == b"." and text.endswith(b"Z"):
            return datetime.fromisoformat(text[:19].decode() + "+00:00").timestamp() + float(text[19:-1])
        return datetime.fromisoformat(text.decode()).timestamp()
    except (ValueError, OverflowError):
        return None
