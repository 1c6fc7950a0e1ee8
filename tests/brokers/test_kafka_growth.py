"""Partitions added to a topic while publishers run: every key stays where it is."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka.admin import NewPartitions, NewTopic

from onward.brokers.base import Broker
from onward.testing.scenario import Process
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
        """An event of every key, with this number."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        assert await self.line() == number


async def grow(stage: Stage, partitions: int) -> None:
    new = NewPartitions(stage.topic, partitions)
    stage.harness.admin.create_partitions([new])[stage.topic].result(30)
    await until(lambda: stage.partitions() == partitions)


async def lanes(stage: Stage, broker: Broker, count: int) -> dict[str, list[tuple[int, int]]]:
    """The partition and the number of each event, by key, in the order of their logs."""
    member = await stage.member(broker)
    await member.take(count)
    found = defaultdict[str, list[tuple[int, int]]](list)
    for each in sorted(member.deliveries, key=lambda each: (each.partition, each.position)):
        found[each.event.key or ""].append((each.partition.index, int(each.event.value or b"")))
    return found


def moved(found: dict[str, list[tuple[int, int]]]) -> list[str]:
    """The keys whose events are not all in one partition, in the order in which they were published."""
    return [
        key
        for key, places in found.items()
        if len({index for index, _ in places}) > 1 or places != sorted(places, key=lambda place: place[1])
    ]


@pytest.mark.parametrize("creates", ["publisher", "operator"])
def test_a_topic_grown_under_running_publishers_moves_no_key(harness: KafkaHarness, creates: str) -> None:
    """A publisher that runs, one that starts after the growth, and both again, by turns: whatever each of them knows of
    the topic, a key's events are in one partition, in the order in which they were accepted."""

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
