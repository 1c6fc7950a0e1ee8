"""The aside: waiting, held and dead records, in a table of the same file."""

import functools
import itertools
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from onward.brokers.base import AsideRecord, Count, Filter, Page, State
from onward.brokers.core.asides import mentions
from onward.brokers.sqlite.group_version import bump
from onward.brokers.sqlite.reader import StoreReader
from onward.brokers.sqlite.transaction import Transaction
from onward.brokers.sqlite.writer import Writer
from onward.errors import BrokerError
from onward.event import Partition

log = logging.getLogger("onward")

_SCAN_ROWS = 500  # rows per query of a scan; its filter may match only a few of them
_decode = msgspec.msgpack.Decoder(AsideRecord).decode

_INSERT = """
INSERT INTO onward_aside (id, grp, part, position, state, due, key, error, last, data)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE
SET state = excluded.state, due = excluded.due, error = excluded.error, last = excluded.last, data = excluded.data
"""
_LOAD = """
SELECT id, state, due, data FROM onward_aside
WHERE grp = ? AND part = ? AND position > ? AND (state != 'dead' OR ?) ORDER BY position, id
"""
_FIND = """
SELECT t.name, p.idx FROM onward_aside a JOIN onward_partition p ON p.id = a.part JOIN onward_topic t ON t.id = p.topic
WHERE a.id = ? AND a.grp = ?
"""
_PART = "SELECT p.id FROM onward_topic t JOIN onward_partition p ON p.topic = t.id WHERE t.name = ? AND p.idx = ?"
_OWNED = "SELECT owner IS NOT NULL FROM onward_group WHERE part = ? AND grp = ?"
_NOTICE = "INSERT INTO onward_moved (grp, part, id, state, due) VALUES (?, ?, ?, ?, ?)"


class SqliteAside:
    def __init__(self, group: str, writer: Writer, reader: StoreReader) -> None:
        self._group = group
        self._writer = writer
        self._reader = reader

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        return await self._reader.run(lambda db: _load(db, self._group, partition, after, (limit, max_bytes, dead)))

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        return await self._reader.run(lambda db: _scan(db, self._group, where, after, limit))

    async def count(self, where: Filter) -> Count:
        return await self._reader.run(lambda db: _count(db, self._group, where))

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        return await self._writer.call(lambda tx: _move(tx, self._group, ids, expect, (to, due)))

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        return await self._writer.call(lambda tx: _move(tx, self._group, ids, expect, None))


def store(db: sqlite3.Connection, records: Sequence[AsideRecord], part: int) -> None:
    """Write records of the partition with the id `part`. A record with the same id is replaced."""
    db.executemany(_INSERT, [_row(record.whole(), part) for record in records])


def find(db: sqlite3.Connection, group: str, ids: Sequence[str]) -> list[tuple[str, Partition]]:
    """Those of the ids that are records of the group, with their partitions."""
    found = []
    for name in ids:
        row = db.execute(_FIND, (name, group)).fetchone()
        if row is not None:
            found.append((name, Partition(*row)))
    return found


def delete(db: sqlite3.Connection, name: str) -> None:
    db.execute("DELETE FROM onward_aside WHERE id = ?", (name,))


def _row(record: AsideRecord, part: int) -> tuple[Any, ...]:
    failure = record.failure
    return (
        record.id,
        record.group,
        part,
        record.position,
        record.state.value,
        record.due,
        record.event.key,
        failure.error if failure else None,
        failure.last if failure else None,
        msgspec.msgpack.encode(record),
    )


def _record(name: str, state: str, due: float | None, data: bytes) -> AsideRecord | None:
    """The decoded record. None if it is damaged: one damaged record must not stop the others."""
    try:
        return msgspec.structs.replace(_decode(data), state=State(state), due=due)
    except (msgspec.MsgspecError, ValueError) as error:
        _complain(name, str(error))
        return None


@functools.lru_cache(maxsize=1_000)
def _complain(name: str, why: str) -> None:
    """Log a damaged record. The cache limits this to once per record, because records are read again and again."""
    log.warning(
        "record %s is damaged and was skipped (%s); restore it from a backup, or remove it: "
        "DELETE FROM onward_aside WHERE id = '%s'",
        *(name, why, name.replace("'", "''")),
    )


def _load(
    db: sqlite3.Connection, group: str, partition: Partition, after: int | None, limits: tuple[int, int, bool]
) -> list[AsideRecord]:
    limit, max_bytes, dead = limits
    row = db.execute(_PART, partition).fetchone()
    records: list[AsideRecord] = []
    if row is None:
        return records
    for name, state, due, data in db.execute(_LOAD, (group, row[0], -1 if after is None else after, dead)):
        max_bytes -= len(data)
        if len(records) == limit or (records and max_bytes < 0):
            break
        if (record := _record(name, state, due, data)) is not None:
            records.append(record)
    return records


def _scan(db: sqlite3.Connection, group: str, where: Filter, after: str | None, limit: int) -> Page:
    """Pages are sorted by partition, position and id of a record, which never change."""
    found = list(itertools.islice(_matching(db, group, where, after), limit + 1))
    records = [record for _, record in found[:limit]]
    return Page(records, found[limit - 1][0] if len(found) > limit else None)


def _count(db: sqlite3.Connection, group: str, where: Filter) -> Count:
    """Count by columns only. SQLite does not read the pages of `data`, because it is the last column."""
    assert where.text is None, "count cannot search for a text: that would need the data of the records"
    condition, values = _condition(where)
    query = f"SELECT COUNT(*), MIN(last) FROM onward_aside WHERE grp = ?{condition}"
    return Count(*db.execute(query, (group, *values)).fetchone())


def _matching(
    db: sqlite3.Connection, group: str, where: Filter, after: str | None
) -> Iterator[tuple[str, AsideRecord]]:
    place = _place(after)
    condition, values = _condition(where)
    while True:
        rows = db.execute(
            "SELECT part, position, id, state, due, data FROM onward_aside "
            f"WHERE grp = ? AND (part, position, id) > (?, ?, ?){condition} "
            f"ORDER BY part, position, id LIMIT {_SCAN_ROWS}",
            (group, *place, *values),
        ).fetchall()
        for part, position, name, state, due, data in rows:
            place = (part, position, name)
            record = _record(name, state, due, data)
            if record is not None and (where.text is None or mentions(record, where.text)):
                yield f"{part}:{position}:{name}", record
        if len(rows) < _SCAN_ROWS:
            return


def _place(after: str | None) -> tuple[int, int, str]:
    if after is None:
        return (-1, -1, "")
    try:
        part, position, name = after.split(":", 2)
        return int(part), int(position), name
    except ValueError as error:
        raise BrokerError(f"the cursor {after!r} is not from this aside; start without a cursor") from error


def _condition(where: Filter) -> tuple[str, list[Any]]:
    states = sorted(state.value for state in where.states)
    parts: list[tuple[str, list[Any]]] = [(f"state IN ({', '.join('?' * len(states))})", list(states))]
    if where.topic is not None:
        topic = "SELECT p.id FROM onward_topic t JOIN onward_partition p ON p.topic = t.id WHERE t.name = ?"
        parts.append((f"part IN ({topic})", [where.topic]))
    for column, value in (("key = ?", where.key), ("error = ?", where.error)):
        if value is not None:
            parts.append((column, [value]))
    for column, bound in (("last >= ?", where.since), ("last < ?", where.until)):
        if bound is not None:
            parts.append((column, [bound]))
    return "".join(f" AND {text}" for text, _ in parts), [value for _, values in parts for value in values]


def _move(tx: Transaction, group: str, ids: Sequence[str], expect: State, to: tuple[State, float | None] | None) -> int:
    """Move those records that are still in the state `expect`, or remove them if `to` is None. The owner gets Moved in
    its next turn."""
    moved = 0
    for name in dict.fromkeys(ids):
        row = tx.db.execute(
            "SELECT part, state, due, data FROM onward_aside WHERE id = ? AND grp = ? AND state = ?",
            (name, group, expect.value),
        ).fetchone()
        if row is None or not _change(tx.db, name, row[1:], to):
            continue
        moved += 1
        if tx.db.execute(_OWNED, (row[0], group)).fetchone() == (1,):
            state, due = (None, None) if to is None else (to[0].value, to[1])
            tx.db.execute(_NOTICE, (group, row[0], name, state, due))
    if moved:
        bump(tx, group)
    return moved


def _change(
    db: sqlite3.Connection, name: str, stored: tuple[str, float | None, bytes], to: tuple[State, float | None] | None
) -> bool:
    """Move or remove a record. False if it is damaged and so stays as it is."""
    if to is None:
        delete(db, name)
        return True
    record = _record(name, *stored)
    if record is None:
        return False
    data = msgspec.msgpack.encode(record.moved(*to))
    db.execute("UPDATE onward_aside SET state = ?, due = ?, data = ? WHERE id = ?", (to[0].value, to[1], data, name))
    return True
