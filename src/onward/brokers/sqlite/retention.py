"""Retention: removes events that every group has finished, by age or by size. It never removes an event that some group
has not finished, and nothing from a topic that no group has read."""

import heapq
import sqlite3
from collections.abc import Callable, Iterator
from typing import NamedTuple

from onward import clock
from onward.brokers.base import PASSING
from onward.brokers.sqlite import figures, leases, log
from onward.brokers.sqlite.backlog import Backlog, extents
from onward.brokers.sqlite.transaction import Transaction
from onward.settings import Settings

_INTERVAL_S = 5.0
_PAGE_ROWS = 500  # the most rows that one turn removes, so that no other writer waits long for the lock
_NEXT_PAGE_S = 0.02

_ROWS = "SELECT at, count, time, length(data) FROM onward_log WHERE at >= ? AND at < ? ORDER BY at LIMIT ?"

_PASSING = """
SELECT DISTINCT g.grp, p.topic FROM onward_group g JOIN onward_partition p ON p.id = g.part WHERE g.grp LIKE ?
"""


class Finished(NamedTuple):
    """A record batch that every group has finished."""

    time: float
    at: int
    size: int


class Retention:
    """A chore of every broker object. If several processes do it, the later ones find nothing to remove."""

    def __init__(self, settings: Settings, backlog: Backlog, kick: Callable[["Retention", float], None]) -> None:
        self.due = clock.now() + _INTERVAL_S
        self._retention_s = settings.retention_s
        self._retention_bytes = settings.retention_bytes
        self._backlog = backlog
        self._kick = kick

    def work(self, tx: Transaction) -> Callable[[], None]:
        self._backlog.forget()
        _drop_left(tx)
        left = _PAGE_ROWS
        for (topic,) in tx.db.execute("SELECT id FROM onward_topic ORDER BY id").fetchall():
            left -= self._trim(tx.db, topic, tx.wall - self._retention_s, left)
            if left <= 0:
                break
        pause = _NEXT_PAGE_S if left <= 0 else _INTERVAL_S
        return lambda: self._kick(self, clock.now() + pause)

    def failed(self, error: Exception) -> None:
        """Nothing was removed. The writer will call `work` again."""

    def _trim(self, db: sqlite3.Connection, topic: int, cutoff: float, limit: int) -> int:
        """Remove at most `limit` record batches of a topic, the oldest first. Returns how many were removed."""
        found = extents(db, topic)
        floors = {extent: extent.floor or 0 for extent in found}  # without a group no event is finished
        stored = sum(extent.bytes_before(db, floor) - extent.bytes_before(db, 0) for extent, floor in floors.items())
        excess = stored - self._retention_bytes
        gone: list[tuple[int]] = []
        for batch in heapq.merge(*[_finished(db, extent.part, floor, limit) for extent, floor in floors.items()]):
            if len(gone) == limit or (batch.time >= cutoff and excess <= 0):
                break
            gone.append((batch.at,))
            excess -= batch.size
        db.executemany("DELETE FROM onward_log WHERE at = ?", gone)
        return len(gone)


def _drop_left(tx: Transaction) -> None:
    """Drop temporary groups without a live member. Otherwise their unread events would stay forever."""
    boot = clock.boot_id()
    for group, topic in tx.db.execute(_PASSING, (f"{PASSING}%",)).fetchall():
        if not figures.alive(tx.db, group, topic, tx.now, boot):
            leases.forget(tx.db, group, topic)


def _finished(db: sqlite3.Connection, part: int, floor: int, limit: int) -> Iterator[Finished]:
    rows = db.execute(_ROWS, (log.address(part), log.address(part, floor), limit))
    for at, count, time, size in rows.fetchall():
        if log.position_of(at) + count > floor:
            return
        yield Finished(time, at, size)
