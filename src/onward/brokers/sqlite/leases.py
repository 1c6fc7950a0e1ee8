"""Groups, members and leases in the store."""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from onward.brokers.base import PASSING, Start
from onward.brokers.sqlite import log
from onward.brokers.sqlite.membership import Lease, Seat

_SEATS = """
SELECT p.id, p.idx, g.owner, g.fence, g.clean, g.until, g.ttl, g.boot
FROM onward_partition p JOIN onward_group g ON g.part = p.id AND g.grp = ? WHERE p.topic = ? ORDER BY p.idx
"""
_NEW_ROWS = """
INSERT INTO onward_group (part, grp, watermark, fence)
SELECT p.id, :grp, 0, coalesce((SELECT fence FROM onward_fence f WHERE f.part = p.id AND f.grp = :grp), 0)
FROM onward_partition p
WHERE p.topic = :topic AND NOT EXISTS (SELECT 1 FROM onward_group g WHERE g.part = p.id AND g.grp = :grp)
"""
_BEGIN = "UPDATE onward_group SET watermark = ? WHERE part = ? AND grp = ?"
_KEEP_FENCES = """
INSERT OR REPLACE INTO onward_fence (part, grp, fence) SELECT part, grp, fence FROM onward_group
WHERE grp = ? AND part IN (SELECT id FROM onward_partition WHERE topic = ?)
"""
_KNOWN = "SELECT 1 FROM onward_partition p JOIN onward_group g ON g.part = p.id WHERE p.topic = ? AND g.grp = ? LIMIT 1"
_CLAIM = """
UPDATE onward_group SET owner = ?, fence = fence + 1, until = ?, ttl = ?, boot = ?, clean = 0 WHERE part = ? AND grp = ?
RETURNING fence, watermark, done_above, tries
"""
_GIVE_BACK = """
UPDATE onward_group SET owner = NULL, until = 0, clean = ? WHERE part = ? AND grp = ? AND owner = ? AND fence = ?
"""
_RENEW = "UPDATE onward_group SET until = ?, ttl = ?, boot = ? WHERE part = ? AND grp = ?"
_MEMBERS = "SELECT member, until, ttl, boot FROM onward_member WHERE grp = ? AND topic = ?"
_ENLIST = "INSERT OR REPLACE INTO onward_member (grp, topic, member, until, ttl, boot) VALUES (?, ?, ?, ?, ?, ?)"
_STRIKE = "DELETE FROM onward_member WHERE grp = ? AND topic = ? AND member = ?"


class Claim(NamedTuple):
    fence: int
    watermark: int
    done_above: bytes | None
    tries: bytes | None


def enter(db: sqlite3.Connection, group: str, topic: int, start: Start) -> None:
    """Give the group a row per partition. `start` counts only if it had none; later partitions start at 0."""
    known = is_known(db, group, topic)
    db.execute(_NEW_ROWS, {"grp": group, "topic": topic})
    if start != "earliest" and not known:
        rows = db.execute("SELECT id, next FROM onward_partition WHERE topic = ?", (topic,)).fetchall()
        db.executemany(_BEGIN, [(_start_position(db, part, following, start), part, group) for part, following in rows])


def is_known(db: sqlite3.Connection, group: str, topic: int) -> bool:
    return db.execute(_KNOWN, (topic, group)).fetchone() is not None


def _start_position(db: sqlite3.Connection, part: int, following: int, start: Start) -> int:
    if start == "latest":
        return following
    (at,) = db.execute(
        "SELECT min(at) FROM onward_log WHERE at >= ? AND at < ? AND time >= ?",
        (log.address(part), log.address(part + 1), start),
    ).fetchone()
    return following if at is None else log.position_of(at)


def seats(db: sqlite3.Connection, group: str, topic: int, now: float, boot: str) -> tuple[list[Seat], dict[int, Lease]]:
    """The partitions of a topic, and the leases on those that are owned."""
    db.execute(_NEW_ROWS, {"grp": group, "topic": topic})
    found: list[Seat] = []
    leases: dict[int, Lease] = {}
    for part, index, owner, fence, clean, *rest in db.execute(_SEATS, (group, topic)):
        lease = Lease(*rest)
        if owner is not None and lease.counts(now, boot):
            leases[part] = lease
        found.append(Seat(part, index, owner, fence, bool(clean)))
    return found, leases


def claim(db: sqlite3.Connection, group: str, part: int, owner: str, lease: Lease) -> Claim:
    db.execute("DELETE FROM onward_moved WHERE grp = ? AND part = ?", (group, part))  # the new owner loads them
    return Claim(*db.execute(_CLAIM, (owner, *lease, part, group)).fetchone())


def give_back(db: sqlite3.Connection, group: str, owner: str, place: tuple[int, int], *, clean: bool) -> None:
    """Free the partition, if it is still the owner's under this fence."""
    part, fence = place
    db.execute(_GIVE_BACK, (clean, part, group, owner, fence))


def renew(db: sqlite3.Connection, group: str, parts: Iterable[int], lease: Lease) -> None:
    db.executemany(_RENEW, [(*lease, part, group) for part in parts])


def members(db: sqlite3.Connection, group: str, topic: int) -> dict[str, Lease]:
    return {member: Lease(*lease) for member, *lease in db.execute(_MEMBERS, (group, topic))}


def owners(db: sqlite3.Connection, group: str, topic: int) -> dict[str, Lease]:
    """Whoever owned a partition last, with that lease; they need not be members any more."""
    return {row[2]: Lease(*row[5:]) for row in db.execute(_SEATS, (group, topic)) if row[2] is not None}


def enlist(db: sqlite3.Connection, group: str, topic: int, member: str, lease: Lease) -> None:
    db.execute(_ENLIST, (group, topic, member, *lease))


def strike(db: sqlite3.Connection, group: str, topic: int, gone: Sequence[str]) -> None:
    db.executemany(_STRIKE, [(group, topic, member) for member in gone])


def forget(db: sqlite3.Connection, group: str, topic: int) -> None:
    """Remove the group's progress, records and members in a topic. Its fences never go back, should it come again."""
    if group.startswith(PASSING):
        db.execute("DELETE FROM onward_roster WHERE grp = ?", (group,))
    else:
        db.execute(_KEEP_FENCES, (group, topic))
    parts = "part IN (SELECT id FROM onward_partition WHERE topic = ?)"
    for table in ("onward_group", "onward_aside", "onward_moved"):
        db.execute(f"DELETE FROM {table} WHERE grp = ? AND {parts}", (group, topic))
    db.execute("DELETE FROM onward_member WHERE grp = ? AND topic = ?", (group, topic))


def moved(db: sqlite3.Connection, group: str, parts: frozenset[int]) -> list[tuple[int, str, str | None, float | None]]:
    """Take the notices about records in these partitions: partition, record, new state and due time."""
    rows: list[Any] = db.execute(
        "SELECT seq, part, id, state, due FROM onward_moved WHERE grp = ? ORDER BY seq", (group,)
    ).fetchall()
    mine = [row for row in rows if row[1] in parts]
    db.executemany("DELETE FROM onward_moved WHERE seq = ?", [(row[0],) for row in mine])
    return [(part, name, state, due) for _, part, name, state, due in mine]
