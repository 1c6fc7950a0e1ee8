"""A broker killed or paused, partitions added, a topic deleted, a pause too long: what is promised of each."""

import asyncio
import time
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions

from onward.brokers.base import Fenced
from onward.brokers.kafka.commits import Commits
from onward.errors import PublishError
from onward.testing.harness import event
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, staged
from tests.servers.kafka import KafkaServer

__all__ = ["harness"]


def test_partitions_added_are_read_from_their_beginning(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, on_partition_growth="accept", partitions=None) as stage:
            options = {"topic.metadata.refresh.interval.ms": 500}
            await (await stage.broker(partitions=2)).publish([event(stage.topic, "a", 0)])
            broker = await stage.broker(**options)
            member = await (await stage.member(broker, start="latest")).hold(2)
            harness.admin.create_partitions([NewPartitions(stage.topic, 4)])[stage.topic].result(10)
            producer = Producer({"bootstrap.servers": harness.bootstrap})
            producer.produce(stage.topic, b"7", partition=3)
            await asyncio.to_thread(producer.flush, 10)
            await member.hold(4)
            await member.take(1)
            assert member.values == [7], "the group begins with the latest, but not in a partition that is new"

    play(scene())


def test_a_topic_deleted_and_made_again_is_another_log(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, **{"topic.metadata.refresh.interval.ms": 300}) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, "a", n) for n in range(5)])
            member = await stage.member(broker)
            await member.take(5)
            await member.settle()
            (first,) = member.assigned.values()
            _, mark = stage.committed()[0]
            harness.admin.delete_topics([stage.topic])[stage.topic].result(10)
            await member.until(lambda: not member.assigned)
            await member.subscription.close()
            again = await stage.broker()
            await again.publish([event(stage.topic, "a", n) for n in range(10, 20)])
            stage.reset(5, mark)  # as if the commit of the old log had outlived it
            member = await stage.member(again)
            await member.take(10)
            assert member.values == [*range(10, 20)]
            (second,) = member.assigned.values()
            assert second.log_id != first.log_id
            assert (second.fence or 0) > (first.fence or 0)

    play(scene())


def test_what_stands_still_is_committed_again_before_the_cluster_forgets_it(
    harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    places = Commits._places

    def counted(commits: Commits, orders: Any) -> Any:
        made = places(commits, orders)
        written.extend(place.offset for place in made)
        return made

    monkeypatch.setattr("onward.brokers.kafka.commits._IDLE_S", 0.3)
    monkeypatch.setattr(Commits, "_places", counted)

    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(3)
            member = await stage.member()
            await member.take(3)
            await member.settle()
            await member.until(lambda: written.count(3) >= 3)

    play(scene())


def test_who_receives_again_after_too_long_a_pause_is_a_member_again(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, max_poll_gap_s=1.0) as stage:
            await stage.publish(3)
            member = await stage.member()
            await member.take(3)
            await asyncio.sleep(2.0)  # a handler that blocks the whole process
            await member.take(6)
            assert member.values == [0, 1, 2, 0, 1, 2], "unsettled, so it comes again"
            assert any(isinstance(each, Fenced) for each in member.history)
            assert not await member.settle()

    play(scene())


def test_a_broker_that_is_killed_and_comes_back_loses_nothing(harness: KafkaHarness, kafka_server: KafkaServer) -> None:
    async def scene() -> None:
        async with staged(harness, lease_s=6.0, publish_timeout_s=40.0) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, "a", n) for n in range(5)])
            member = await stage.member(broker)
            await member.take(5)
            kafka_server.kill()
            sending = asyncio.create_task(broker.publish([event(stage.topic, "a", n) for n in range(5, 10)]))
            settling = asyncio.create_task(member.settle())
            await asyncio.to_thread(kafka_server.restart)
            await sending
            await settling
            await member.until(lambda: set(member.values) == set(range(10)), within_s=40.0)
            first: list[int] = list(dict.fromkeys(member.values))
            assert first == [*range(10)]

    play(scene())


def test_a_broker_that_stands_still_is_waited_for_no_longer_than_told(
    harness: KafkaHarness, kafka_server: KafkaServer
) -> None:
    async def scene() -> None:
        async with staged(harness, publish_timeout_s=2.0) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, "a", 0)])
            member = await (await stage.member(broker)).hold(1)
            kafka_server.pause()
            started = time.monotonic()
            with pytest.raises(PublishError) as raised:
                await broker.publish([event(stage.topic, "a", 1)])
            assert time.monotonic() - started < 10
            assert len(raised.value.unknown) + len(raised.value.refused) == 1
            await asyncio.sleep(0.1)
            assert member.subscription.sure_until() < time.clock_gettime(time.CLOCK_BOOTTIME) + 1.0
            kafka_server.resume()
            await broker.publish([event(stage.topic, "a", 2)])
            await member.until(lambda: 2 in member.values, within_s=40.0)
            assert list(dict.fromkeys(member.values)) in ([0, 1, 2], [0, 2], [0, 2, 1])

    play(scene())
