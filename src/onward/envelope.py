"""Builds the event of a value. Every part is checked here, before anything is sent."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onward.errors import BadSetting, TooLarge
from onward.event import Event, header_fault
from onward.failure.expiry import EXPIRES, stamp
from onward.payload import encode, type_name

MAX_TYPE = 200  # characters


def build(
    id_: str,
    topic: str,
    key: str | None,
    value: Any,
    *,
    headers: Mapping[str, str],
    type_: str | None,
    now: float,
    max_bytes: int,
) -> Event:
    """The event. `headers` and `type_` are already checked; the default type is the name of the value's class."""
    if key is not None and not isinstance(key, str):
        raise BadSetting(f"key {key!r} is a {type(key).__name__}; keys must be str or None")
    event = Event(id_, topic, key, encode(value, topic), headers, type_ or type_name(value), now)
    if event.size > max_bytes:
        raise TooLarge(
            f"an event of {event.size:,} bytes for topic {topic!r} exceeds max_event_bytes={max_bytes:,}; "
            "store the data elsewhere and publish its address"
        )
    return event


def check_type(type_: str | None) -> str | None:
    """The type. Raises BadSetting if a broker could not carry it."""
    if type_ is None or (isinstance(type_, str) and 0 < len(type_) <= MAX_TYPE and type_.isprintable()):
        return type_
    raise BadSetting(f"type={type_!r}: use 1 to {MAX_TYPE} printable characters, such as 'order.placed'")


def checked_headers(headers: Mapping[str, str] | None, *, expires_s: float | None, now: float) -> dict[str, str]:
    """The headers, with one for the time of expiry if `expires_s` is set."""
    if headers is not None and (fault := header_fault(headers)):
        raise BadSetting(fault)
    checked = dict(headers) if headers else {}
    if expires_s is not None:
        if not isinstance(expires_s, int | float) or not math.isfinite(expires_s):
            raise BadSetting(f"expires_s={expires_s!r}: give the seconds from now, as a finite number")
        checked[EXPIRES] = stamp(now + expires_s)
    return checked


def checked_pairs(pairs: Sequence[Any]) -> Sequence[tuple[str | None, Any]]:
    """The arguments of publish_many. Raises BadSetting if they are not (key, value) pairs."""
    for each in pairs:
        if not isinstance(each, tuple | list) or len(each) != 2:
            raise BadSetting(
                f"publish_many takes (key, value) pairs, with None as the key of an event without one: got {each!r}"
            )
    return pairs
