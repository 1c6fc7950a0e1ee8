"""The log: record batches of events. Each batch is one row, addressed by its partition and first position."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from onward.brokers.sqlite.database import Database
from onward.errors import BadStore
from onward.event import Event

ROW_EVENTS = 1_000
ROW_BYTES = 1 << 20  # unless one event is larger
_SHIFT = 40

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Event]).decode

_ADVANCE = "UPDATE onward_partition SET next = ?, bytes = ? WHERE id = ?"
_INSERT = "INSERT INTO onward_log (at, count, time, before, data) VALUES (?, ?, ?, ?, ?)"
# From the row that contains the position, or else the first row after it.
_ROWS = """
SELECT at, count, data FROM onward_log
WHERE at >= coalesce((SELECT max(at) FROM onward_log WHERE at BETWEEN ? AND ?), ?) AND at < ? ORDER BY at
"""


class Pack(msgspec.Struct, frozen=True):
    """Events of one partition, encoded as one msgpack array."""

    count: int
    data: bytes


class Rows(NamedTuple):
    """Consecutive events as they were read, with the first position and the size in bytes."""

    start: int
    events: list[Event]
    size: int


def address(part: int, position: int = 0) -> int:
    return part << _SHIFT | position


def span(part: int, position: int) -> tuple[int, int, int, int]:
    """The parameters of a query that starts at the row with this position and ends at the partition's end."""
    at = address(part, position)
    return address(part), at, at, address(part + 1)


def position_of(at: int) -> int:
    return at & (1 << _SHIFT) - 1


def merged(packs: Sequence[Pack]) -> Iterator[Pack]:
    """The same events in as few record batches as the limits of a batch allow."""
    taken: list[Pack] = []
    count = size = 0
    for pack in packs:
        if taken and (count + pack.count > ROW_EVENTS or size + len(pack.data) > ROW_BYTES):
            yield _joined(taken, count)
            taken, count, size = [], 0, 0
        taken.append(pack)
        count += pack.count
        size += len(pack.data)
    yield _joined(taken, count)


class Tail(NamedTuple):
    """The end of a partition: its next position, and the bytes ever appended to it."""

    position: int
    size: int


def tails(db: Database, topic: int) -> dict[int, Tail]:
    """The ends of a topic's partitions, by their ids."""
    rows = db.execute("SELECT id, next, bytes FROM onward_partition WHERE topic = ?", (topic,))
    return {part: Tail(position, size) for part, position, size in rows}


def append(db: Database, packs: Mapping[int, Sequence[Pack]], tails: dict[int, Tail], wall: float) -> int:
    """Append to partitions of a topic, given by id, and advance their `tails`. Returns the number of bytes."""
    rows: list[tuple[int, int, float, int, bytes]] = []
    for part, added in packs.items():
        position, size = tails[part]
        for pack in added if len(added) == 1 else merged(added):
            rows.append((address(part, position), pack.count, wall, size, pack.data))
            position += pack.count
            size += len(pack.data)
        tails[part] = Tail(position, size)
    db.executemany(_INSERT, rows)
    db.executemany(_ADVANCE, [(*tails[part], part) for part in packs])
    return sum([len(row[4]) for row in rows])


def read(db: sqlite3.Connection, part: int, position: int) -> Iterator[Rows]:
    """The record batches from a position on, without the events below it. Raises BadStore if a batch is damaged."""
    for at, count, data in db.execute(_ROWS, span(part, position)):
        start = position_of(at)
        if start + count <= position:
            continue
        try:
            events = decode(data)
        except msgspec.MsgspecError as error:
            raise BadStore(_damaged(at, count, str(error))) from error
        if len(events) != count:
            raise BadStore(_damaged(at, count, f"it has {len(events)} events"))
        if start < position:
            events = events[position - start :]
            start = position
        yield Rows(start, events, len(data))


def _damaged(at: int, count: int, why: str) -> str:
    start = position_of(at)
    return (
        f"the record batch of positions {start} to {start + count - 1} is damaged ({why}); restore the file from a "
        f"backup, or give these events up: DELETE FROM onward_log WHERE at = {at}"
    )


def _joined(packs: Sequence[Pack], count: int) -> Pack:
    if len(packs) == 1:
        return packs[0]
    return Pack(count, _header(count) + b"".join([pack.data[len(_header(pack.count)) :] for pack in packs]))


def _header(count: int) -> bytes:
    """How a msgpack array of this length begins."""
    if count < 16:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2, "big")  # a record batch never has more than 65,535 events
