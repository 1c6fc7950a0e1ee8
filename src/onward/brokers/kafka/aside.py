"""Implements the aside of the broker contract with the tables of a group's aside log."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from uuid import uuid4

import msgspec

from onward.brokers.base import AsideRecord, Count, Filter, Page, State, record_log
from onward.brokers.core.asides import RecordPlace, fitting, matches, mentions, oldest
from onward.brokers.core.folded_aside import MOVE, AsideRow, AsideTable, LogEntry, MoveRequest
from onward.brokers.kafka.aside_log import AsideLog
from onward.brokers.kafka.topics import KafkaTopics
from onward.errors import BrokerError
from onward.event import Partition

_STEP = 500  # how many bodies are read at once to search a text in them
_PAGE_BYTES = 16 << 20  # a page of a scan ends there, whatever its limit

PlacedRow = tuple[Partition, AsideRow]


class KafkaAside:
    def __init__(self, aside: AsideLog, topics: KafkaTopics) -> None:
        self._log = aside
        self._topics = topics

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        states = frozenset(State) if dead else frozenset(State) - {State.DEAD}
        while True:
            rows = await asyncio.to_thread(self._rows, partition, after, states, limit)
            page = fitting(rows, limit, max_bytes)
            records = await asyncio.to_thread(self._log.records, partition, page)
            if records or not page:
                return records
            after = page[-1].position  # all of these were removed meanwhile; there may be more records after them

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        """Pages are in the order of the records' places (topic, partition, position), which never change."""
        least = None if after is None else RecordPlace.parse(after)
        return await asyncio.to_thread(self._scan, where, least, limit)

    async def count(self, where: Filter) -> Count:
        return await asyncio.to_thread(self._count, where)

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        return await asyncio.to_thread(self._request, MoveRequest(list(ids), expect, to, due))

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        return await asyncio.to_thread(self._request, MoveRequest(list(ids), expect, None, None))

    def _rows(self, partition: Partition, after: int | None, states: frozenset[State], limit: int) -> list[AsideRow]:
        topic = self._topics.described(partition.topic)
        log_id = topic.log_id if topic else None  # positions of a former log belong to other events
        with self._log.reading([partition]) as tables:
            rows = tables[partition].above(-1 if after is None else after)
            mine = (row for row in rows if row.state in states and record_log(row.id) == log_id)
            return list(itertools.islice(mine, limit))

    def _scan(self, where: Filter, least: RecordPlace | None, limit: int) -> Page:
        with self._log.reading(list(self._partitions(where.topic))) as tables:
            rows = (each for each in _behind(tables, least) if matches(each[1], where))
            # A text is searched in the bodies, so any number of rows may be needed to fill a page.
            rest = list(rows if where.text is not None else itertools.islice(rows, limit + 1))
        found: list[tuple[RecordPlace, AsideRecord]] = []
        size, last = 0, least
        while rest and len(found) < limit and size < _PAGE_BYTES // 2:
            step = fitting([row for _, row in rest], max(limit + 1, _STEP), _PAGE_BYTES // 2)
            placed, rest = rest[: len(step)], rest[len(step) :]
            last = _place(*placed[-1])
            matching = [each for each in self._records(placed) if where.text is None or mentions(each[1], where.text)]
            size += sum(record.event.size for _, record in matching)
            found += matching
        if len(found) > limit:
            last = found[limit - 1][0]
        more = last is not None and (bool(rest) or len(found) > limit)
        return Page([record for _, record in found[:limit]], last.cursor() if last and more else None)

    def _count(self, where: Filter) -> Count:
        assert where.text is None, "a text can be searched in records only, not in rows"
        with self._log.reading(list(self._partitions(where.topic))) as tables:
            rows = [row for table in tables.values() for row in table.rows.values() if matches(row, where)]
        return Count(len(rows), oldest(rows))

    def _records(self, placed: Iterable[PlacedRow]) -> Iterator[tuple[RecordPlace, AsideRecord]]:
        for partition, rows in itertools.groupby(placed, lambda each: each[0]):
            for record in self._log.records(partition, [row for _, row in rows]):
                yield RecordPlace(partition.topic, partition.index, record.position, record.id), record

    def _partitions(self, topic: str | None) -> dict[Partition, str]:
        """The partitions that have an aside, with the ids of their logs."""
        partitions: dict[Partition, str] = {}
        for name in self._log.topics():
            described = self._topics.described(name) if topic in (None, name) else None
            if described is not None:
                partitions |= {Partition(name, index): described.log_id for index in range(described.partitions)}
        return partitions

    def _request(self, request: MoveRequest) -> int:
        """A record of a former log can be removed but not moved: its position belongs to another event."""
        asked: dict[Partition, MoveRequest] = {}
        logs = self._partitions(None)
        with self._log.reading(list(logs)) as tables:
            for partition, table in tables.items():
                known = [name for name in request.ids if name in table.rows]
                if ids := [name for name in known if request.to is None or record_log(name) == logs[partition]]:
                    asked[partition] = msgspec.structs.replace(request, ids=ids)
        keys = {partition: f"{MOVE}{uuid4().hex}" for partition in asked}
        for partition, each in asked.items():
            entry = LogEntry(keys[partition], msgspec.msgpack.encode(each))
            (answer,) = self._log.write(partition.topic, [(partition.index, entry)])
            if isinstance(answer, str):
                raise BrokerError(f"Kafka: the request to move records of {partition} was not stored: {answer}")
        with self._log.reading(list(asked)) as tables:
            return sum(tables[partition].outcomes.get(keys[partition], 0) for partition in asked)


def _behind(tables: Mapping[Partition, AsideTable], least: RecordPlace | None) -> Iterator[PlacedRow]:
    """Every row after a place, in the order of places."""
    for partition in sorted(tables):
        if least is None or partition > least[:2]:
            yield from ((partition, row) for row in tables[partition].above(-1))
        elif partition == least[:2]:
            rows = tables[partition].above(least.position - 1)
            yield from ((partition, row) for row in rows if (row.position, row.id) > least[2:])


def _place(partition: Partition, row: AsideRow) -> RecordPlace:
    return RecordPlace(partition.topic, partition.index, row.position, row.id)
