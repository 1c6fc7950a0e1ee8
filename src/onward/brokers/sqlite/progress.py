"""Progress in the store. A claim reads it. A settle writes it, together with records of the aside."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from onward.brokers.base import AsideRecord, Progress, Tries
from onward.brokers.sqlite import aside
from onward.brokers.sqlite.leases import StoredProgress
from onward.event import Partition

_encode = msgspec.msgpack.encode
_intervals = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
_tries = msgspec.msgpack.Decoder(dict[int, Tries]).decode

_UPDATE = (
    "UPDATE onward_group SET watermark = ?, done_above = ?, tries = ? WHERE part = ? AND grp = ? AND watermark <= ?"
)


class Claimed(NamedTuple):
    """The claim that must still be in the store for a settle to take effect."""

    part: int
    fence: int


class SettleWrite(NamedTuple):
    group: str
    owner: str
    claims: Mapping[Partition, Claimed]  # the partitions that this member owned, under their epochs, at the call
    progress: Sequence[Progress]
    aside: Sequence[AsideRecord]
    gone: Sequence[str]


class SettleAnswer(NamedTuple):
    lost: list[Partition]  # this member has lost these; nothing was written there
    refused: dict[Partition, str]  # why records could not be stored; nothing was written there either


def decoded(partition: Partition, epoch: int, stored: StoredProgress) -> Progress | None:
    """The progress that was settled last. None if none was settled."""
    watermark, above, tries = stored.watermark, stored.done_above, stored.tries
    if not watermark and above is None and tries is None:
        return None
    done_above = _intervals(above) if above is not None else ()
    return Progress(partition, epoch, watermark, done_above, tries=_tries(tries) if tries is not None else {})


def settle(db: sqlite3.Connection, call: SettleWrite) -> SettleAnswer:
    """Write to the partitions that we still own. In each of them, either everything is written or nothing."""
    ownership = _Ownership(db, call)
    refused = _store_records(db, call, ownership)
    for progress in call.progress:
        part = ownership.part(progress.partition)
        if part is not None and progress.partition not in refused:
            _write(db, call.group, part, progress)
    for name, partition in aside.find(db, call.group, call.gone):
        if partition not in refused and ownership.part(partition) is not None:
            aside.delete(db, name)
    return SettleAnswer(list(ownership.lost), refused)


def _store_records(db: sqlite3.Connection, call: SettleWrite, ownership: "_Ownership") -> dict[Partition, str]:
    """Store the records, partition by partition. Returns the partitions whose records could not be stored, and why."""
    records: dict[Partition, list[AsideRecord]] = {}
    for record in call.aside:
        if ownership.part(record.partition) is not None:
            records.setdefault(record.partition, []).append(record)
    refused: dict[Partition, str] = {}
    for partition, mine in records.items():
        db.execute("SAVEPOINT records")
        try:
            aside.store(db, mine, call.claims[partition].part)
        except (sqlite3.Error, msgspec.MsgspecError, TypeError, ValueError) as error:
            if not db.in_transaction:
                raise  # the error has ended the whole transaction
            db.execute("ROLLBACK TO records")
            refused[partition] = str(error)
        db.execute("RELEASE records")
    return refused


class _Ownership:
    """Which partitions we still own. It reads each of them from the store once."""

    def __init__(self, db: sqlite3.Connection, call: SettleWrite) -> None:
        self._db = db
        self._call = call
        self._known: dict[Partition, int | None] = {}
        self.lost: dict[Partition, None] = {}

    def part(self, partition: Partition) -> int | None:
        """The partition's id if we own it. Otherwise None, and the partition is added to `lost`."""
        if partition not in self._known:
            claim = self._call.claims.get(partition)
            ours = claim is not None and self._is_ours(claim)
            self._known[partition] = claim.part if claim is not None and ours else None
            if not ours:
                self.lost[partition] = None
        return self._known[partition]

    def _is_ours(self, claim: Claimed) -> bool:
        row: object = self._db.execute(
            "SELECT owner, fence FROM onward_group WHERE part = ? AND grp = ?", (claim.part, self._call.group)
        ).fetchone()
        return row == (self._call.owner, claim.fence)


def _write(db: sqlite3.Connection, group: str, part: int, progress: Progress) -> None:
    # A watermark never moves back under one fence. A late settle with a lower watermark is outdated and not written.
    above = _encode(progress.done_above) if progress.done_above else None
    tries = _encode(progress.tries) if progress.tries else None
    db.execute(_UPDATE, (progress.watermark, above, tries, part, group, progress.watermark))
