"""The records of one partition that the next settles store or remove. Pure."""

from collections import Counter

import msgspec

from onward.brokers.base import AsideRecord, Assigned, Failure, State, record_id
from onward.flow.entry import Entry, ParkedRecord


class PendingRecord(msgspec.Struct, frozen=True):
    """A record to store. It belongs to an event of the log (`entry`), to a known record (`parked`), or to both."""

    record: AsideRecord
    entry: Entry | None
    parked: ParkedRecord | None


class PendingRecords:
    """The pending records of one ownership. The next settle carries them. `dirty`: there is something to settle."""

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
        self.dirty = False  # progress without any record sets it too
        self.leaving: dict[int, PendingRecord] = {}  # records to store, by position
        self.gone: list[tuple[str, str | None]] = []  # records to remove, and the keys that they park until then
        self.going: Counter[str | None] = Counter()  # those keys
        self.doubled: set[int] = set()  # positions that are open in the log, but also have a record in the store
        self.retry_at = 0.0  # the store refused records: send none before this time
        self.refusing = False  # the store refused records, and has not stored any since
        self.shelved: dict[int, Entry] = {}  # drawn events that wait until the store can record their starts

    def id_at(self, position: int) -> str:
        return record_id(self._group, self._assigned.log_id, self._assigned.partition, position)

    def record(
        self, entry: Entry, state: State, due: float | None, failure: Failure | None = None, *, wait_s: float = 0.0
    ) -> AsideRecord:
        """The record of an event. `wait_s`: the time from now until it is due. `failure`: by default its last one."""
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
        """Remove a record with the next settle. Its key, if any, stays parked until the store has removed it."""
        self.gone.append((id_, key))
        self.going[key] += 1
        self.dirty = True

    def is_removing(self, position: int) -> bool:
        """Whether the record at this position is about to be removed from the store."""
        id_ = self.id_at(position)
        return any(each == id_ for each, _ in self.gone)

    def removed(self, count: int) -> None:
        """The store has removed the first `count` records of `gone`."""
        for _, key in self.gone[:count]:
            self.going[key] -= 1
            if not self.going[key]:
                del self.going[key]
        del self.gone[:count]


def with_history(failure: Failure, earlier: Failure | None) -> Failure:
    """A failure that follows an earlier one. It keeps the time of the first. If the event expired or crashed, the
    message also has the handler's last error."""
    if earlier is None:
        return failure
    message = failure.message
    if failure.reason in ("expired", "crashed") and earlier.error != failure.error:
        message = f"{message}; before that {earlier.error}: {earlier.message}"
    return msgspec.structs.replace(failure, first=earlier.first, message=message)
