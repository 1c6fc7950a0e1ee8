"""Between events and the columns of an outbox table. Pure."""

from typing import Any

import msgspec

from onward.errors import Unserialisable
from onward.event import Event
from onward.outbox.base import OutboxRow

COLUMNS = ("event_id", "topic", "event_key", "event_type", "event_time", "headers", "payload")
"""The columns that a writer fills, in the order of `values_of`. The database fills the others."""

Values = tuple[str, str, str | None, str, float, str | None, bytes | None]

_headers = msgspec.json.Decoder(dict[str, str]).decode


def values_of(event: Event) -> Values:
    """The event as a row. Raises Unserialisable for a text that no database could store."""
    for what, text in (("key", event.key), ("type", event.type)):
        if text is not None and (fault := _fault(text)):
            raise Unserialisable(
                f"the {what} of an event for topic {event.topic!r} contains {fault}, which databases refuse"
            )
    try:
        headers = msgspec.json.encode(event.headers).decode() if event.headers else None
    except UnicodeEncodeError as error:
        raise Unserialisable(
            f"a header of an event for topic {event.topic!r} contains half a surrogate pair"
        ) from error
    return event.id, event.topic, event.key, event.type, event.time, headers, event.value


def row_of(
    id_: int,
    shard: int,
    event_id: str,
    topic: str,
    key: str | None,
    type_: str,
    time: float,
    headers: str | None,
    payload: bytes | None,
) -> OutboxRow:
    """A row as the database returns it: id, shard, and the columns of COLUMNS. Another program may have written headers
    that are not a JSON object of texts: then the row has a `fault`, and its event has no headers."""
    if headers is None:
        return OutboxRow(id_, shard, Event(event_id, topic, key, payload, {}, type_, time))
    try:
        return OutboxRow(id_, shard, Event(event_id, topic, key, payload, _headers(headers), type_, time))
    except msgspec.MsgspecError as error:
        fault = f"its headers are not a JSON object of texts ({error}); correct them in the table of parked rows"
        return OutboxRow(id_, shard, Event(event_id, topic, key, payload, {}, type_, time), fault)


def _fault(text: Any) -> str:
    if "\0" in text:
        return "a NUL character"
    return "half a surrogate pair" if any("\ud800" <= char <= "\udfff" for char in text) else ""
