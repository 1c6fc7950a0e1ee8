"""An event's fields as CloudEvents attributes in binary mode, and back. Pure."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache

from onward.errors import Unserialisable
from onward.event import CONTROL, Event

_SPEC = b"1.0"
_SOURCE = b"onward"
_UNTYPED = "onward.event"  # for events without a type, because CloudEvents requires one
RESERVED = frozenset({"ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time"})

Header = tuple[str, bytes]


def headers_of(event: Event) -> list[Header]:
    """The headers of CloudEvents, then the event's own headers. Raises Unserialisable if one of them has a name of
    CloudEvents. `publishing.check_events` has checked the names, because a client could change others into these."""
    headers = [
        ("ce_id", event.id.encode()),
        ("ce_specversion", _SPEC),
        ("ce_source", _SOURCE),
        ("ce_type", (event.type or _UNTYPED).encode()),
        ("ce_time", _timestamp(event.time)),
    ]
    for name, value in event.headers.items():
        if name in RESERVED:
            raise Unserialisable(f"header {name!r} of event {event.id} is a name of CloudEvents; give it another name")
        headers.append((name, value.encode()))
    return headers


def own_headers(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """The event's headers without those of CloudEvents. If several have the same name, the last one counts. Control
    characters in names, which other publishers may have used, are escaped."""
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
    """The event of a message. `id_` and `time` are used if the message, from another publisher, has none.

    If several CloudEvents attributes have the same name, the first one counts. Publishers write these attributes before
    the headers of their users, and a user's header may have had a longer name that was cut by a client."""
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
    """Bytes as text. Bytes that are not UTF-8 are escaped."""
    return value.decode("utf-8", "backslashreplace")


def _escaped(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"


def _timestamp(seconds: float) -> bytes:
    """A Unix time in the format of RFC 3339, without losing digits of the float."""
    full = int(seconds // 1)
    nanos = round((seconds - full) * 1e9)
    if nanos == 1_000_000_000:  # a time just below a full second
        full, nanos = full + 1, 0
    return f"{_second(full)}.{nanos:09d}Z".encode()


@lru_cache(16)
def _second(full: int) -> str:
    return datetime.fromtimestamp(full, UTC).isoformat()[:19]  # strftime writes the year 1 as one digit


def _seconds(stamp: bytes | None) -> float | None:
    """The Unix time in a CloudEvents header. None if there is none or it cannot be parsed."""
    if stamp is None:
        return None
    try:
        if stamp[19:20] == b"." and stamp.endswith(b"Z"):
            return datetime.fromisoformat(stamp[:19].decode() + "+00:00").timestamp() + float(stamp[19:-1])
        return datetime.fromisoformat(stamp.decode()).timestamp()
    except (ValueError, OverflowError):
        return None
