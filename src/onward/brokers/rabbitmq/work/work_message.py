"""Messages of work queues: what to do with one that arrives, and how it is sent again. Pure.

A message is sent again with all its properties and its body, and with headers that tell about the attempts so far. Only
what belongs to one delivery is left out: marks of the server, and properties that the server would act on.
"""

import base64
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from onward.brokers.rabbitmq.amqp import Properties, Received, encoded_properties
from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.raw_properties import entries_of, fields_of, joined_entries, joined_fields
from onward.brokers.rabbitmq.amqp.tables import decoded_table, encoded_table, short_string
from onward.brokers.rabbitmq.message import AT
from onward.brokers.rabbitmq.names import MAX_NAME_BYTES
from onward.brokers.rabbitmq.work.rungs import (
    DUE_HEADER,
    DUE_MS,
    FIRST_HEADER,
    TRIES_HEADER,
    Retrying,
    headers_of,
    parsed,
)
from onward.event import Event

SUSPECT_HEADER = "onward-suspect"
PROPERTIES_HEADER = "onward-amqp-properties"  # of the event of a dead letter: the properties of its message, in base64
AMONG_OTHERS, ALONE = 1, 2  # Tries.started, as the control plane uses it

_TRIES_MARK = TRIES_HEADER.encode()
_SENT_AT = bytes((len(AT),)) + AT.encode() + b"l"  # how the entry begins
_MOST_BYTES = 130_000  # of properties; they must fit into a frame
_RETURNS = "x-delivery-count"  # how often a quorum queue has taken the message back
_MANY_RETURNS = 2  # a message that came back so often may have killed its process
_READ = frozenset(each.encode() for each in (TRIES_HEADER, DUE_HEADER, FIRST_HEADER, SUSPECT_HEADER, _RETURNS))
_DROPPED = _READ | {
    *(b"x-death", b"x-acquired-count"),
    *(f"x-{which}-death-{what}".encode() for which in ("first", "last") for what in ("exchange", "queue", "reason")),
    *(b"CC", b"BCC"),  # the server would route the message to these keys as well
}


class Fate(Enum):
    """What to do with a message that arrived."""

    HAND_OUT = "hand it out"
    WAIT = "send it to the next rung"
    SUSPECT = "send it to the suspects"


class Arrived(NamedTuple):
    """What the headers of a message say. `suspect`: its name among the suspects; empty if it was never one."""

    state: Retrying
    returns: int
    suspect: str

    def fate(self, wall: float, *, is_counted: bool) -> Fate:
        """`is_counted`: its queue counts how often it was returned. Others only say that it was."""
        if self.state.waits_ms(wall) > DUE_MS:
            return Fate.WAIT
        tries = self.state.tries
        if tries.crashes or tries.started or self.returns >= (_MANY_RETURNS if is_counted else 1):
            return Fate.SUSPECT
        return Fate.HAND_OUT


def is_special(message: Received) -> bool:
    """Whether its headers must be read. Most messages arrive for the first time and are handed out at once."""
    return message.redelivered or _TRIES_MARK in message.properties


def arrived(message: Received) -> Arrived:
    headers = _our_headers(message)
    returns = headers.get(_RETURNS)
    known = int(message.redelivered)  # a classic queue has no count
    suspect = headers.get(SUSPECT_HEADER)
    return Arrived(
        parsed(headers),
        max(known, returns) if isinstance(returns, int) else known,
        suspect if isinstance(suspect, str) else "",
    )


def type_of(message: Received) -> str:
    """The type of the event if its publisher, another program, gave it none: the routing key. A message that Onward or
    the server has sent on has no exchange, and its routing key is the name of a queue."""
    return message.routing_key if message.exchange else ""


def resent(
    message: Received, state: Retrying | None, *, id_: str | None = None, type_: str | None = None, suspect: str = ""
) -> bytes:
    """The properties to send this message with. `state`: None if no attempt counts. `id_`, `type_`: what its event has,
    in case that the publisher gave it none. `suspect`: its name among the suspects.

    It never fails: if the properties cannot be read, or would be too large, the message goes on without them, because
    its attempts must be counted."""
    ours: dict[str, Any] = headers_of(state) if state is not None else {}
    if suspect:
        ours[SUSPECT_HEADER] = suspect
    added = {name: value for name, value in (("message_id", id_), ("type", type_)) if value and _is_short(value)}
    try:
        sent = _spliced(message.properties, ours, added)
    except Malformed:
        sent = b""
    if 0 < len(sent) <= _MOST_BYTES:
        return sent
    basic = Properties(headers=ours, delivery_mode=2, message_id=added.get("message_id"), type=added.get("type"))
    return encoded_properties(basic)


def _spliced(raw: bytes, ours: Mapping[str, Any], added: Mapping[str, str]) -> bytes:
    """Everything else stays as the publisher has written it."""
    fields = fields_of(raw)
    # The rung would let it go too early, and the work queue would drop it; of users the server accepts only our own.
    fields = {name: field for name, field in fields.items() if name not in ("expiration", "user_id")}
    kept = [entry for name, entry in entries_of(fields.get("headers", b"")) if name not in _DROPPED]
    fields["headers"] = joined_entries([*kept, encoded_table(ours)[4:]])
    fields["delivery_mode"] = b"\x02"
    for name, value in added.items():
        if fields.get(name, b"\0") == b"\0":  # absent or empty
            fields[name] = short_string(value)
    return joined_fields(fields)


def _is_short(text: str) -> bool:
    return len(text.encode()) <= MAX_NAME_BYTES


def with_properties(event: Event, message: Received) -> Event:
    """The event, to be stored in a dead letter. An event of another program carries its properties along: it has more
    of them than an event can tell, and a replay sends them again."""
    headers = {name: value for name, value in event.headers.items() if name != PROPERTIES_HEADER}
    if not is_ours(message):
        headers[PROPERTIES_HEADER] = base64.b64encode(message.properties).decode()
    return event if headers == event.headers else msgspec.structs.replace(event, headers=headers)


def is_ours(message: Received) -> bool:
    """Whether Onward has published it: it says when, as a number."""
    if _SENT_AT not in message.properties:
        return False
    try:
        entries = entries_of(fields_of(message.properties).get("headers", b""))
    except Malformed:
        return False
    return any(entry.startswith(_SENT_AT) for _, entry in entries)


def replayed(event: Event, state: Retrying | None) -> tuple[bytes, bytes] | None:
    """The properties and the body of the message to replay, from the event of its dead letter. None: no other program
    has sent it."""
    if PROPERTIES_HEADER not in event.headers:
        return None
    try:
        properties = base64.b64decode(event.headers[PROPERTIES_HEADER], validate=True)
    except ValueError:
        properties = b""
    message = Received(0, False, "", "", properties, event.value or b"", "")
    return resent(message, state, id_=event.id, type_=event.type), message.body


def _our_headers(message: Received) -> dict[str, Any]:
    """Only these are decoded, so whatever another program has written into others does not matter."""
    found: dict[str, Any] = {}
    try:
        for name, entry in entries_of(fields_of(message.properties).get("headers", b"")):
            if name in _READ:
                found |= decoded_table(entry)
    except Malformed:
        pass
    return found
