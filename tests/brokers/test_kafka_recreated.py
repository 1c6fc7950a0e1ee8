"""A topic that is created again, and a clock that was ahead: no record is lost, and none blocks a new event."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import NewTopic

from onward import Event
from onward.brokers.base import AsideRecord, State
from onward.brokers.kafka import commit_metadata
from onward.testing.aside import make_record
from onward.testing.scenario import Member, event
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, running, staged, until

__all__ = ["harness"]

_SOON = {"client": {"topic.metadata.refresh.interval.ms": 300}}
_DAY_S = 86_400.0


def set_aside(member: Member, group: str, at: int, state: State) -> AsideRecord:
    """The record of the delivery with this index."""
    delivery = member.deliveries[at]
    return make_record(delivery, member.assigned[delivery.partition].log_id, state, group=group)


def test_the_records_of_an_owner_count_although_an_earlier_owner_had_a_clock_that_was_ahead(
    harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset of the group's offsets removes the fence of the owner whose clock was ahead."""

    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(4)
            with monkeypatch.context() as ahead:
                ahead.setattr(commit_metadata, "time", SimpleNamespace(time=lambda: time.time() + _DAY_S))
                first = await stage.member()
                await first.take(4)
            (before,) = first.assigned.values()
            old = set_aside(first, stage.group, 0, State.DEAD)
            await first.subscription.settle(first.progress(), aside=[old])
            await first.release(list(first.assigned))
            await first.subscription.close()
            stage.reset(2)
            second = await stage.member()
            await second.take(2)
            (after,) = second.assigned.values()
            assert (after.fence or 0) > (before.fence or 0)
            new = set_aside(second, stage.group, 0, State.DEAD)
            assert not await second.subscription.settle(second.progress(), aside=[new])
            assert [each.id for each in await stage.letters()] == [old.id, new.id]

    play(scene())


def recreate(harness: KafkaHarness, topic: str) -> None:
    """Delete the topic, and create it again as soon as the cluster allows it."""
    harness.admin.delete_topics([topic])[topic].result(30)
    deadline = time.monotonic() + 20.0
    while True:
        try:
            harness.admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
        except KafkaException:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            return


def test_a_waiting_record_of_a_deleted_topic_becomes_a_dead_letter_and_blocks_no_new_event(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """Records are identified by their position, and the new log has the same positions."""

    async def scene() -> None:
        async with staged(harness, partitions=None, **_SOON) as stage:
            await (await stage.broker(partitions=1)).publish([event(stage.topic, f"old-{n}", n) for n in range(3)])
            first = await stage.member()
            await first.take(3)
            states = [State.WAITING, State.HELD, State.DEAD]
            old = [set_aside(first, stage.group, n, state) for n, state in enumerate(states)]
            await first.subscription.settle(first.progress(), aside=old)
            await first.release(list(first.assigned))
            await first.subscription.close()
            await asyncio.to_thread(recreate, harness, stage.topic)
            await (await stage.broker()).publish([event(stage.topic, f"new-{n}", n) for n in range(10, 16)])
            app, handled = stage.app(), list[bytes]()

            @app.handler(stage.topic, group=stage.group)
            async def handle(event: Event) -> None:
                handled.append(event.value or b"")

            async with running(app):
                await until(lambda: stage.watermark() == 6)
                letters = await stage.letters()
                assert [(each.id, each.state) for each in letters] == [(each.id, State.DEAD) for each in old]
                failures = [each.failure for each in letters if each.failure is not None]
                assert [each.reason for each in failures] == ["refused", "refused", "exhausted"]
                assert "`onward dead send`" in failures[0].message
                assert f"2 records of {stage.topic} are dead letters now" in caplog.text
                aside = (await stage.broker()).aside(stage.group)
                ids = [each.id for each in old]
                assert await aside.move(ids, expect=State.DEAD, to=State.WAITING, due=0.0) == 0
                assert await aside.remove(ids[1:], expect=State.DEAD) == 2
                assert [each.id for each in await stage.letters()] == ids[:1]
            assert sorted(handled) == [b"%d" % n for n in range(10, 16)]

    play(scene())


def recreate_longer(harness: KafkaHarness, topic: str) -> None:
    """Create the topic again and fill it so fast that no reader sees the log while its own position is missing."""
    producer = Producer({"bootstrap.servers": harness.bootstrap, "linger.ms": 0})
    producer.list_topics(topic, 30)
    recreate(harness, topic)
    for n in range(100, 160):
        producer.produce(topic, b"%d" % n, b"a", 0)
    assert producer.flush(20) == 0


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_topic_recreated_under_a_member_is_read_from_its_beginning_even_if_it_is_longer(
    harness: KafkaHarness, start: str
) -> None:
    """The reader's position exists in the new log too, so nothing fails."""

    async def scene() -> None:
        async with staged(harness, client={"fetch.error.backoff.ms": 3_000}) as stage:
            await stage.publish(1)
            member = await (await stage.member(start=start)).hold(1)
            await stage.publish(20)
            await member.until(lambda: 19 in member.values)
            await member.settle()
            (before,) = member.assigned.values()
            await asyncio.to_thread(recreate_longer, harness, stage.topic)
            await member.until(lambda: set(member.values) >= set(range(100, 160)))
            (after,) = member.assigned.values()
            assert after.log_id != before.log_id
            await member.settle()
            assert stage.watermark() == 60

    play(scene())
