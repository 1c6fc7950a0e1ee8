"""A broker that is killed or paused, added partitions, a deleted topic, a receive that is called too late."""

import asyncio
import logging
import time
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions

from onward import Event
from onward.brokers.base import Broker, Fenced
from onward.brokers.kafka.commits import Commits
from onward.clock import now
from onward.errors import Backlogged, BrokerError, PublishError
from onward.event import Partition, new_id
from onward.testing.scenario import event
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, running, staged, until
from tests.servers.kafka import KafkaServer

__all__ = ["harness"]

ANSWER_S = 20.0  # after the deadline of publish, to collect its last reports on a busy machine
RECOVERED_S = 30.0


def test_added_partitions_are_read_from_their_beginning(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, on_partition_growth="accept", partitions=None) as stage:
            options = {"client": {"topic.metadata.refresh.interval.ms": 500}}
            await (await stage.broker(partitions=2)).publish([event(stage.topic, "a", 0)])
            broker = await stage.broker(**options)
            member = await (await stage.member(broker, start="latest")).hold(2)
            harness.admin.create_partitions([NewPartitions(stage.topic, 4)])[stage.topic].result(30)
            producer = Producer({"bootstrap.servers": harness.bootstrap})
            producer.produce(stage.topic, b"7", partition=3)
            await asyncio.to_thread(producer.flush, 30)
            await member.hold(4)
            await member.take(1)
            assert member.values == [7], "start='latest' must not apply to an added partition"

    play(scene())


def test_added_partitions_are_not_read_unless_growth_is_accepted(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """A key may have moved to one of them while its earlier events wait in another partition. Its new events would
    overtake them."""

    async def scene() -> None:
        async with staged(harness, partitions=None, client={"topic.metadata.refresh.interval.ms": 300}) as stage:
            await (await stage.broker(partitions=2)).publish([event(stage.topic, "a", 0)])
            member = await (await stage.member()).hold(2)
            await member.take(1)
            harness.admin.create_partitions([NewPartitions(stage.topic, 4)])[stage.topic].result(30)
            producer = Producer({"bootstrap.servers": harness.bootstrap})
            for index in (0, 3):
                producer.produce(stage.topic, b"%d" % index, partition=index)
            await asyncio.to_thread(producer.flush, 30)
            await member.until(lambda: bool(member.subscription.troubles()))
            assert "4 partitions, and had 2" in caplog.text
            assert "on_partition_growth='accept'" in member.subscription.troubles()[0]
            await member.take(2)
            assert sorted(member.assigned) == [Partition(stage.topic, 0), Partition(stage.topic, 1)]
            await member.settle()
            await member.subscription.close()
            accepts = await (await stage.member(await stage.broker(on_partition_growth="accept"))).hold(4)
            await accepts.take(1)
            assert accepts.values == [3]
            assert not accepts.subscription.troubles()

    play(scene())


def test_a_reader_does_not_create_a_deleted_topic_again(harness: KafkaHarness) -> None:
    """A cluster that creates topics on demand would create it with another number of partitions."""

    async def scene() -> None:
        async with staged(harness, partitions=3, client={"topic.metadata.refresh.interval.ms": 300}) as stage:
            publisher = await stage.broker()
            await publisher.publish([event(stage.topic, "a", 0)])
            await publisher.close()
            member = await (await stage.member()).hold(3)
            harness.admin.delete_topics([stage.topic])[stage.topic].result(30)
            await member.until(lambda: not member.assigned)
            end = now() + 3.0
            while now() < end:
                await member.receive(wait_s=0.1)
            assert stage.topic not in harness.admin.list_topics(timeout=30).topics

    play(scene())


def test_a_topic_that_is_created_again_is_another_log(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, client={"topic.metadata.refresh.interval.ms": 300}) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, "a", n) for n in range(5)])
            member = await stage.member(broker)
            await member.take(5)
            await member.settle()
            (first,) = member.assigned.values()
            _, mark = stage.committed()[0]
            harness.admin.delete_topics([stage.topic])[stage.topic].result(30)
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


def test_idle_progress_is_committed_again_before_the_cluster_forgets_it(
    harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    places = Commits._places

    def counted(commits: Commits, orders: Any) -> Any:
        made = places(commits, orders)
        written.extend(place.offset for place in made)
        return made

    monkeypatch.setattr("onward.brokers.kafka.commit_queue._IDLE_S", 0.3)
    monkeypatch.setattr(Commits, "_places", counted)

    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(3)
            member = await stage.member()
            await member.take(3)
            await member.settle()
            await member.until(lambda: written.count(3) >= 3)

    play(scene())


def test_a_member_that_receives_again_after_too_long_a_pause_joins_again(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, max_poll_gap_s=3.0) as stage:
            await stage.publish(3)
            member = await stage.member()
            await member.take(3)
            await asyncio.sleep(4.5)  # a handler that blocks the whole process
            await member.take(6)
            assert member.values == [0, 1, 2, 0, 1, 2], "unsettled events are delivered again"
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


def test_calls_to_a_paused_broker_end_at_their_timeout(harness: KafkaHarness, kafka_server: KafkaServer) -> None:
    """While the broker is paused, publish and settle end by `publish_timeout_s`, and ownership is not certain. When it
    resumes, every accepted event arrives, each key in order, and progress is stored again."""

    async def scene() -> None:
        async with staged(harness, publish_timeout_s=5.0, lease_s=1.0) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, "a", n) for n in range(3)])
            member = await stage.member(broker)
            await member.take(3)
            kafka_server.pause()
            started = time.monotonic()
            more = [event(stage.topic, "a", n) for n in range(3, 6)]
            published, settled = await asyncio.gather(broker.publish(more), member.settle(), return_exceptions=True)
            assert time.monotonic() - started < 5.0 + ANSWER_S
            assert isinstance(published, PublishError)
            assert "no answer from Kafka in publish_timeout_s=5; is it running?" in str(published)
            assert {each.id for each in (*published.refused, *published.unknown)} == {each.id for each in more}
            assert isinstance(settled, BrokerError)
            assert member.subscription.sure_until() < now() + 1.0, "certain for longer than a session of one second"
            kafka_server.resume()
            resumed = time.monotonic()
            await _until_published(broker, more)
            end = stage.end()  # unknown events may be stored twice
            await member.until(lambda: member.deliveries[-1].position == end - 1, within_s=RECOVERED_S)
            assert time.monotonic() - resumed < RECOVERED_S
            assert list(dict.fromkeys(member.values)) == [*range(6)]
            await member.settle()
            await member.release(list(member.assigned))
            await member.subscription.close()
            after = await (await stage.member()).hold(1)
            await after.quiet()

    play(scene())


def test_events_that_wait_for_a_broker_are_bounded_in_bytes(harness: KafkaHarness, kafka_server: KafkaServer) -> None:
    async def scene() -> None:
        async with staged(harness, publish_timeout_s=5.0, max_outgoing_bytes=10_000) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, "a", 0)])
            kafka_server.pause()
            try:
                waiting = [asyncio.create_task(broker.publish([_large(stage.topic)])) for _ in range(3)]
                await asyncio.sleep(0)  # one is being sent, two wait
                with pytest.raises(Backlogged, match="raise max_outgoing_bytes=10,000") as raised:
                    await broker.publish([_large(stage.topic)])
                assert len(raised.value.refused) == 1
            finally:
                kafka_server.resume()
            await asyncio.gather(*waiting, return_exceptions=True)
            await broker.publish([_large(stage.topic)])

    play(scene())


def _large(topic: str) -> Event:
    return Event(new_id(), topic, "a", b"x" * 5_000)


async def _until_published(broker: Broker, events: list[Event]) -> None:
    """Publish as a caller does that needs the order: publish the events again that were not accepted."""
    left, deadline = events, time.monotonic() + RECOVERED_S
    while left:
        try:
            return await broker.publish(left)
        except PublishError as error:
            assert time.monotonic() < deadline
            failed = {each.id for each in (*error.refused, *error.unknown)}
            left = [each for each in left if each.id in failed]


def test_a_topic_deleted_under_a_running_application_is_reported_and_its_successor_is_handled(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """The application reports that it lost the partitions, and reads the new log from its beginning, without a
    restart."""

    async def scene() -> None:
        async with staged(harness, client={"topic.metadata.refresh.interval.ms": 300}) as stage:
            app, handled = stage.app(), list[bytes]()

            @app.handler(stage.topic, group=stage.group)
            async def handle(event: Event) -> None:
                handled.append(event.value or b"")

            await stage.publish(5)
            async with running(app):
                await until(lambda: stage.watermark() == 5)
                harness.admin.delete_topics([stage.topic])[stage.topic].result(30)
                await until(lambda: f"no longer owns {stage.topic}/0" in caplog.text)
                await (await stage.broker()).publish([event(stage.topic, "a", n) for n in range(10, 20)])
                await until(lambda: len(handled) == 15)
            assert handled[5:] == [b"%d" % n for n in range(10, 20)]

    with caplog.at_level(logging.WARNING):
        play(scene())
