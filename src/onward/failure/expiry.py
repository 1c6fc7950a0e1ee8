"""When an event expires. The time is a header, so every broker carries it."""

import math

from onward.event import Event

EXPIRES = "onward-expires"
"""The header: Unix time in seconds."""


def stamp(time: float) -> str:
    """The header's value for this Unix time."""
    return f"{time:.6f}"


def expires(event: Event) -> float | None:
    """When the event expires, or None if it never does. A header that is not a number is ignored."""
    text = event.headers.get(EXPIRES)
    if text is None:
        return None
    try:
        time = float(text)
    except ValueError:
        return None
    return None if math.isnan(time) else time


def is_expired(event: Event, wall: float) -> bool:
    if not event.headers:
        return False
    time = expires(event)
    return time is not None and time <= wall
