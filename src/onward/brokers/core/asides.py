"""Filters and cursors of an aside. Pure."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from onward.brokers.base import AsideRecord, Failure, Filter, State
from onward.errors import BrokerError


class Listed(Protocol):
    """The fields of a record that an aside can read without the event."""

    @property
    def state(self) -> State: ...
    @property
    def key(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def failed_at(self) -> float | None: ...
    @property
    def size(self) -> int: ...


AnyListed = TypeVar("AnyListed", bound=Listed)


class RecordPlace(NamedTuple):
    """The place of a record in a scan. It never changes."""

    topic: str
    index: int  # type: ignore[assignment]  # as in Partition
    position: int
    id: str

    def cursor(self) -> str:
        return f"{self.topic}:{self.index}:{self.position}:{self.id}"

    @classmethod
    def parse(cls, cursor: str) -> "RecordPlace":
        try:
            topic, index, position, id_ = cursor.split(":", 3)
            return cls(topic, int(index), int(position), id_)
        except ValueError:
            raise BrokerError(f"the cursor {cursor!r} is not from this aside; start without a cursor") from None


def matches(row: Listed, where: Filter) -> bool:
    """Whether the row matches the filter. `topic` and `text` are ignored, because they need more than the row."""
    last = row.failed_at
    return (
        row.state in where.states
        and where.key in (None, row.key)
        and where.error in (None, row.error or "")
        and (where.since is None or (last is not None and last >= where.since))
        and (where.until is None or (last is not None and last < where.until))
    )


def mentions(record: AsideRecord, text: str) -> bool:
    """Whether the text is in the error's message or in the value."""
    if record.failure is not None and text in record.failure.message:
        return True
    return text.encode() in (record.event.value or b"")


def buried(record: AsideRecord, why: str, now: float) -> AsideRecord:
    """A record of a former log, whose position belongs to another event now, as a dead letter."""
    known = record.failure or Failure("", "", "", "", "", record.tries.failed, now, now)
    failure = msgspec.structs.replace(known, reason="refused", error="TopicRecreated", message=why, last=now)
    return msgspec.structs.replace(record, state=State.DEAD, due=None, wait_s=None, failure=failure)


def fitting(rows: Sequence[AnyListed], limit: int, max_bytes: int) -> list[AnyListed]:
    """The first rows within the limits, but always at least one row if there is one."""
    sizes = itertools.accumulate(row.size for row in rows[:limit])
    return [row for at, (row, size) in enumerate(zip(rows[:limit], sizes, strict=True)) if not at or size <= max_bytes]


def oldest(rows: Iterable[Listed]) -> float | None:
    """The earliest of their last failures."""
    return min((row.failed_at for row in rows if row.failed_at is not None), default=None)
