"""Groups, members and leases in the store."""

import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onward import clock
from onward.brokers.base import PASSING, MemberInfo, Start
from onward.brokers.core.leasing import TopicView
from onward.brokers.core.share import Seat
from onward.brokers.sqlite import log
from onward.brokers.sqlite.database import Database
from onward.brokers.sqlite.topics import Topic
from onward.event import Partition

# A lease is written and checked with the same clock, but floating point may round its length up.
_ROUNDING_S = 1.0

_SEATS = """
SELECT p.id, p.idx, g.owner, g.fence, g.clean, g.gone_fence, g.until, g.ttl, g.boot
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
UPDATE onward_group SET owner = ?, fence = fence + 1, until = ?, ttl = ?, boot = ?, clean = 0, waits = ?
WHERE part = ? AND grp = ?
RETURNING fence, watermark, done_above, tries
"""
_GIVE_BACK = """
UPDATE onward_group SET owner = NULL, until = 0, clean = ?, gone_fence = CASE WHEN ? THEN fence ELSE gone_fence END
WHERE part = ? AND grp = ? AND owner = ? AND fence = ?
"""
# An owner that still waits has not begun, because the owner before it may still run. So the next owner must wait again.
_FREE_GONE = """
UPDATE onward_group SET owner = NULL, until = 0, gone_fence = CASE WHEN waits THEN gone_fence ELSE fence END
WHERE grp = ? AND owner = ? AND part IN (SELECT id FROM onward_partition WHERE topic = ?)
"""
_RENEW = "UPDATE onward_group SET until = ?, ttl = ?, boot = ?, waits = ? WHERE part = ? AND grp = ?"
_OWNERS = "SELECT owner, until, ttl, boot FROM onward_group WHERE part = ? AND owner IS NOT NULL"
_KNOWN_NAMES = "SELECT member FROM onward_member UNION SELECT owner FROM onward_group WHERE owner IS NOT NULL"
_MEMBERS = "SELECT member, until, ttl, boot FROM onward_member WHERE grp = ? AND topic = ?"
_ENLIST = "INSERT OR REPLACE INTO onward_member (grp, topic, member, until, ttl, boot) VALUES (?, ?, ?, ?, ?, ?)"
_STRIKE = "DELETE FROM onward_member WHERE grp = ? AND topic = ? AND member = ?"


class Lease(NamedTuple):
    until: float
    ttl: float
    boot: str

    @classmethod
    def of(cls, now: float, ttl: float) -> "Lease":
        return cls(now + ttl, ttl, clock.boot_id())

    def counts(self, now: float, boot: str) -> bool:
        """Whether the lease is valid. If it ends later than its own length from now, it is from another boot."""
        return self.boot == boot and 0 < self.until - now <= self.ttl + _ROUNDING_S


class MovedRow(NamedTuple):
    """A notice that an operator moved a record, or removed it (`state` is None)."""

    part: int
    id: str
    state: str | None
    due: float | None


class StoredProgress(NamedTuple):
    """A partition's row as its new owner finds it, with the fence of the new ownership."""

    fence: int
    watermark: int
    done_above: bytes | None
    tries: bytes | None


def enter(db: sqlite3.Connection, group: str, topic: int, start: Start) -> None:
    """Create the group's row for each partition. `start` is used only if the group had none. Partitions that are added
    later start at 0."""
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


def free_gone(db: sqlite3.Connection, group: str, topic: int, gone: frozenset[str]) -> bool:
    """Free all partitions of these members, for any member, and remove the members from the list. True if there were
    any."""
    names = [
        name for name in members(db, group, topic).keys() | owners(db, group, topic) if member_of(name).name in gone
    ]
    db.executemany(_FREE_GONE, [(group, name, topic) for name in names])
    strike(db, group, topic, names)
    return bool(names)


def view(
    db: sqlite3.Connection, group: str, topic: Topic, me: str, moment: tuple[float, str]
) -> tuple[TopicView, float]:
    """A topic as the group's members see it, and the time at which the first lease of another member ends.

    An owner may renew a lease that has ended, as long as no other member has claimed the partition. So our own seats
    still show us as the owner."""
    now, boot = moment
    db.execute(_NEW_ROWS, {"grp": group, "topic": topic.id})
    found: list[Seat] = []
    expiries: list[float] = []
    for _, index, owner, fence, clean, gone_fence, *rest in db.execute(_SEATS, (group, topic.id)):
        lease = Lease(*rest)
        counts = owner is not None and lease.counts(now, boot)
        if counts and owner != me:
            expiries.append(lease.until)
        current = owner if counts or owner == me else None
        found.append(Seat(Partition(topic.name, index), current, fence, bool(clean), gone_fence == fence))
    listed = members(db, group, topic.id)
    alive = {name: lease.counts(now, boot) for name, lease in listed.items()}
    expiries += [lease.until for name, lease in listed.items() if alive[name] and name != me]
    return TopicView(topic.name, found, alive), min(expiries, default=math.inf)


def member_of(owner: str) -> MemberInfo:
    """The member behind an owner's name, which has a suffix that is unique for each subscription."""
    return MemberInfo.parse(owner.rpartition(":")[0])


def claim(db: sqlite3.Connection, group: str, part: int, owner: str, lease: Lease, *, waits: bool) -> StoredProgress:
    """Make `owner` the owner of the partition. `waits`: it must wait for the takeover grace before it begins."""
    db.execute("DELETE FROM onward_moved WHERE grp = ? AND part = ?", (group, part))  # the new owner loads all records
    return StoredProgress(*db.execute(_CLAIM, (owner, *lease, waits, part, group)).fetchone())


def give_back(
    db: sqlite3.Connection, group: str, owner: str, place: tuple[int, int], *, clean: bool, is_gone: bool = False
) -> None:
    """Free the partition if it still belongs to this owner under this fence. `is_gone`: the last owner was not clean,
    but its processes have ended, so none of its handlers can still run."""
    part, fence = place
    db.execute(_GIVE_BACK, (clean, is_gone, part, group, owner, fence))


def renew(db: sqlite3.Connection, group: str, parts: Mapping[int, bool], lease: Lease) -> None:
    """Renew leases. `parts`: by partition id, whether its owner still waits."""
    db.executemany(_RENEW, [(*lease, waits, part, group) for part, waits in parts.items()])


def members(db: sqlite3.Connection, group: str, topic: int) -> dict[str, Lease]:
    return {member: Lease(*lease) for member, *lease in db.execute(_MEMBERS, (group, topic))}


def owners(db: sqlite3.Connection, group: str, topic: int) -> dict[str, Lease]:
    """The last owners of partitions, with their leases. They may no longer be members."""
    return {row[2]: Lease(*row[6:]) for row in db.execute(_SEATS, (group, topic)) if row[2] is not None}


def live_owners(db: Database, parts: Iterable[int], now: float) -> set[str]:
    """The owners of these partitions in all groups, as far as their leases are valid."""
    boot = clock.boot_id()
    rows = [row for part in parts for row in db.execute(_OWNERS, (part,))]
    return {owner for owner, *lease in rows if Lease(*lease).counts(now, boot)}


def known_names(db: sqlite3.Connection) -> set[str]:
    """All members and owners of all groups, alive or not."""
    return {name for (name,) in db.execute(_KNOWN_NAMES)}


def ends(db: sqlite3.Connection, topic: int) -> dict[int, int]:
    """The end of each partition's log, by partition id."""
    return dict(db.execute("SELECT id, next FROM onward_partition WHERE topic = ?", (topic,)).fetchall())


def enlist(db: sqlite3.Connection, group: str, topic: int, member: str, lease: Lease) -> None:
    db.execute(_ENLIST, (group, topic, member, *lease))


def strike(db: sqlite3.Connection, group: str, topic: int, gone: Sequence[str]) -> None:
    db.executemany(_STRIKE, [(group, topic, member) for member in gone])


def forget(db: sqlite3.Connection, group: str, topic: int) -> None:
    """Remove the group's progress, records and members in a topic. Its fences stay, so that they continue to grow if
    the group is created again."""
    if group.startswith(PASSING):
        db.execute("DELETE FROM onward_roster WHERE grp = ?", (group,))
    else:
        db.execute(_KEEP_FENCES, (group, topic))
    parts = "part IN (SELECT id FROM onward_partition WHERE topic = ?)"
    for table in ("onward_group", "onward_aside", "onward_moved"):
        db.execute(f"DELETE FROM {table} WHERE grp = ? AND {parts}", (group, topic))
    db.execute("DELETE FROM onward_member WHERE grp = ? AND topic = ?", (group, topic))


def moved(db: sqlite3.Connection, group: str, parts: frozenset[int]) -> list[MovedRow]:
    """Read and delete the notices about records in these partitions."""
    rows = db.execute("SELECT seq, part, id, state, due FROM onward_moved WHERE grp = ? ORDER BY seq", (group,))
    mine = [row for row in rows.fetchall() if row[1] in parts]
    db.executemany("DELETE FROM onward_moved WHERE seq = ?", [(row[0],) for row in mine])
    return [MovedRow(*row[1:]) for row in mine]
