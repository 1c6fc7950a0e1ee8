"""The aside as the contract has it, over the tables of a group's letters."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from uuid import uuid4

import msgspec

from onward.brokers.base import AsideRecord, Count, Filter, Page, State
from onward.brokers.kafka.letters import Letters
from onward.brokers.kafka.table import MOVE, Entry, Request, Row, Table, log_of
from onward.brokers.kafka.topics import Catalogue
from onward.errors import BrokerError
from onward.event import Partition

_STEP = 500  # rows whose bodies are read together when a text is looked for in them
_PAGE_BYTES = 16 << 20  # a page of a scan ends there, whatever its limit

Place = tuple[str, int, int, str]
Placed = tuple[Partition, Row]


class KafkaAside:
    def __init__(self, letters: Letters, catalogue: Catalogue) -> None:
        self._letters = letters
        self._catalogue = catalogue

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        states = frozenset(State) if dead else frozenset(State) - {State.DEAD}
        while True:
            rows = await asyncio.to_thread(self._rows, partition, after, states, limit)
            page = _fitting(rows, limit, max_bytes)
            records = await asyncio.to_thread(self._letters.records, partition, page)
            if records or not page:
                return records
            after = page[-1].position  # these are gone meanwhile, which does not make it the last page

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        """Pages follow the place of a record (topic, partition, position), which never changes."""
        least = None if after is None else _parsed(after)
        return await asyncio.to_thread(self._scan, where, least, limit)

    async def count(self, where: Filter) -> Count:
        return await asyncio.to_thread(self._count, where)

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        return await asyncio.to_thread(self._request, Request(list(ids), expect, to, due))

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        return await asyncio.to_thread(self._request, Request(list(ids), expect, None, None))

    def _rows(self, partition: Partition, after: int | None, states: frozenset[State], limit: int) -> list[Row]:
        topic = self._catalogue.described(partition.topic)
        log_id = topic.log_id if topic else None  # positions of a former log mean other events
        with self._letters.reading([partition]) as tables:
            rows = tables[partition].above(-1 if after is None else after)
            mine = (row for row in rows if row.state in states and log_of(row.id) == log_id)
            return list(itertools.islice(mine, limit))

    def _scan(self, where: Filter, least: Place | None, limit: int) -> Page:
        with self._letters.reading(list(self._partitions(where.topic))) as tables:
            rows = (each for each in _behind(tables, least) if _fits(each[1], where))
            # A text may stand in the bodies alone: nobody knows how many rows make a page of it.
            rest = list(rows if where.text is not None else itertools.islice(rows, limit + 1))
        found: list[tuple[Place, AsideRecord]] = []
        size, last = 0, least
        while rest and len(found) < limit and size < _PAGE_BYTES // 2:
            step = _fitting([row for _, row in rest], max(limit + 1, _STEP), _PAGE_BYTES // 2)
            placed, rest = rest[: len(step)], rest[len(step) :]
            last = _place(*placed[-1])
            matching = [each for each in self._records(placed) if where.text is None or _mentions(each[1], where.text)]
            size += sum(record.event.size for _, record in matching)
            found += matching
        if len(found) > limit:
            last = found[limit - 1][0]
        more = last is not None and (bool(rest) or len(found) > limit)
        return Page([record for _, record in found[:limit]], _written(last) if last and more else None)

    def _count(self, where: Filter) -> Count:
        assert where.text is None, "a text is found in records, not in their rows"
        with self._letters.reading(list(self._partitions(where.topic))) as tables:
            rows = [row for table in tables.values() for row in table.rows.values() if _fits(row, where)]
        failed = [row.failed_at for row in rows if row.failed_at is not None]
        return Count(len(rows), min(failed, default=None))

    def _records(self, placed: Iterable[Placed]) -> Iterator[tuple[Place, AsideRecord]]:
        for partition, rows in itertools.groupby(placed, lambda each: each[0]):
            for record in self._letters.records(partition, [row for _, row in rows]):
                yield (partition.topic, partition.index, record.position, record.id), record

    def _partitions(self, topic: str | None) -> dict[Partition, str]:
        """With the ids of their logs."""
        partitions: dict[Partition, str] = {}
        for name in self._letters.topics():
            described = self._catalogue.described(name) if topic in (None, name) else None
            if described is not None:
                partitions |= {Partition(name, index): described.log_id for index in range(described.partitions)}
        return partitions

    def _request(self, request: Request) -> int:
        """What is of a former log can be removed, and nothing else: its place in the partition is another event's."""
        asked: dict[Partition, Request] = {}
        logs = self._partitions(None)
        with self._letters.reading(list(logs)) as tables:
            for partition, table in tables.items():
                known = [name for name in request.ids if name in table.rows]
                if ids := [name for name in known if request.to is None or log_of(name) == logs[partition]]:
                    asked[partition] = msgspec.structs.replace(request, ids=ids)
        keys = {partition: f"{MOVE}{uuid4().hex}" for partition in asked}
        for partition, each in asked.items():
            entry = Entry(keys[partition], msgspec.msgpack.encode(each))
            (answer,) = self._letters.write(partition.topic, [(partition.index, entry)])
            if isinstance(answer, str):
                raise BrokerError(f"Kafka: the request to move records of {partition} was not stored: {answer}")
        with self._letters.reading(list(asked)) as tables:
            return sum(tables[partition].outcomes.get(keys[partition], 0) for partition in asked)


def _fitting(rows: Sequence[Row], limit: int, max_bytes: int) -> list[Row]:
    """The first of them, but always one."""
    sizes = itertools.accumulate(row.size for row in rows[:limit])
    return [row for at, (row, size) in enumerate(zip(rows[:limit], sizes, strict=True)) if not at or size <= max_bytes]


def _behind(tables: Mapping[Partition, Table], least: Place | None) -> Iterator[Placed]:
    """Every row behind a place, by place."""
    for partition in sorted(tables):
        if least is None or partition > least[:2]:
            yield from ((partition, row) for row in tables[partition].above(-1))
        elif partition == least[:2]:
            rows = tables[partition].above(least[2] - 1)
            yield from ((partition, row) for row in rows if (row.position, row.id) > least[2:])


def _place(partition: Partition, row: Row) -> Place:
    return partition.topic, partition.index, row.position, row.id


def _written(place: Place) -> str:
    return f"{place[0]}:{place[1]}:{place[2]}:{place[3]}"


def _parsed(after: str) -> Place:
    try:
        topic, index, position, name = after.split(":", 3)
        return topic, int(index), int(position), name
    except ValueError:
        raise BrokerError(f"{after!r} is no cursor of this store; begin without one") from None


def _fits(row: Row, where: Filter) -> bool:
    last = row.failed_at
    return (
        row.state in where.states
        and where.key in (None, row.key)
        and where.error in (None, row.error or "")
        and (where.since is None or (last is not None and last >= where.since))
        and (where.until is None or (last is not None and last < where.until))
    )


def _mentions(record: AsideRecord, text: str) -> bool:
    if record.failure is not None and text in record.failure.message:
        return True
    return text.encode() in (record.event.value or b"")
