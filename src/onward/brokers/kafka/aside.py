"""Implements the aside of the broker contract with the tables of a group's aside log."""

import asyncio
from collections.abc import Sequence
from uuid import uuid4

import msgspec

from onward.brokers.base import AsideRecord, Count, Filter, Page, State
from onward.brokers.core.aside_pages import AsideScan, by_partition, count, divided, loadable
from onward.brokers.core.asides import RecordPlace, fitting
from onward.brokers.core.folded_aside import MOVE, AsideRow, LogEntry, MoveRequest
from onward.brokers.kafka.aside_log import AsideLog
from onward.brokers.kafka.topics import KafkaTopics
from onward.errors import BrokerError
from onward.event import Partition


class KafkaAside:
    def __init__(self, aside: AsideLog, topics: KafkaTopics) -> None:
        self._log = aside
        self._topics = topics

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        while True:
            rows = await asyncio.to_thread(self._rows, partition, after, limit, dead)
            page = fitting(rows, limit, max_bytes)
            records = await asyncio.to_thread(self._log.records, partition, page)
            if records or not page:
                return records
            after = page[-1].position  # all of these were removed meanwhile; there may be more records after them

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        least = None if after is None else RecordPlace.parse(after)
        return await asyncio.to_thread(self._scan, where, least, limit)

    async def count(self, where: Filter) -> Count:
        return await asyncio.to_thread(self._count, where)

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        return await asyncio.to_thread(self._request, MoveRequest(list(ids), expect, to, due))

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        return await asyncio.to_thread(self._request, MoveRequest(list(ids), expect, None, None))

    def _rows(self, partition: Partition, after: int | None, limit: int, dead: bool) -> list[AsideRow]:
        topic = self._topics.described(partition.topic)
        with self._log.reading([partition]) as tables:
            return loadable(tables[partition], topic.log_id if topic else None, after, limit, dead=dead)

    def _scan(self, where: Filter, after: RecordPlace | None, limit: int) -> Page:
        with self._log.reading(list(self._partitions(where.topic))) as tables:
            scan = AsideScan(tables, where, after, limit)
        while placed := scan.step():
            for partition, rows in by_partition(placed):
                scan.take(partition, self._log.records(partition, rows))
        return scan.page()

    def _count(self, where: Filter) -> Count:
        with self._log.reading(list(self._partitions(where.topic))) as tables:
            return count(tables.values(), where)

    def _partitions(self, topic: str | None) -> dict[Partition, str]:
        """The partitions that have an aside, with the ids of their logs."""
        partitions: dict[Partition, str] = {}
        for name in self._log.topics():
            described = self._topics.described(name) if topic in (None, name) else None
            if described is not None:
                partitions |= {Partition(name, index): described.log_id for index in range(described.partitions)}
        return partitions

    def _request(self, request: MoveRequest) -> int:
        logs = self._partitions(None)
        with self._log.reading(list(logs)) as tables:
            asked = divided(tables, logs, request)
        keys = {partition: f"{MOVE}{uuid4().hex}" for partition in asked}
        for partition, each in asked.items():
            entry = LogEntry(keys[partition], msgspec.msgpack.encode(each))
            (answer,) = self._log.write(partition.topic, [(partition.index, entry)])
            if isinstance(answer, str):
                raise BrokerError(f"Kafka: the request to move records of {partition} was not stored: {answer}")
        with self._log.reading(list(asked)) as tables:
            return sum(tables[partition].outcomes.get(keys[partition], 0) for partition in asked)
