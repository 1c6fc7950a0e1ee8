"""The backlog of a topic: the bytes that some group has not finished. It is a difference of running totals, plus the
waiting and held records in the aside."""

from typing import NamedTuple
from urllib.parse import quote

from onward.brokers.sqlite import log
from onward.brokers.sqlite.database import Database
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
    """A partition: its next position, the bytes ever appended, and the lowest watermark of all groups (None: no group
    reads it)."""

    part: int
    next: int
    bytes: int
    floor: int | None

    def bytes_before(self, db: Database, position: int) -> int:
        """The running total of bytes at a position."""
        if position >= self.next:
            return self.bytes
        row = db.execute(_BEFORE, log.span(self.part, position)).fetchone()
        return self.bytes if row is None else int(row[0])


def extents(db: Database, topic: int) -> list[Extent]:
    return [Extent(*row) for row in db.execute(_FLOORS, (topic,)).fetchall()]


def finished_bytes(db: Database, topic: int) -> int:
    """How many of the bytes ever appended no group needs any more. Without a group: the bytes that were removed."""
    return sum(extent.bytes_before(db, extent.floor or 0) for extent in extents(db, topic))


def aside_bytes(db: Database, topic: int) -> int:
    """The bytes of waiting and held records in all groups. Triggers in the schema count them."""
    (size,) = db.execute("SELECT aside FROM onward_topic WHERE id = ?", (topic,)).fetchone()
    return int(size)


class Backlog:
    """Checks `max_backlog_bytes`. The finished bytes only grow, so a remembered number is never too high: it can only
    cause one more query."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._finished: dict[int, int] = {}

    def is_over(self, db: Database, topic: Topic, appended: int) -> bool:
        """Whether the topic would be over the limit if `appended` were the bytes ever appended to it."""
        appended += aside_bytes(db, topic.id)
        if appended - self._finished.get(topic.id, 0) <= self._max_bytes:
            return False
        finished = self._finished[topic.id] = finished_bytes(db, topic.id)
        return appended - finished > self._max_bytes

    def forget(self) -> None:
        """Read the finished bytes again next time: a new group may need events that were finished before."""
        self._finished.clear()

    def complaint(self, db: Database, topic: Topic) -> str:
        """Why an event is refused: which group is behind, and what the operator can do."""
        over = (
            f"topic {topic.name}: its unfinished events, including those set aside for a retry, would exceed "
            f"max_backlog_bytes={self._max_bytes:,}; "
        )
        behind = slowest(db, topic.id)
        if behind is None:
            return f"{over}no group reads it, so no event is removed; start its consumers, or raise the limit"
        return (
            f"{over}group {behind.group} is {behind.bytes:,} bytes behind; start, repair or speed up its consumers, "
            f"drop it with `{drop_command(db, behind.group, topic.name)}`, or raise the limit"
        )


def drop_command(db: Database, group: str, topic: str) -> str:
    """The command that drops a group. It works in any folder."""
    path = next(file for _, name, file in db.execute("PRAGMA database_list") if name == "main")
    return f"onward groups drop {group} --topic {topic} --url sqlite:///{quote(path)}"


class SlowestGroup(NamedTuple):
    bytes: int
    group: str


def slowest(db: Database, topic: int) -> SlowestGroup | None:
    """The group with the most unfinished bytes in the log."""
    sizes: dict[str, int] = {}
    for group, watermark, part, end, size in db.execute(_BY_GROUP, (topic,)).fetchall():
        extent = Extent(part, end, size, None)
        sizes[group] = sizes.get(group, 0) + size - extent.bytes_before(db, watermark)
    return max((SlowestGroup(size, group) for group, size in sizes.items()), default=None)
