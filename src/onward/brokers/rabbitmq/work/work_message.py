"""Messages of work queues: what to do with one that arrives, and how it is sent again. Pure.

A message is sent again with all its properties and its body, and with headers that tell about the attempts so far. Only
what belongs to one delivery is left out: marks of the server, and properties that the server would act on.
"""

import base64
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from onward.brokers.rabbitmq.amqp import Received, encoded_properties, header_table, properties_of
from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.tables import decoded_table
from onward.brokers.rabbitmq.message import AT
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
PROPERTIES_HEADER = "amqp-properties"  # of the event of a dead letter: the properties of its message, in base64
AMONG_OTHERS, ALONE = 1, 2  # Tries.started, as the control plane uses it

_TRIES_MARK = TRIES_HEADER.encode()
_SENT_BY_US = AT.encode()
_RETURNS = "x-delivery-count"  # how often a quorum queue has taken the message back
_MANY_RETURNS = 2  # a message that came back so often may have killed its process
_DROPPED = frozenset(
    {
        "x-death",
        "x-first-death-exchange",
        "x-first-death-queue",
        "x-first-death-reason",
        "x-last-death-exchange",
        "x-last-death-queue",
        "x-last-death-reason",
        _RETURNS,
        "x-acquired-count",
        "CC",  # the server would route the message to these keys as well
        "BCC",
        TRIES_HEADER,
        DUE_HEADER,
        FIRST_HEADER,
        SUSPECT_HEADER,
    }
)


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
    headers = _headers(message)
    returns = headers.get(_RETURNS)
    known = int(message.redelivered)  # a classic queue has no count
    suspect = headers.get(SUSPECT_HEADER)
    return Arrived(
        parsed(headers),
        max(known, returns) if isinstance(returns, int) else known,
        suspect if isinstance(suspect, str) else "",
    )


def resent(
    message: Received, state: Retrying | None, *, id_: str | None = None, type_: str | None = None, suspect: str = ""
) -> bytes:
    """The properties to send this message with. `state`: None if no attempt counts. `id_`, `type_`: what its event has,
    in case that the publisher gave it none. `suspect`: its name among the suspects."""
    try:
        properties = properties_of(message.properties)
    except Malformed:  # the server has passed it on, so it accepts it as it is
        return message.properties
    sent = properties.headers or {}
    headers: dict[str, Any] = {name: value for name, value in sent.items() if name not in _DROPPED}
    if state is not None:
        headers |= headers_of(state)
    if suspect:
        headers[SUSPECT_HEADER] = suspect
    return encoded_properties(
        msgspec.structs.replace(
            properties,
            headers=headers,
            delivery_mode=2,
            expiration=None,  # the rung would let it go too early, and the work queue would drop it
            user_id=None,  # the server accepts only our own
            message_id=properties.message_id or id_,
            type=properties.type or type_,
        )
    )


def with_properties(event: Event, message: Received) -> Event:
    """The event, to be stored in a dead letter. An event of another program carries its properties along: it has more
    of them than an event can tell, and a replay sends them again."""
    if _SENT_BY_US in message.properties:
        return event
    properties = base64.b64encode(message.properties).decode()
    return msgspec.structs.replace(event, headers={**event.headers, PROPERTIES_HEADER: properties})


def replayed(event: Event, state: Retrying | None) -> tuple[bytes, bytes] | None:
    """The properties and the body of the message to replay, from the event of its dead letter. None: no other program
    has sent it."""
    try:
        properties = base64.b64decode(event.headers.get(PROPERTIES_HEADER, ""), validate=True)
    except ValueError:
        return None
    if not properties:
        return None
    message = Received(0, False, "", "", properties, event.value or b"", "")
    return resent(message, state, id_=event.id, type_=event.type), message.body


def _headers(message: Received) -> dict[str, Any]:
    try:
        return decoded_table(header_table(message.properties))
    except Malformed:
        return {}
