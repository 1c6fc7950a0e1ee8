"""Events as Kafka messages, in CloudEvents' binary mode, and back. Fields are decoded when they are first read."""

import gc
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Message

from onward.brokers.core.cloudevents import event_of, own_headers, text
from onward.event import Event, text_bytes

log = logging.getLogger("onward")


class LateEvent(Event, frozen=True, gc=False, array_like=True):
    """An event whose id, headers, type and time are decoded when they are first read: decoding them is half the cost of
    reading an event.

    Until then these fields hold the message itself, which no encoder accepts: encode `whole()`.
    """

    @property  # type: ignore[misc]
    def id(self) -> str:
        return self.whole().id

    @property  # type: ignore[misc]
    def headers(self) -> Mapping[str, str]:
        """Decodes only the headers: Onward checks every event for a header with its expiry, and most events have no
        headers of their own."""
        held: Any = _ID.__get__(self)
        if isinstance(held, Event):
            return held.headers
        headers = _headers(held)
        return own_headers(headers) if headers else {}

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
        """The value and the key: the length of headers is unknown until they are decoded."""
        return len(self.value or b"") + text_bytes(self.key or "")

    def whole(self) -> Event:
        held: Any = _ID.__get__(self)
        if isinstance(held, Event):
            return held
        event = _decoded(self, held)
        _ID.__set__(self, event)
        return event


_HEADERS: Any = Event.__dict__["headers"]
_ID: Any = Event.__dict__["id"]


def received(message: Message, topic: str) -> LateEvent:
    held: Any = message
    key = message.key()
    return LateEvent(held, topic, text(key) if key is not None else None, message.value(), held, held, held)


def appended(event: Event) -> float:
    """When a received event was written to the log, in Unix time."""
    message: Any = _HEADERS.__get__(event)
    return float(message.timestamp()[1]) / 1000


def _headers(message: Message) -> Sequence[tuple[str, bytes | None]]:
    """The headers of a message; none if the name of one is not UTF-8."""
    headers = _readable(message)
    if headers is None:
        message.set_headers([])
        _report(message.topic() or "", message.partition(), message.offset())
    return headers or ()


def _readable(message: Message) -> Sequence[tuple[str, bytes | None]] | None:
    """None: a name is not UTF-8. The client returns a null pointer for it, which crashes the interpreter when it is
    read. The garbage collector counts the names and values without reading them. The client also leaves an exception
    behind, which a later call raises."""
    try:
        headers: Sequence[tuple[str, bytes | None]] = message.headers() or ()
        return headers if len(gc.get_referents(*headers)) == 2 * len(headers) else None
    except (UnicodeDecodeError, SystemError):
        return None


_reported: set[str] = set()  # topics


def _report(topic: str, index: int | None, offset: int | None) -> None:
    """Log a warning, once for each topic."""
    if topic not in _reported:
        _reported.add(topic)
        log.warning(
            "Kafka: %s/%s, offset %s: a header's name is not UTF-8, so no header of this event can be read; such "
            "events of this topic are handled without their headers",
            *(topic, index, offset),
        )


def _decoded(late: Event, message: Message) -> Event:
    return event_of(
        _headers(message),
        topic=late.topic,
        key=late.key,
        value=late.value,
        id_=f"{late.topic}/{message.partition()}/{message.offset()}",  # the same in every delivery
        time=message.timestamp()[1] / 1000,
    )
