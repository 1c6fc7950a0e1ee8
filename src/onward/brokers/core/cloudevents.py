"""An event's fields as CloudEvents attributes in binary mode, and back. Pure."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache

from onward.errors import Unserialisable
from onward.event import CONTROL, Event

_SPEC = b"1.0"
_SOURCE = b"onward"
_UNTYPED = "onward.event"  # CloudEvents has no event without a type
RESERVED = frozenset({"ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time"})

Header = tuple[str, bytes]


def headers_of(event: Event) -> list[Header]:
    """The event's own headers behind those of CloudEvents. Unserialisable: one has a CloudEvents name. The names were
    checked by `publishing.check_events`: a client could turn others into these."""
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


def own_headers(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """The event's headers, without those of CloudEvents; of several with one name the last. Control characters in the
    names that other publishers chose are escaped."""
    return {
        name if name.isprintable() else CONTROL.sub(_escaped, name): text(value or b"")
        for name, value in headers
        if name not in RESERVED
    }


def event_of(
    headers: Iterable[tuple[str, bytes | None]],
    *,
    topic: str,
    key: str | None,
    value: bytes | None,
    id_: str,
    time: float,
) -> Event:
    """The event of a message. `id_` and `time` are for messages of other publishers that have none of their own.

    Of several CloudEvents attributes with one name the first counts. Publishers write theirs before the headers of
    their users, and one of those may have had a longer name, which was cut on its way."""
    pairs = list(headers)
    found: dict[str, bytes] = {name: value or b"" for name, value in reversed(pairs) if name in RESERVED}
    type_ = text(found.get("ce_type", b""))
    seconds = _seconds(found.get("ce_time"))
    return Event(
        text(found["ce_id"]) if "ce_id" in found else id_,
        topic,
        key,
        value,
        own_headers(pairs),
        "" if type_ == _UNTYPED else type_,
        time if seconds is None else seconds,
    )


def text(value: bytes) -> str:
    """Any bytes as text: what is no UTF-8 is escaped."""
    return value.decode("utf-8", "backslashreplace")


def _escaped(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"


def _timestamp(seconds: float) -> bytes:
    """RFC 3339, with as many digits as a float of our time holds."""
    whole = int(seconds // 1)
    return f"{_second(whole)}.{round((seconds - whole) * 1e9):09d}Z".encode()


@lru_cache(16)
def _second(whole: int) -> str:
    return datetime.fromtimestamp(whole, UTC).isoformat()[:19]  # strftime writes the year 1 as one digit


def _seconds(stamp: bytes | None) -> float | None:
    """The time that a CloudEvents header names; None where there is none, or none that can be read."""
    if stamp is None:
        return None
    try:
        if stamp[19:20] == b"." and stamp.endswith(b"Z"):
            return datetime.fromisoformat(stamp[:19].decode() + "+00:00").timestamp() + float(stamp[19:-1])
        return datetime.fromisoformat(stamp.decode()).timestamp()
    except (ValueError, OverflowError):
        return None
