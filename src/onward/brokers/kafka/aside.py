"""The aside as the contract has it, over the tables of a group's letters."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from uuid import uuid4

import msgspec

from onward.brokers.base import AsideRecord, Filter, Page, State
from onward.brokers.kafka.letters import Letters
from onward.brokers.kafka.table import MOVE, Entry, Request, Table
from onward.brokers.kafka.topics import Catalogue
from onward.errors import BrokerError
from onward.event import Partition


class KafkaAside:
    def __init__(self, letters: Letters, catalogue: Catalogue) -> None:
        self._letters = letters
        self._catalogue = catalogue

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        tables = await asyncio.to_thread(self._letters.tables, [partition])
        found: list[AsideRecord] = []
        for record in tables[partition].above(-1 if after is None else after):
            if record.state is State.DEAD and not dead:
                continue
            max_bytes -= record.event.size
            if len(found) == limit or (found and max_bytes < 0):
                break
            found.append(record)
        return found

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        """Pages follow the place of a record (topic, partition, position), which never changes."""
        least = None if after is None else _parsed(after)
        tables = await asyncio.to_thread(self._all, where.topic)
        placed = sorted((_place(partition, each), each) for partition, each in _records(tables) if _fits(each, where))
        rest = [(place, each) for place, each in placed if least is None or place > least]
        found = list(itertools.islice(rest, limit + 1))
        more = _written(found[limit - 1][0]) if len(found) > limit else None
        return Page([each for _, each in found[:limit]], more)

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        return await asyncio.to_thread(self._request, Request(list(ids), expect, to, due))

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        return await asyncio.to_thread(self._request, Request(list(ids), expect, None, None))

    def _all(self, topic: str | None) -> dict[Partition, Table]:
        partitions = []
        for name in self._letters.topics():
            described = self._catalogue.described(name) if topic in (None, name) else None
            partitions += [Partition(name, index) for index in range(described.partitions if described else 0)]
        return self._letters.tables(partitions)

    def _request(self, request: Request) -> int:
        tables = self._all(None)
        asked: dict[Partition, Request] = {}
        for partition, table in tables.items():
            ids = [name for name in request.ids if name in table.records]
            if ids:
                asked[partition] = msgspec.structs.replace(request, ids=ids)
        keys = {partition: f"{MOVE}{uuid4().hex}" for partition in asked}
        for partition, each in asked.items():
            entry = Entry(keys[partition], msgspec.msgpack.encode(each))
            (answer,) = self._letters.write(partition.topic, [(partition.index, entry)])
            if isinstance(answer, str):
                raise BrokerError(f"Kafka: the request to move records of {partition} was not stored: {answer}")
        outcomes = self._letters.tables(list(asked))
        return sum(outcomes[partition].outcomes.get(keys[partition], 0) for partition in asked)


Place = tuple[str, int, int, str]


def _records(tables: dict[Partition, Table]) -> Iterator[tuple[Partition, AsideRecord]]:
    for partition, table in tables.items():
        for record in table.records.values():
            yield partition, record


def _place(partition: Partition, record: AsideRecord) -> Place:
    return partition.topic, partition.index, record.position, record.id


def _written(place: Place) -> str:
    return f"{place[0]}:{place[1]}:{place[2]}:{place[3]}"


def _parsed(after: str) -> Place:
    try:
        topic, index, position, name = after.split(":", 3)
        return topic, int(index), int(position), name
    except ValueError:
        raise BrokerError(f"{after!r} is no cursor of this store; begin without one") from None


def _fits(record: AsideRecord, where: Filter) -> bool:
    failure = record.failure
    last = failure.last if failure else None
    return (
        record.state in where.states
        and where.key in (None, record.event.key)
        and where.error in (None, failure.error if failure else "")
        and (where.since is None or (last is not None and last >= where.since))
        and (where.until is None or (last is not None and last < where.until))
        and (where.text is None or _mentions(record, where.text))
    )


def _mentions(record: AsideRecord, text: str) -> bool:
    if record.failure is not None and text in record.failure.message:
        return True
    return text.encode() in (record.event.value or b"")
