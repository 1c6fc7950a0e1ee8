"""Pages, counts and requests over the tables of a group's aside. Pure.

A table has rows without bodies, see folded_aside. How the bodies are read differs from broker to broker, so a scan asks
for them step by step.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from onward.brokers.base import AsideRecord, Count, Filter, Page, State, record_log
from onward.brokers.core.asides import RecordPlace, fitting, matches, mentions, oldest
from onward.brokers.core.folded_aside import AsideRow, AsideTable, MoveRequest
from onward.event import Partition

_STEP = 500  # how many bodies are read at once to search a text in them
_PAGE_BYTES = 16 << 20  # a page of a scan ends there, whatever its limit

PlacedRow = tuple[Partition, AsideRow]
Tables = Mapping[Partition, AsideTable]


class AsideScan:
    """One page of a scan, in the order of the records' places (topic, partition, position), which never change.

    Until `step` returns nothing, read the records of its rows and pass those that still exist to `take`."""

    def __init__(self, tables: Tables, where: Filter, after: RecordPlace | None, limit: int) -> None:
        rows = (each for each in _behind(tables, after) if matches(each[1], where))
        # A text is searched in the bodies, so any number of rows may be needed to fill a page.
        self._rest = list(rows if where.text is not None else itertools.islice(rows, limit + 1))
        self._text = where.text
        self._limit = limit
        self._found: list[tuple[RecordPlace, AsideRecord]] = []
        self._size = 0
        self._last = after

    def step(self) -> list[PlacedRow]:
        """The rows whose records are needed next. Empty: the page is complete."""
        if len(self._found) >= self._limit or self._size >= _PAGE_BYTES // 2:
            return []
        step = fitting([row for _, row in self._rest], max(self._limit + 1, _STEP), _PAGE_BYTES // 2)
        placed, self._rest = self._rest[: len(step)], self._rest[len(step) :]
        if placed:
            partition, row = placed[-1]
            self._last = RecordPlace(partition.topic, partition.index, row.position, row.id)
        return placed

    def take(self, partition: Partition, records: Iterable[AsideRecord]) -> None:
        """Add records of the last step, in the order of their rows."""
        for record in records:
            if self._text is None or mentions(record, self._text):
                place = RecordPlace(partition.topic, partition.index, record.position, record.id)
                self._found.append((place, record))
                self._size += record.event.size

    def page(self) -> Page:
        last = self._last
        if len(self._found) > self._limit:
            last = self._found[self._limit - 1][0]
        more = last is not None and (bool(self._rest) or len(self._found) > self._limit)
        return Page([record for _, record in self._found[: self._limit]], last.cursor() if last and more else None)


def by_partition(placed: Iterable[PlacedRow]) -> Iterator[tuple[Partition, list[AsideRow]]]:
    """Rows that stand together because they are of one partition."""
    for partition, rows in itertools.groupby(placed, lambda each: each[0]):
        yield partition, [row for _, row in rows]


def count(tables: Collection[AsideTable], where: Filter) -> Count:
    assert where.text is None, "a text can be searched in records only, not in rows"
    rows = [row for table in tables for row in table.rows.values() if matches(row, where)]
    return Count(len(rows), oldest(rows))


def loadable(table: AsideTable, log_id: str | None, after: int | None, limit: int, *, dead: bool) -> list[AsideRow]:
    """The first rows that an owner of this log loads. Positions of a former log belong to other events."""
    states = frozenset(State) if dead else frozenset(State) - {State.DEAD}
    rows = table.above(-1 if after is None else after)
    return list(itertools.islice((row for row in rows if row.state in states and record_log(row.id) == log_id), limit))


def divided(tables: Tables, logs: Mapping[Partition, str | None], request: MoveRequest) -> dict[Partition, MoveRequest]:
    """The request for each partition that has some of the records. `logs`: the id of each partition's current log; None
    if records of every log may be moved.

    A record of a former log can be removed but not moved: its position belongs to another event."""
    asked: dict[Partition, MoveRequest] = {}
    for partition, table in tables.items():
        known = [name for name in request.ids if name in table.rows]
        if ids := [name for name in known if _may_move(name, logs[partition], request)]:
            asked[partition] = msgspec.structs.replace(request, ids=ids)
    return asked


def _may_move(name: str, log_id: str | None, request: MoveRequest) -> bool:
    return request.to is None or log_id is None or record_log(name) == log_id


def _behind(tables: Tables, least: RecordPlace | None) -> Iterator[PlacedRow]:
    """Every row after a place, in the order of places."""
    for partition in sorted(tables):
        if least is None or partition > least[:2]:
            yield from ((partition, row) for row in tables[partition].above(-1))
        elif partition == least[:2]:
            rows = tables[partition].above(least.position - 1)
            yield from ((partition, row) for row in rows if (row.position, row.id) > least[2:])
