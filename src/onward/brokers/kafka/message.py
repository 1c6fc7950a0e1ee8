"""Events as Kafka messages, in CloudEvents' binary mode, and back. Fields are decoded when they are first read."""

import gc
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Message

from onward.brokers.core.cloudevents import event_of, own_headers, text
from onward.brokers.core.late_event import HEADERS, LateEvent
from onward.event import Event

log = logging.getLogger("onward")


class KafkaEvent(LateEvent, frozen=True, gc=False, array_like=True):
    """Its fields hold the message of the client until they are decoded."""

    def _decoded(self, held: Message) -> Event:
        return event_of(
            _headers(held),
            topic=self.topic,
            key=self.key,
            value=self.value,
            id_=f"{self.topic}/{held.partition()}/{held.offset()}",  # the same in every delivery
            time=held.timestamp()[1] / 1000,
        )

    def _decoded_headers(self, held: Message) -> Mapping[str, str]:
        headers = _headers(held)
        return own_headers(headers) if headers else {}


def received(message: Message, topic: str) -> KafkaEvent:
    held: Any = message
    key = message.key()
    return KafkaEvent(held, topic, text(key) if key is not None else None, message.value(), held, held, held)


def appended(event: Event) -> float:
    """When a received event was written to the log, in Unix time."""
    message: Any = HEADERS.__get__(event)
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
