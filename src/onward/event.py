"""What travels: Event, Partition, Tries, Delivery. Frozen values, no I/O."""

import os
import random
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

_random = random.Random()  # our own: a user's random.seed() must not make two processes draw the same ids
os.register_at_fork(after_in_child=_random.seed)
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_UNFIT = re.compile(f"{CONTROL.pattern}|[\ud800-\udfff]")  # half a surrogate pair has no bytes


def new_id() -> str:
    """A UUIDv7: unique, and ordered by the millisecond it was made in."""
    bits = _random.getrandbits(74)
    number = (time.time_ns() // 1_000_000) << 80 | 0x7 << 76 | (bits >> 62) << 64 | 0x2 << 62 | bits & (1 << 62) - 1
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def new_ids(count: int) -> list[str]:
    """That many ids at the price of one: they count up from a random one, so they are ordered too."""
    first = new_id()
    prefix, start = first[:24], int(first[24:], 16)
    return [f"{prefix}{start + number & 0xFFFF_FFFF_FFFF:012x}" for number in range(count)]


def text_bytes(text: str) -> int:
    """How many bytes a text has in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def header_fault(headers: Any) -> str | None:
    """Why no broker takes these headers. A client written in C cuts a name at its first NUL, and a name that is cut may
    be another one's; a value may hold any character."""
    if not isinstance(headers, Mapping):
        return f"headers={headers!r} is a {type(headers).__name__}; use a dict of names and values, both str"
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            return f"header {name!r}: {value!r}: names and values are str"
        if not name or _UNFIT.search(name):
            return f"header {name!r}: a name has at least one character, and no control characters; rename it"
    return None


class Event(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One fact, published once. `value` None is a tombstone and differs from empty bytes.

    `time` is Unix time in seconds, set by the publisher. `type` is the CloudEvents type, empty when unknown.
    """

    id: str
    topic: str
    key: str | None
    value: bytes | None
    headers: Mapping[str, str] = {}
    type: str = ""
    time: float = 0.0

    def whole(self) -> "Event":
        """This event with every field in its place, fit for an encoder; a broker may leave some to be asked for."""
        return self

    @property
    def size(self) -> int:
        """Bytes that count against limits: the value, the key and the headers."""
        size = len(self.value or b"") + text_bytes(self.key or "")
        if self.headers:
            size += sum(text_bytes(name) + text_bytes(value) for name, value in self.headers.items())
        return size


class Partition(NamedTuple):
    """An ordered run of a topic's events that has one owner at a time."""

    topic: str
    index: int  # type: ignore[assignment]  # the domain's word; nobody calls tuple.index on it

    def __str__(self) -> str:
        return f"{self.topic}/{self.index}"


class Tries(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What an open event has been through. It travels in progress and in records, so it survives a crash."""

    failed: int = 0
    started: int = 0
    crashes: int = 0


class Delivery(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An event handed to this process, under one ownership (epoch) of its partition.

    `position` grows within the partition; `attempt` counts the handler's tries of it from 1. `fence` is the number of
    the ownership over the whole fleet, None where the broker has none. `log_id` is the incarnation of the partition's
    log. `drawn`: it comes from the aside, not from the log. `tries`: only in a shared partition, where a retry comes
    back as a delivery.
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
