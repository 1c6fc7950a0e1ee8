"""Shared by the tests of the Kafka broker: a topic of one partition on a real broker, and its group's commits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaException, TopicPartition

from onward import Onward, settings
from onward.brokers import open_broker
from onward.brokers.base import AsideRecord, Broker, Filter
from onward.testing.scenario import LEASE_S, Member, event
from tests.brokers.kafka import KafkaHarness


class Stage:
    """One topic on the real broker, of one partition by default."""

    def __init__(self, harness: KafkaHarness, **options: Any) -> None:
        self.harness = harness
        self.options = {"lease_s": LEASE_S, "takeover_grace_s": 0.1, "partitions": 1, **options}
        self.topic = f"trap-{uuid4().hex[:8]}"
        self.group = f"group-{uuid4().hex[:8]}"
        self._brokers: list[Broker] = []
        self._watcher = Consumer(
            {"bootstrap.servers": harness.bootstrap, "group.id": self.group, "enable.auto.commit": False}
        )

    def partitions(self) -> int:
        """How many partitions the topic has."""
        return len(self.harness.admin.list_topics(self.topic, timeout=30).topics[self.topic].partitions)

    def end(self, index: int = 0) -> int:
        """The end of the log of a partition."""
        _, end = self._watcher.get_watermark_offsets(TopicPartition(self.topic, index), timeout=30)
        return int(end)

    async def broker(self, **options: Any) -> Broker:
        broker = await open_broker(settings.load(self.harness.url, **(self.options | options)))
        self._brokers.append(broker)
        return broker

    async def member(self, broker: Broker | None = None, **options: Any) -> Member:
        return await Member.join(broker or await self.broker(), self.topic, self.group, **options)

    def app(self, **options: Any) -> Onward:
        return Onward(self.harness.url, **(self.options | options))

    async def letters(self) -> list[AsideRecord]:
        """The records in the aside, by position."""
        broker = await self.broker()
        return sorted(
            (await broker.aside(self.group).scan(Filter(), None, 1_000)).records, key=lambda each: each.position
        )

    async def publish(self, count: int, keys: int = 1) -> None:
        broker = await self.broker()
        await broker.publish([event(self.topic, f"key-{n % keys}", n) for n in range(count)])

    def committed(self) -> dict[int, tuple[int, str]]:
        """The group's offsets and their metadata, by partition; empty before its first commit."""
        places = [TopicPartition(self.topic, index) for index in range(self.partitions())]
        try:
            found = self._watcher.committed(places, 30)
        except KafkaException:
            return {}  # the coordinator has only just started
        return {place.partition: (place.offset, place.metadata or "") for place in found if place.offset >= 0}

    def watermark(self, index: int = 0) -> int | None:
        """The group's offset; None before its first commit."""
        return self.committed().get(index, (None, ""))[0]

    def reset(self, offset: int, metadata: str = "", index: int = 0) -> None:
        """Set the group's offset, as kafka-consumer-groups does, or a tool that copies a group."""
        place = TopicPartition(self.topic, index, offset, metadata)
        self._watcher.commit(offsets=[place], asynchronous=False)
        assert self.committed()[index] == (offset, metadata)

    async def close(self) -> None:
        self._watcher.close()
        for broker in self._brokers:
            await broker.close()


@asynccontextmanager
async def staged(harness: KafkaHarness, **options: Any) -> AsyncIterator[Stage]:
    stage = Stage(harness, **options)
    try:
        async with asyncio.timeout(100):
            yield stage
    finally:
        await stage.close()


async def until(condition: Callable[[], bool], within_s: float = 45.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@asynccontextmanager
async def running(app: Onward) -> AsyncIterator[None]:
    """Run the application until the end of the block, then stop it cleanly."""
    run = asyncio.create_task(app.run())
    try:
        yield
    finally:
        app.stop()
        await run


async def run_until(app: Onward, condition: Callable[[], bool]) -> None:
    async with running(app):
        await until(condition)


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)
