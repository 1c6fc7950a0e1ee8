"""Progress in the store: read at a claim, written by a settle, together with the records that go aside."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from onward.brokers.base import AsideRecord, Progress, Tries
from onward.brokers.sqlite import aside
from onward.errors import AsideError
from onward.event import Partition

_encode = msgspec.msgpack.encode
_intervals = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
_tries = msgspec.msgpack.Decoder(dict[int, Tries]).decode

_UPDATE = (
    "UPDATE onward_group SET watermark = ?, done_above = ?, tries = ? WHERE part = ? AND grp = ? AND watermark <= ?"
)


class Claimed(NamedTuple):
    """What a partition must still show in the store for a settle to count."""

    part: int
    fence: int


class Settlement(NamedTuple):
    group: str
    owner: str
    claims: Mapping[Partition, Claimed]  # what this member held, under the current epoch, when it called
    progress: Sequence[Progress]
    aside: Sequence[AsideRecord]
    gone: Sequence[str]


def decoded(partition: Partition, watermark: int, done_above: bytes | None, tries: bytes | None) -> Progress | None:
    """What was settled last, None where nothing ever was."""
    if not watermark and done_above is None and tries is None:
        return None
    above = _intervals(done_above) if done_above is not None else ()
    return Progress(partition, 0, watermark, above, tries=_tries(tries) if tries is not None else {})


def settle(db: sqlite3.Connection, settlement: Settlement) -> list[Partition]:
    """Write what is ours; answers the partitions that are not, of which nothing is written."""
    standing = _Standing(db, settlement)
    records = [record for record in settlement.aside if standing.part(record.partition) is not None]
    try:
        aside.store(db, [(record, settlement.claims[record.partition].part) for record in records])
    except (sqlite3.Error, msgspec.MsgspecError, TypeError, ValueError) as error:
        raise AsideError(
            f"records of group {settlement.group} could not be set aside: {error}",
            partitions=[each.partition for each in settlement.progress],
        ) from error
    for progress in settlement.progress:
        part = standing.part(progress.partition)
        if part is not None:
            _write(db, settlement.group, part, progress)
    for name, partition in aside.find(db, settlement.group, settlement.gone):
        if standing.part(partition) is not None:
            aside.delete(db, name)
    return list(standing.lost)


class _Standing:
    """Which partitions are ours, asked of the store once each."""

    def __init__(self, db: sqlite3.Connection, settlement: Settlement) -> None:
        self._db = db
        self._settlement = settlement
        self._known: dict[Partition, int | None] = {}
        self.lost: dict[Partition, None] = {}

    def part(self, partition: Partition) -> int | None:
        """The partition's id if it is ours; else it is lost."""
        if partition not in self._known:
            claim = self._settlement.claims.get(partition)
            ours = claim is not None and self._is_ours(claim)
            self._known[partition] = claim.part if claim is not None and ours else None
            if not ours:
                self.lost[partition] = None
        return self._known[partition]

    def _is_ours(self, claim: Claimed) -> bool:
        row: object = self._db.execute(
            "SELECT owner, fence FROM onward_group WHERE part = ? AND grp = ?", (claim.part, self._settlement.group)
        ).fetchone()
        return row == (self._settlement.owner, claim.fence)


def _write(db: sqlite3.Connection, group: str, part: int, progress: Progress) -> None:
    # A watermark never moves back within a fence: what comes late says less than is stored, and is not written.
    above = _encode(progress.done_above) if progress.done_above else None
    tries = _encode(progress.tries) if progress.tries else None
    db.execute(_UPDATE, (progress.watermark, above, tries, part, group, progress.watermark))
