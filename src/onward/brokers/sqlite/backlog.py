"""How much of a topic some group has not finished: a difference of running totals, and what is set aside."""

import sqlite3
from typing import NamedTuple
from urllib.parse import quote

from onward.brokers.sqlite import log
from onward.brokers.sqlite.topics import Topic

_FLOORS = """
SELECT p.id, p.next, p.bytes, min(g.watermark) FROM onward_partition p LEFT JOIN onward_group g ON g.part = p.id
WHERE p.topic = ? GROUP BY p.id
"""
_BY_GROUP = """
SELECT g.grp, g.watermark, p.id, p.next, p.bytes FROM onward_partition p JOIN onward_group g ON g.part = p.id
WHERE p.topic = ?
"""
# The bytes before the row that holds the position, or before the first row after it.
_BEFORE = """
SELECT before FROM onward_log
WHERE at >= coalesce((SELECT max(at) FROM onward_log WHERE at BETWEEN ? AND ?), ?) AND at < ? ORDER BY at LIMIT 1
"""


class Extent(NamedTuple):
    """A partition: its next position, the bytes ever appended, and what every group has finished (None: no group)."""

    part: int
    next: int
    bytes: int
    floor: int | None

    def bytes_before(self, db: sqlite3.Connection, position: int) -> int:
        """The running total of bytes at a position."""
        if position >= self.next:
            return self.bytes
        row = db.execute(_BEFORE, log.span(self.part, position)).fetchone()
        return self.bytes if row is None else int(row[0])


def extents(db: sqlite3.Connection, topic: int) -> list[Extent]:
    return [Extent(*row) for row in db.execute(_FLOORS, (topic,)).fetchall()]


def finished_bytes(db: sqlite3.Connection, topic: int) -> int:
    """The bytes, ever appended, that no group needs any more. Without a group: those that are stored no more."""
    return sum(extent.bytes_before(db, extent.floor or 0) for extent in extents(db, topic))


def aside_bytes(db: sqlite3.Connection, topic: int) -> int:
    """What waits or is held out of the flow, in all groups; triggers keep count of it."""
    (size,) = db.execute("SELECT aside FROM onward_topic WHERE id = ?", (topic,)).fetchone()
    return int(size)


class Backlog:
    """Holds the limit. What is finished only grows, so a remembered figure errs on the side of asking again."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._finished: dict[int, int] = {}

    def is_over(self, db: sqlite3.Connection, topic: Topic, appended: int) -> bool:
        """Would the topic be over the limit with this many bytes ever appended?"""
        appended += aside_bytes(db, topic.id)
        if topic.id in self._finished and appended - self._finished[topic.id] <= self._max_bytes:
            return False
        self._finished[topic.id] = finished_bytes(db, topic.id)
        return appended - self._finished[topic.id] > self._max_bytes

    def forget(self) -> None:
        """A new group may need again what was finished."""
        self._finished.clear()

    def complaint(self, db: sqlite3.Connection, topic: Topic) -> str:
        """Why an event is refused: which group is behind, and what to do about it."""
        over = (
            f"topic {topic.name}: its unfinished events, including those set aside for a retry, would exceed "
            f"max_backlog_bytes={self._max_bytes:,}; "
        )
        behind = slowest(db, topic.id)
        if behind is None:
            return f"{over}no group reads it, so all of its events are kept; start its consumers, or raise the limit"
        return (
            f"{over}group {behind.group} is {behind.bytes:,} bytes behind; start, repair or speed up its consumers, "
            f"drop it with `{drop_command(db, behind.group, topic.name)}`, or raise the limit"
        )


def drop_command(db: sqlite3.Connection, group: str, topic: str) -> str:
    """The command that drops a group, to be pasted in any folder."""
    path = next(file for _, name, file in db.execute("PRAGMA database_list") if name == "main")
    return f"onward groups drop {group} --topic {topic} --url sqlite:///{quote(path)}"


class SlowestGroup(NamedTuple):
    bytes: int
    group: str


def slowest(db: sqlite3.Connection, topic: int) -> SlowestGroup | None:
    """The group with the most unfinished bytes in the log."""
    sizes: dict[str, int] = {}
    for group, watermark, part, end, size in db.execute(_BY_GROUP, (topic,)).fetchall():
        extent = Extent(part, end, size, None)
        sizes[group] = sizes.get(group, 0) + size - extent.bytes_before(db, watermark)
    return max((SlowestGroup(size, group) for group, size in sizes.items()), default=None)
