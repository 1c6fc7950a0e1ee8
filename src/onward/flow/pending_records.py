"""The records of one partition on their way into the store, and those on their way out of it. Pure."""

from collections import Counter

import msgspec

from onward.brokers.base import AsideRecord, Assigned, Failure, State, record_id
from onward.flow.entry import Entry, ParkedRecord


class PendingRecord(msgspec.Struct, frozen=True):
    """On its way to the store: of an event of the log (`entry`), of a record known here (`parked`), or both."""

    record: AsideRecord
    entry: Entry | None
    parked: ParkedRecord | None


class PendingRecords:
    """Of one ownership. They go with the next settle; `dirty`: there is something for it to carry."""

    __slots__ = (
        "_assigned",
        "_group",
        "dirty",
        "doubled",
        "going",
        "gone",
        "leaving",
        "refusing",
        "retry_at",
        "shelved",
    )

    def __init__(self, assigned: Assigned, group: str) -> None:
        self._assigned = assigned
        self._group = group
        self.dirty = False  # also by progress without any record
        self.leaving: dict[int, PendingRecord] = {}  # by position
        self.gone: list[tuple[str, str | None]] = []  # records to be removed, and the keys they park until then
        self.going: Counter[str | None] = Counter()  # those keys
        self.doubled: set[int] = set()  # open in the log, but a record of them is in the store too
        self.retry_at = 0.0  # the store refused: not before this
        self.refusing = False  # it refused, and has not stored anything since
        self.shelved: dict[int, Entry] = {}  # drawn events whose starts could not be recorded, until it does

    def id_at(self, position: int) -> str:
        return record_id(self._group, self._assigned.log_id, self._assigned.partition, position)

    def record(
        self, entry: Entry, state: State, due: float | None, failure: Failure | None = None, *, wait_s: float = 0.0
    ) -> AsideRecord:
        """`wait_s`: how long it waits from now on until it is due. Without a failure it keeps the one it has."""
        position = entry.delivery.position
        return AsideRecord(
            id=self.id_at(position),
            group=self._group,
            partition=self._assigned.partition,
            position=position,
            state=state,
            due=due,
            event=entry.delivery.event,
            tries=entry.tries,
            failure=failure or entry.failure,
            wait_s=wait_s if due is not None else None,
        )

    def send(self, record: AsideRecord, entry: Entry | None, parked: ParkedRecord | None) -> None:
        self.leaving[record.position] = PendingRecord(record, entry, parked)
        self.doubled.discard(record.position)  # this replaces the record in the store
        self.dirty = True

    def remove(self, id_: str, key: str | None) -> None:
        """A record is of no use any more. Its key, if any, is parked until the store has removed it."""
        self.gone.append((id_, key))
        self.going[key] += 1
        self.dirty = True

    def is_removing(self, position: int) -> bool:
        """Its record is done with, and the store is about to remove it."""
        id_ = self.id_at(position)
        return any(each == id_ for each, _ in self.gone)

    def removed(self, count: int) -> None:
        """The first so many are not in the store any more."""
        for _, key in self.gone[:count]:
            self.going[key] -= 1
            if not self.going[key]:
                del self.going[key]
        del self.gone[:count]


def with_history(failure: Failure, earlier: Failure | None) -> Failure:
    """A failure that follows an earlier one: it keeps the time of the first, and an end that the handler had no part
    in does not hide what the handler has said."""
    if earlier is None:
        return failure
    message = failure.message
    if failure.reason in ("expired", "crashed") and earlier.error != failure.error:
        message = f"{message}; before that {earlier.error}: {earlier.message}"
    return msgspec.structs.replace(failure, first=earlier.first, message=message)
