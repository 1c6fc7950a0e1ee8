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
    ours = {
        partition: claim.part
        for partition, claim in settlement.claims.items()
        if _is_ours(db, settlement.group, settlement.owner, claim)
    }
    lost: dict[Partition, None] = {}
    _set_aside(db, settlement, ours, lost)
    for progress in settlement.progress:
        if progress.partition in ours:
            _write(db, settlement.group, ours[progress.partition], progress)
        else:
            lost[progress.partition] = None
    aside.delete(db, settlement.group, settlement.gone, ours, lost)
    return list(lost)


def _is_ours(db: sqlite3.Connection, group: str, owner: str, claim: Claimed) -> bool:
    row: object = db.execute(
        "SELECT owner, fence FROM onward_group WHERE part = ? AND grp = ?", (claim.part, group)
    ).fetchone()
    return row == (owner, claim.fence)


def _set_aside(
    db: sqlite3.Connection, settlement: Settlement, ours: Mapping[Partition, int], lost: dict[Partition, None]
) -> None:
    rows = []
    for record in settlement.aside:
        if record.partition in ours:
            rows.append((record, ours[record.partition]))
        else:
            lost[record.partition] = None
    try:
        aside.store(db, rows)
    except (sqlite3.Error, msgspec.MsgspecError, TypeError, ValueError) as error:
        raise AsideError(f"records of group {settlement.group} could not be set aside: {error}") from error


def _write(db: sqlite3.Connection, group: str, part: int, progress: Progress) -> None:
    # A watermark never moves back within a fence: what comes late says less than is stored, and is not written.
    above = _encode(progress.done_above) if progress.done_above else None
    tries = _encode(progress.tries) if progress.tries else None
    db.execute(_UPDATE, (progress.watermark, above, tries, part, group, progress.watermark))
