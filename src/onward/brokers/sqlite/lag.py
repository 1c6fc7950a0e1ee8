"""How far consumers are behind: figures for people, read from the store."""

import sqlite3
import time
from collections.abc import Mapping

from onward.brokers.base import BrokerLag, GroupInfo, MemberInfo, Standing
from onward.brokers.sqlite import leases, log
from onward.event import Partition

_TIME = """
SELECT time FROM onward_log
WHERE at >= coalesce((SELECT max(at) FROM onward_log WHERE at BETWEEN ? AND ?), ?) AND at < ? ORDER BY at LIMIT 1
"""
_WATERMARKS = """
SELECT g.grp, p.idx, g.watermark FROM onward_partition p JOIN onward_group g ON g.part = p.id
WHERE p.topic = ? ORDER BY g.grp, p.idx
"""


def lags(db: sqlite3.Connection, places: Mapping[Partition, tuple[int, int]]) -> dict[Partition, BrokerLag]:
    """What stands in the log from each place (partition id, position) on."""
    return {partition: _lag(db, part, position) for partition, (part, position) in places.items()}


def groups(db: sqlite3.Connection, topic: str, now: float, boot: str) -> list[GroupInfo]:
    row = db.execute("SELECT id FROM onward_topic WHERE name = ?", (topic,)).fetchone()
    if row is None:
        return []
    watermarks: dict[str, dict[int, int]] = {}
    for group, index, watermark in db.execute(_WATERMARKS, row):
        watermarks.setdefault(group, {})[index] = watermark
    return [
        GroupInfo(
            group,
            topic,
            [MemberInfo.parse(name) for name in alive(db, group, row[0], now, boot)],
            {index: Standing(mark, None, None, None) for index, mark in marks.items()},
        )
        for group, marks in watermarks.items()
    ]


def alive(db: sqlite3.Connection, group: str, topic: int, now: float, boot: str) -> list[str]:
    """The members, and whoever still owns a partition, by the names they gave themselves."""
    listed = leases.members(db, group, topic) | leases.owners(db, group, topic)
    return [name.rsplit(":", 1)[0] for name, lease in sorted(listed.items()) if lease.counts(now, boot)]


def _lag(db: sqlite3.Connection, part: int, position: int) -> BrokerLag:
    (tail,) = db.execute("SELECT next FROM onward_partition WHERE id = ?", (part,)).fetchone()
    if tail <= position:
        return BrokerLag(0, None)
    row = db.execute(_TIME, log.span(part, position)).fetchone()
    if row is None:
        return BrokerLag(0, None)  # the rest was trimmed
    return BrokerLag(tail - position, max(0.0, time.time() - row[0]))
