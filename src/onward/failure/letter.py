"""A dead letter as JSON, and as a copy to publish."""

import base64
import time
from datetime import UTC
from typing import Any

import msgspec

from onward import clock
from onward.brokers.base import AsideRecord, Failure
from onward.event import Event, new_id
from onward.failure.expiry import EXPIRES

_MAX_HEADER = 500  # characters of an error's message in a copy


def as_json(record: AsideRecord) -> bytes:
    """The whole letter in one line: the event as it was published, and its failure."""
    return msgspec.json.encode(fields(record))


def fields(record: AsideRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "group": record.group,
        "topic": record.partition.topic,
        "partition": record.partition.index,
        "position": record.position,
        "event": event_fields(record.event),
        "failure": _failure_fields(record.failure),
    }


def event_fields(event: Event) -> dict[str, Any]:
    """The whole event. A tombstone is marked as one, because `null` is also a value."""
    line: dict[str, Any] = {
        "id": event.id,
        "topic": event.topic,
        "key": event.key,
        "type": event.type,
        "time": iso(event.time) if event.time else None,  # 0: the publisher, another program, gave it none
        "headers": dict(event.headers),
    }
    compact = None if event.value is None else compact_json(event.value)
    if event.value is None:
        line |= {"value": None, "tombstone": True}
    elif compact is not None:
        line["value"] = msgspec.Raw(compact)
    else:
        line["value_base64"] = base64.b64encode(event.value).decode()
    return line


def compact_json(data: bytes) -> bytes | None:
    """The JSON without white space; numbers and order stay as they were. None if it is not JSON."""
    try:
        msgspec.json.decode(data)  # `format` alone accepts strings that are not UTF-8
        return msgspec.json.format(data, indent=-1)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None


def iso(seconds: float) -> str | None:
    """The time in ISO format, or None if no calendar has such a time."""
    at = clock.moment(seconds, UTC)
    return None if at is None else at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def copy(record: AsideRecord, topic: str) -> Event:
    """A new event for this topic, with headers that name its origin. It does not expire."""
    event, failure = record.event, record.failure
    origin = {
        "onward-origin-id": event.id,
        "onward-origin-topic": record.partition.topic,
        "onward-origin-group": record.group,
        "onward-dead-id": record.id,
    }
    if failure is not None:
        origin |= {
            "onward-dead-reason": failure.reason,
            "onward-dead-error": failure.error,
            "onward-dead-message": failure.message[:_MAX_HEADER],
        }
    headers = {name: value for name, value in event.headers.items() if name != EXPIRES}
    at = event.time if clock.in_calendar(event.time) else time.time()
    return Event(new_id(), topic, event.key, event.value, headers | origin, event.type, at)


def _failure_fields(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return msgspec.structs.asdict(failure) | {"first": iso(failure.first), "last": iso(failure.last)}
