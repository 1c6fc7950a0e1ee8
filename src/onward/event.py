"""The values that pass between the stages: Event, Partition, Tries, Delivery. They are frozen and do no I/O."""

import os
import random
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

_random = random.Random()  # our own: a user's random.seed() must not make two processes generate the same ids
os.register_at_fork(after_in_child=_random.seed)
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_UNFIT = re.compile(f"{CONTROL.pattern}|[\ud800-\udfff]")  # half a surrogate pair has no bytes


def new_id() -> str:
    """A UUIDv7: unique, and ordered by the millisecond of its creation."""
    bits = _random.getrandbits(74)
    number = (time.time_ns() // 1_000_000) << 80 | 0x7 << 76 | (bits >> 62) << 64 | 0x2 << 62 | bits & (1 << 62) - 1
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def new_ids(count: int) -> list[str]:
    """Several ids at the cost of one. They count up from a random id, so they are ordered too."""
    first = new_id()
    prefix, start = first[:24], int(first[24:], 16)
    return [f"{prefix}{start + number & 0xFFFF_FFFF_FFFF:012x}" for number in range(count)]


def text_bytes(text: str) -> int:
    """The number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def header_fault(headers: Any) -> str | None:
    """Why no broker can carry these headers; None if they are fine. A client written in C cuts a name at its first NUL,
    and the cut name may equal another name. A value may contain any character."""
    if not isinstance(headers, Mapping):
        return f"headers={headers!r} is a {type(headers).__name__}; use a dict of names and values, both str"
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            return f"header {name!r}: {value!r}: names and values must be str"
        if not name or _UNFIT.search(name):
            return f"header {name!r}: a name needs at least one character, and no control characters; rename it"
    return None


class Event(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An event. It never changes after it was published. `value` None is a tombstone, which differs from empty bytes.

    `time` is Unix time in seconds, set by the publisher. `type` is the CloudEvents type; empty if unknown.
    """

    id: str
    topic: str
    key: str | None
    value: bytes | None
    headers: Mapping[str, str] = {}
    type: str = ""
    time: float = 0.0

    def whole(self) -> "Event":
        """This event with all fields set, as an encoder needs it. A broker's own event class may decode fields late."""
        return self

    @property
    def size(self) -> int:
        """Bytes that count against limits: the value, the key and the headers."""
        size = len(self.value or b"") + text_bytes(self.key or "")
        if self.headers:
            size += sum(text_bytes(name) + text_bytes(value) for name, value in self.headers.items())
        return size


class Partition(NamedTuple):
    """An ordered part of a topic's events. In each group it has one owner at a time."""

    topic: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is never called on a partition

    def __str__(self) -> str:
        return f"{self.topic}/{self.index}"


class Tries(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The attempts of an open event. They are stored with progress and in records, so they survive a crash."""

    failed: int = 0
    started: int = 0
    crashes: int = 0


class Delivery(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An event delivered to this process, under one ownership (epoch) of its partition.

    `position` grows within the partition; `attempt` counts the handler's attempts from 1. `fence` is the number of the
    ownership over the whole fleet, None where the broker has none. `log_id` is the incarnation of the partition's log.
    `drawn`: the event comes from the aside, not from the log. `tries`: only set in a shared partition, where a retry
    arrives as a new delivery.
    """

    event: Event
    partition: Partition
    position: int
    epoch: int
    attempt: int = 1
    fence: int | None = None
    log_id: str = ""
    drawn: bool = False
    tries: Tries | None = None
