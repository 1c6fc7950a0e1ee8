"""Figures for operators, read from the store: how far groups are, and which members they have."""

import sqlite3
import time
from collections.abc import Mapping

from onward.brokers.base import BrokerLag, GroupInfo, MemberInfo, Standing
from onward.brokers.sqlite import leases, log
from onward.brokers.sqlite.leases import Lease
from onward.event import Partition

_TIME = """
SELECT time FROM onward_log
WHERE at >= coalesce((SELECT max(at) FROM onward_log WHERE at BETWEEN ? AND ?), ?) AND at < ? ORDER BY at LIMIT 1
"""
_STANDINGS = """
SELECT g.grp, p.idx, g.watermark, p.next, g.owner, g.fence, g.until, g.ttl, g.boot
FROM onward_partition p JOIN onward_group g ON g.part = p.id WHERE p.topic = ? ORDER BY g.grp, p.idx
"""


def topic_id(db: sqlite3.Connection, topic: str) -> int | None:
    row = db.execute("SELECT id FROM onward_topic WHERE name = ?", (topic,)).fetchone()
    return None if row is None else int(row[0])


def lags(db: sqlite3.Connection, places: Mapping[Partition, tuple[int, int]]) -> dict[Partition, BrokerLag]:
    """The events in the log from each place (partition id, position) on."""
    return {partition: _lag(db, part, position) for partition, (part, position) in places.items()}


def groups(db: sqlite3.Connection, topic: str, now: float, boot: str) -> list[GroupInfo]:
    number = topic_id(db, topic)
    if number is None:
        return []
    standings: dict[str, dict[int, Standing]] = {}
    for group, index, watermark, end, owner, fence, *lease in db.execute(_STANDINGS, (number,)):
        name = leases.member_of(owner).name if owner is not None and Lease(*lease).counts(now, boot) else None
        standings.setdefault(group, {})[index] = Standing(watermark, end, name, fence)
    return [
        GroupInfo(group, topic, alive(db, group, number, now, boot), standing) for group, standing in standings.items()
    ]


def alive(db: sqlite3.Connection, group: str, topic: int, now: float, boot: str) -> list[MemberInfo]:
    """The live members, including those that are off the list but still own a partition."""
    listed = leases.members(db, group, topic) | leases.owners(db, group, topic)
    return [leases.member_of(name) for name, lease in sorted(listed.items()) if lease.counts(now, boot)]


def owners(db: sqlite3.Connection, group: str, topic: str, now: float, boot: str) -> list[MemberInfo]:
    """The members with a valid lease on a partition."""
    number = topic_id(db, topic)
    listed = {} if number is None else leases.owners(db, group, number)
    return [leases.member_of(name) for name, lease in sorted(listed.items()) if lease.counts(now, boot)]


def group_names(db: sqlite3.Connection, topic: int) -> list[str]:
    query = "SELECT DISTINCT g.grp FROM onward_partition p JOIN onward_group g ON g.part = p.id WHERE p.topic = ?"
    return [name for (name,) in db.execute(f"{query} ORDER BY g.grp", (topic,))]


def _lag(db: sqlite3.Connection, part: int, position: int) -> BrokerLag:
    found = db.execute("SELECT next FROM onward_partition WHERE id = ?", (part,)).fetchone()
    if found is None:
        return BrokerLag(None, None)  # the topic was dropped
    (tail,) = found
    if tail <= position:
        return BrokerLag(0, None)
    row = db.execute(_TIME, log.span(part, position)).fetchone()
    if row is None:
        return BrokerLag(0, None)  # the rest was removed by retention
    return BrokerLag(tail - position, max(0.0, time.time() - row[0]))
