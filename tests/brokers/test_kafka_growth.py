"""Partitions are added to a topic while publishers run: every key stays in its partition."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import NewPartitions, NewTopic

from onward.brokers.base import Broker, TopicSpec, Topology
from onward.errors import BrokerError, PartitionsDiffer
from onward.testing.scenario import Process, event
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import Stage, play, staged, until

__all__ = ["harness"]

KEYS = [f"key-{n}" for n in range(20)]


class Publisher(Process):
    """See kafka_publisher.py."""

    def __init__(self, stage: Stage) -> None:
        task = {"url": stage.harness.url, "settings": stage.options, "topic": stage.topic, "keys": KEYS}
        super().__init__([str(Path(__file__).with_name("kafka_publisher.py")), json.dumps(task)])

    async def publish(self, number: int) -> None:
        """Publish an event of every key, with this number."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        assert await self.line() == number


async def grow(stage: Stage, partitions: int) -> None:
    new = NewPartitions(stage.topic, partitions)
    stage.harness.admin.create_partitions([new])[stage.topic].result(30)
    await until(lambda: stage.partitions() == partitions and _is_led(stage, partitions - 1))


def _is_led(stage: Stage, index: int) -> bool:
    """The leader of the partition answers. The cluster shows a new partition a moment before that."""
    try:
        return stage.end(index) >= 0
    except KafkaException:
        return False


async def lanes(stage: Stage, broker: Broker, count: int) -> dict[str, list[tuple[int, int]]]:
    """The partition and the number of each event, by key, in the order of their logs."""
    member = await stage.member(broker)
    await member.take(count)
    found = defaultdict[str, list[tuple[int, int]]](list)
    for each in sorted(member.deliveries, key=lambda each: (each.partition, each.position)):
        found[each.event.key or ""].append((each.partition.index, int(each.event.value or b"")))
    return found


def moved(found: dict[str, list[tuple[int, int]]]) -> list[str]:
    """The keys whose events are in several partitions, or not in the order in which they were published."""
    return [
        key
        for key, places in found.items()
        if len({index for index, _ in places}) > 1 or places != sorted(places, key=lambda place: place[1])
    ]


@pytest.mark.parametrize("creates", ["publisher", "operator"])
def test_a_topic_grown_under_running_publishers_moves_no_key(harness: KafkaHarness, creates: str) -> None:
    """One publisher runs before the topic grows, another starts after that, and both publish in turn. The events of a
    key are in one partition, in the order in which they were accepted, whatever count each publisher sees."""

    async def scene() -> None:
        async with staged(harness, partitions=None) as stage:
            publishers: list[Publisher] = []
            try:
                if creates == "operator":
                    harness.admin.create_topics([NewTopic(stage.topic, 4, 1)])[stage.topic].result(30)
                else:
                    stage.options["partitions"] = 4
                publishers.append(Publisher(stage))
                await publishers[0].publish(0)
                await grow(stage, 8)
                publishers.append(Publisher(stage))
                for number in range(1, 7):
                    await publishers[number % 2].publish(number)
                await _no_key_moved(stage, range(7))
            finally:
                for each in publishers:
                    each.end()

    play(scene())


async def _no_key_moved(stage: Stage, numbers: Sequence[int]) -> None:
    found = await lanes(stage, await stage.broker(), len(KEYS) * len(numbers))
    assert sorted(found) == sorted(KEYS)
    assert not moved(found)


def test_publishers_that_start_at_the_same_time_agree_on_the_count(harness: KafkaHarness) -> None:
    """The topic grows while they look it up, so they see different counts."""

    async def scene() -> None:
        async with staged(harness, partitions=None) as stage:
            harness.admin.create_topics([NewTopic(stage.topic, 4, 1)])[stage.topic].result(30)
            await until(lambda: stage.partitions() == 4)
            publishers = [await stage.broker() for _ in range(6)]
            events = [[event(stage.topic, key, n) for key in KEYS] for n in range(len(publishers))]
            first = [asyncio.create_task(each.publish(events[n])) for n, each in enumerate(publishers[:3])]
            harness.admin.create_partitions([NewPartitions(stage.topic, 8)])[stage.topic].result(30)
            later = [asyncio.create_task(each.publish(events[n + 3])) for n, each in enumerate(publishers[3:])]
            await asyncio.gather(*first, *later)
            places = (await lanes(stage, await stage.broker(), len(KEYS) * len(publishers))).values()
            assert {len({index for index, _ in each}) for each in places} == {1}

    play(scene())


def test_growth_is_reported_once_and_a_process_that_expects_it_is_refused(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.brokers.kafka.placement._FRESH_S", 0.0)

    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            broker, expects = await stage.broker(), await stage.broker(partitions=4)
            await broker.publish([event(stage.topic, "a", 0)])
            await grow(stage, 4)
            for n in range(3):
                await broker.publish([event(stage.topic, None, n) for _ in range(8)])
            assert caplog.text.count("it has 4 partitions, and had 2 when its first event was published") == 1
            assert [stage.end(index) for index in (2, 3)] == [0, 0], "an event without a key went to a new partition"
            differs = f"{stage.topic} has 2 partitions, and 2 more that hold no keys, this process expects 4"
            with pytest.raises(PartitionsDiffer, match=differs):
                await expects.publish([event(stage.topic, "a", 1)])
            for count, actions in ((2, []), (4, ["refuse"])):
                changes = await broker.declare(Topology([TopicSpec(stage.topic, count)]), apply=True)
                assert [change.action for change in changes] == actions

    play(scene())


def test_members_of_a_grown_topic_start_with_the_old_count_and_with_the_new_one(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            await stage.publish(1)
            await grow(stage, 4)
            await (await stage.member(await stage.broker(partitions=2))).hold(4)
            await stage.member(await stage.broker(partitions=4))
            with pytest.raises(PartitionsDiffer):
                await stage.member(await stage.broker(partitions=3))

    play(scene())


def test_a_topic_created_again_has_a_count_of_its_own(harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.brokers.kafka.placement._FRESH_S", 0.0)

    async def scene() -> None:
        async with staged(harness, partitions=None) as stage:
            running = await stage.broker()
            await (await stage.broker(partitions=2)).publish([event(stage.topic, "a", 0)])
            await running.publish([event(stage.topic, "a", 1)])
            await (await stage.broker()).drop_topic(stage.topic)
            await (await stage.broker(partitions=3)).publish([event(stage.topic, "a", 2)])
            await running.publish([event(stage.topic, None, n) for n in range(30)])
            assert all(stage.end(index) for index in range(3))

    play(scene())


def test_a_plan_stores_nothing_and_applying_it_stores_the_count(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=None, auto_declare=False) as stage:
            broker, wanted = await stage.broker(), Topology([TopicSpec(stage.topic, 2)])
            harness.admin.create_topics([NewTopic(stage.topic, 2, 1)])[stage.topic].result(30)
            await until(lambda: stage.topic in harness.admin.list_topics(timeout=30).topics)
            assert not await broker.declare(wanted, apply=False)
            with pytest.raises(BrokerError, match=r"topic onward\.topics does not exist and auto_declare is off"):
                await broker.publish([event(stage.topic, "a", 0)])
            assert not await broker.declare(wanted, apply=True)
            await grow(stage, 4)
            await (await stage.broker(partitions=2)).publish([event(stage.topic, "a", 0)])

    play(scene())
