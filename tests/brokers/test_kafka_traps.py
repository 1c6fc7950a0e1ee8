"""What breaks consumers of Kafka that handle keys in parallel: each defect and trap that is known, by name, on a real
broker. Those of the control plane alone are in tests/flow, those of engines in tests/engines."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import NewPartitions

from onward import Event, Onward, Retry, settings
from onward.brokers import open_broker
from onward.brokers.base import Broker, Fenced, Filter, Progress
from onward.brokers.kafka.commits import Commits
from onward.errors import PublishError
from onward.event import Partition, new_id
from onward.testing.harness import Member, event
from tests.brokers.kafka import KafkaHarness, harness
from tests.servers.kafka import KafkaServer

__all__ = ["harness"]

Scene = Callable[["Stage"], Awaitable[None]]


class Stage:
    """One topic of one partition unless told otherwise, on the real broker."""

    def __init__(self, harness: KafkaHarness, **options: Any) -> None:
        self.harness = harness
        self.options = {"lease_s": 1.0, "takeover_grace_s": 0.1, "partitions": 1, **options}
        self.topic = f"trap-{uuid4().hex[:8]}"
        self.group = f"group-{uuid4().hex[:8]}"
        self._brokers: list[Broker] = []

    async def broker(self, **options: Any) -> Broker:
        broker = await open_broker(settings.load(self.harness.url, **(self.options | options)))
        self._brokers.append(broker)
        return broker

    async def member(self, broker: Broker | None = None, **options: Any) -> Member:
        return await Member.join(broker or await self.broker(), self.topic, self.group, **options)

    async def publish(self, count: int, keys: int = 1) -> None:
        broker = await self.broker()
        await broker.publish([event(self.topic, f"key-{n % keys}", n) for n in range(count)])

    def committed(self) -> dict[int, tuple[int, str]]:
        asked = ConsumerGroupTopicPartitions(self.group)
        try:
            found = self.harness.admin.list_consumer_group_offsets([asked])[self.group].result(10)
        except KafkaException:
            return {}  # the coordinator has only just begun
        return {place.partition: (place.offset, place.metadata or "") for place in found.topic_partitions}

    def reset(self, offset: int, metadata: str = "", index: int = 0) -> None:
        """What kafka-consumer-groups does, or a tool that copies a group."""
        places = ConsumerGroupTopicPartitions(self.group, [TopicPartition(self.topic, index, offset, metadata)])
        deadline = time.monotonic() + 30
        while self.committed().get(index) != (offset, metadata):  # the coordinator may have only just begun
            assert time.monotonic() < deadline
            with contextlib.suppress(KafkaException):
                self.harness.admin.alter_consumer_group_offsets([places])[self.group].result(10)

    async def close(self) -> None:
        for broker in self._brokers:
            await broker.close()


@asynccontextmanager
async def staged(harness: KafkaHarness, **options: Any) -> AsyncIterator[Stage]:
    stage = Stage(harness, **options)
    try:
        async with asyncio.timeout(60):
            yield stage
    finally:
        await stage.close()


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def run_until(app: Onward, condition: Callable[[], bool]) -> None:
    running = asyncio.create_task(app.run())
    waiting = asyncio.create_task(until(condition))
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    app.stop()
    await running
    await waiting


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


# The ten defects


def test_defect_1_a_single_attempt_is_made(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app, handled = Onward(harness.url, **stage.options), list[bytes]()

            @app.handler(stage.topic, group=stage.group, retry=Retry(attempts=1))
            async def handle(event: Event) -> None:
                handled.append(event.value or b"")

            await stage.publish(100, keys=10)
            await run_until(app, lambda: len(handled) >= 100)
            assert sorted(handled) == sorted(str(n).encode() for n in range(100))
            assert stage.committed()[0][0] == 100

    play(scene())


def test_defect_2_a_log_that_begins_above_zero_is_committed(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(20)
            await asyncio.to_thread(
                harness.admin.delete_records([TopicPartition(stage.topic, 0, 12)])[
                    TopicPartition(stage.topic, 0)
                ].result,
                10,
            )
            member = await stage.member()
            await member.take(8)
            assert member.values == [*range(12, 20)]
            assert not await member.settle()
            assert stage.committed()[0][0] == 20

    play(scene())


def test_defect_3_transaction_markers_hold_nothing_up(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, "k", 0)])
            await asyncio.to_thread(_transactions, harness, stage.topic, 10)
            app, handled = Onward(harness.url, **stage.options), list[bytes]()

            @app.handler(stage.topic, group=stage.group)
            async def handle(event: Event) -> None:
                handled.append(event.value or b"")

            await run_until(app, lambda: stage.committed().get(0, (0, ""))[0] == 23)
            assert len(handled) == 11, "one before, ten in transactions, none of the aborted one"
            member = await stage.member(broker)
            await member.hold(1)
            (lag,) = (await member.subscription.lag()).values()
            assert lag.undelivered == 0, "a marker counts as lag"

    play(scene())


def _transactions(harness: KafkaHarness, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": harness.bootstrap, "transactional.id": f"tx-{uuid4().hex}"})
    producer.init_transactions(30)
    for n in range(count):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % n, key=b"k")
        producer.commit_transaction(30)
    producer.begin_transaction()
    producer.produce(topic, b"aborted", key=b"k")
    producer.flush(10)
    producer.abort_transaction(30)


def test_defect_4_a_dead_letter_that_cannot_be_stored_stays_open(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app, begun, refused = Onward(harness.url, **stage.options), list[bytes](), asyncio.Event()

            @app.handler(stage.topic, group=stage.group, retry=Retry(attempts=1))
            async def fail(event: Event) -> None:
                begun.append(event.value or b"")
                await refused.wait()
                raise ValueError("no")

            await stage.publish(5, keys=5)
            running = asyncio.create_task(app.run())
            await until(lambda: len(begun) == 5)
            with harness.refuse_aside():
                refused.set()
                await until(lambda: "dead letters cannot be stored" in caplog.text)
                assert stage.committed()[0][0] == 0, "committed what is neither done nor stored"
            await until(lambda: stage.committed()[0][0] == 5)
            app.stop()
            await running

    play(scene())


def test_defect_5_what_is_done_above_a_gap_is_not_done_again(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, drain_timeout_s=0.2) as stage:
            await stage.publish(200, keys=200)
            handled: list[bytes] = []
            blocked = asyncio.Event()

            def make(*, block: bool) -> Onward:
                app = Onward(harness.url, **stage.options)

                @app.handler(stage.topic, group=stage.group, concurrency=300)
                async def handle(event: Event) -> None:
                    if event.value == b"0" and block:
                        await blocked.wait()
                    handled.append(event.value or b"")

                return app

            await run_until(make(block=True), lambda: len(handled) == 199 and bool(stage.committed()[0][1]))
            assert stage.committed()[0][0] == 0
            await run_until(make(block=False), lambda: stage.committed()[0][0] == 200)
            assert len(handled) == 200, "handled again what was done"

    play(scene())


def test_defect_6_epochs_and_fences_grow_with_each_assignment(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            broker, seen = await stage.broker(), []
            for _ in range(3):
                member = await (await stage.member(broker)).hold(1)
                (assigned,) = member.assigned.values()
                seen.append((assigned.epoch, assigned.fence or 0))
                await member.subscription.close()
            assert seen == sorted(set(seen))
            assert len({fence for _, fence in seen}) == 3

    play(scene())


def test_defect_10_a_handler_that_raises_cancelled_error_is_resolved(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app, calls = Onward(harness.url, **stage.options), []

            @app.handler(stage.topic, group=stage.group, retry=Retry(attempts=2, first_delay_s=0.01))
            async def handle(event: Event) -> None:
                calls.append(event.value)
                if calls.count(event.value) == 1:
                    raise asyncio.CancelledError

            await stage.publish(3)
            await run_until(app, lambda: stage.committed().get(0, (0, ""))[0] == 3)

    play(scene())


def in_a_process(event: Event) -> None:
    """Dies at the first attempt of one event; what it does in the others is told by its progress."""
    if event.headers.get("dies") and not os.path.exists(event.headers["dies"]):
        Path(event.headers["dies"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    assert event.id
    assert event.type == "Whole"


def test_defects_7_to_9_workers_that_die_and_large_events_leave_nothing_stuck(
    harness: KafkaHarness, tmp_path: Path
) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app = Onward(harness.url, **stage.options)
            app.handler(stage.topic, group=stage.group, engine="processes", concurrency=2)(in_a_process)
            broker = await stage.broker()
            events = [
                Event(new_id(), stage.topic, f"k{n % 5}", b'"%s"' % (b"x" * 400_000), {}, "Whole") for n in range(20)
            ]
            events[7] = Event(new_id(), stage.topic, "k2", b'"x"', {"dies": str(tmp_path / "died")}, "Whole")
            await broker.publish(events)
            await run_until(app, lambda: stage.committed().get(0, (0, ""))[0] == 20)
            assert (tmp_path / "died").exists()
            assert not (await broker.aside(stage.group).scan(Filter(), None, 10)).records

    play(scene())


# Traps


def test_trap_3_a_rewind_replays_and_a_map_of_another_offset_counts_for_nothing(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(10)
            member = await stage.member()
            await member.take(10)
            first = member.deliveries[0]
            await member.subscription.settle([Progress(first.partition, first.epoch, 2, [(5, 10)])])
            await member.subscription.close()
            (_, metadata) = stage.committed()[0]
            for offset, text in ((1, metadata), (1, "")):  # copied with its text; reset by the tool
                stage.reset(offset, text)
                again = await stage.member()
                await again.take(9)
                assert again.values == [*range(1, 10)]
                (assigned,) = again.assigned.values()
                assert assigned.stored is not None
                assert not assigned.stored.done_above
                await again.subscription.close()

    play(scene())


def test_trap_3_an_offset_beyond_the_log_is_no_reason_to_skip(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(5)
            stage.reset(50)
            member = await stage.member()
            await member.take(5)
            assert member.values == [*range(5)]
            assert "is read from its beginning" in caplog.text

    with caplog.at_level(logging.WARNING):
        play(scene())


def test_trap_3_what_retention_took_is_told(harness: KafkaHarness, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(10)
            member = await stage.member()
            await member.take(10)
            await member.settle(member.deliveries[:2])
            await member.subscription.close()
            place = TopicPartition(stage.topic, 0, 6)
            await asyncio.to_thread(harness.admin.delete_records([place])[TopicPartition(stage.topic, 0)].result, 10)
            again = await stage.member()
            await again.take(4)
            assert again.values == [6, 7, 8, 9]
            assert "positions 2 to 6 were removed by retention" in caplog.text

    with caplog.at_level(logging.WARNING):
        play(scene())


@pytest.mark.parametrize("metadata", ["", "kafka-streams", "O1junk", "O1\u3400\u3401.x.4", "x" * 4000, "a.b.c"])
def test_trap_11_foreign_metadata_says_that_nothing_is_done(harness: KafkaHarness, metadata: str) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(5)
            stage.reset(2, metadata)
            member = await stage.member()
            await member.take(3)
            assert member.values == [2, 3, 4]
            assert not await member.settle()
            assert stage.committed()[0][0] == 5

    play(scene())


def test_trap_10_what_a_commit_cannot_hold_throttles_that_partition_only(harness: KafkaHarness) -> None:
    """Half of 130,000 positions done, at random: more than 4,096 characters can say."""

    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(2)
            zero = next(each for each in member.assigned if each.index == 0)
            above = [(n, n + 1) for n in sorted(random.Random(1).sample(range(1, 130_000), 65_000))]
            progress = Progress(zero, member.assigned[zero].epoch, 0, above)
            assert not await member.subscription.settle([progress])
            offset, text = stage.committed()[0]
            assert offset == 0
            assert 4_000 < len(text) < 4_096
            await broker.publish([event(stage.topic, f"key-{n}", n) for n in range(40)])
            await member.until(lambda: len(member.deliveries) > 5)
            await member.quiet()
            assert {delivery.partition.index for delivery in member.deliveries} == {1}
            assert not await member.subscription.settle([Progress(zero, member.assigned[zero].epoch, 0)])
            await member.take(40)

    play(scene())


def test_trap_12_polling_goes_on_while_all_is_paused_and_handlers_run_long(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(3)
            member = await (await stage.member()).hold(1)
            await member.take(3)
            await member.subscription.pause(list(member.assigned))
            await asyncio.sleep(2.5)  # well over a session
            assert not await member.settle()
            assert not [each for each in member.history if isinstance(each, Fenced)]

    play(scene())


def test_trap_7_a_clean_rebalance_repeats_nothing_and_the_others_flow_meanwhile(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=4, revoke_grace_s=20.0) as stage:
            broker = await stage.broker()
            first = await (await stage.member(broker, yields=False)).hold(4)
            second = await stage.member(await stage.broker())
            revoked: list[Partition] = []
            while not revoked:
                for message in await first.receive():
                    revoked += getattr(message, "partitions", [])
                await second.receive(wait_s=0.05)
            before = first.subscription.sure_until()
            await broker.publish([event(stage.topic, f"key-{n}", n) for n in range(40)])
            await first.until(lambda: len({each.partition for each in first.deliveries}) == 2)
            await asyncio.sleep(1.2)  # longer than a session: the group waits for the release
            assert first.subscription.sure_until() > before
            assert not second.assigned
            assert not {each.partition for each in first.deliveries} & set(revoked)
            await first.settle()
            await first.release(revoked)
            await second.until(lambda: len(second.assigned) == 2)
            assert not any(each.unclean for each in second.assigned.values())
            await second.until(lambda: len(first.deliveries) + len(second.deliveries) >= 40)
            assert len(first.deliveries) + len(second.deliveries) == 40

    play(scene())


def test_trap_16_and_20_messages_of_other_clients(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(0)
            member = await (await stage.member()).hold(1)
            producer = Producer({"bootstrap.servers": harness.bootstrap})
            producer.produce(stage.topic, None, key=b"\xff\xfe", headers={"n": None, "b": b"\xff"}, timestamp=1234)
            producer.produce(stage.topic, b"", key=b"")
            producer.produce(stage.topic, b"x")
            await asyncio.to_thread(producer.flush, 10)
            await member.take(3)
            tombstone, empty, keyless = (each.event for each in member.deliveries)
            assert (tombstone.value, tombstone.time, dict(tombstone.headers)) == (None, 1.234, {"n": "", "b": "\\xff"})
            assert (empty.value, empty.key, keyless.key) == (b"", "", None)
            assert tombstone.id == f"{stage.topic}/0/0", "the same in every delivery"

    play(scene())


def test_the_partitioner_agrees_with_other_clients(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=8) as stage:
            await stage.publish(200, keys=200)
            producer = Producer({"bootstrap.servers": harness.bootstrap, "partitioner": "murmur2_random"})
            for n in range(200):
                producer.produce(stage.topic, b"%d" % n, key=f"key-{n}".encode())
            await asyncio.to_thread(producer.flush, 10)
            member = await stage.member()
            await member.take(400)
            places: dict[str | None, set[int]] = {}
            for delivery in member.deliveries:
                places.setdefault(delivery.event.key, set()).add(delivery.partition.index)
            assert all(len(each) == 1 for each in places.values())

    play(scene())


def test_other_clients_read_our_events_as_cloud_events(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            broker = await stage.broker()
            sent = Event(new_id(), stage.topic, "k", b"v", {"trace": "t"}, "OrderPlaced", 1_700_000_000.5)
            await broker.publish([sent])
            consumer = Consumer({"bootstrap.servers": harness.bootstrap, "group.id": "x", "enable.auto.commit": False})
            consumer.assign([TopicPartition(stage.topic, 0, 0)])
            message = await asyncio.to_thread(consumer.poll, 10)
            assert dict(message.headers()) == {
                "ce_id": sent.id.encode(),
                "ce_specversion": b"1.0",
                "ce_source": b"onward",
                "ce_type": b"OrderPlaced",
                "ce_time": b"2023-11-14T22:13:20.500000000Z",
                "trace": b"t",
            }
            assert (message.key(), message.value()) == (b"k", b"v")
            consumer.close()

    play(scene())


def test_contract_13_after_a_refusal_nothing_later_of_the_key_is_accepted(harness: KafkaHarness) -> None:
    """One event in the midst is too large for the topic, whatever batches they travel in."""

    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(1)
            await asyncio.to_thread(harness.limit, stage.topic, "20000")
            broker = await stage.broker(**{"batch.size": 2000})
            call = [event(stage.topic, f"key-{n % 2}", n) for n in range(200)]
            call[51] = Event(new_id(), stage.topic, "key-1", b"x" * 50_000)
            with pytest.raises(PublishError) as raised:
                await broker.publish(call)
            refused = {each.id for each in raised.value.refused}
            assert not raised.value.unknown
            assert {each.id for each in call[51:] if each.key == "key-1"} <= refused
            retry = [each for each in call if each.id in refused and each is not call[51]]
            await broker.publish(retry)
            member = await stage.member()
            await member.take(200)
            for key in ("key-0", "key-1"):
                of_key = [each.id for each in call if each.key == key and each is not call[51]]
                got = [each.event.id for each in member.deliveries[1:] if each.event.key == key]
                assert got == of_key

    play(scene())


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


@pytest.mark.parametrize(
    "options",
    [
        {"partition.assignment.strategy": "range"},
        {"partition.assignment.strategy": "roundrobin"},
        {"group.protocol": "consumer"},
    ],
    ids=["range", "roundrobin", "kip-848"],
)
def test_other_ways_to_share_by_setting(harness: KafkaHarness, options: dict[str, str]) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=4, **options) as stage:
            broker = await stage.broker()
            first = await (await stage.member(broker)).hold(4)
            await broker.publish([event(stage.topic, f"key-{n}", n) for n in range(40)])
            await first.take(40)
            second = await stage.member(await stage.broker())
            while len(second.assigned) < 2 or len(first.assigned) != 2:
                await asyncio.gather(first.receive(wait_s=0.1), second.receive(wait_s=0.1))
            assert not set(first.assigned) & set(second.assigned)
            assert not any(each.unclean for each in second.assigned.values())
            assert len(first.deliveries) + len(second.deliveries) == 40, "a clean rebalance repeats nothing"
            await second.subscription.close()
            await first.hold(4)

    play(scene())


def test_a_static_member_that_comes_back_keeps_its_partitions(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=2, lease_s=6.0) as stage:
            other = await (await stage.member(await stage.broker(**{"group.instance.id": "one"}))).hold(2)
            static = await stage.member(await stage.broker(**{"group.instance.id": "two"}))
            while len(static.assigned) < 1:
                await asyncio.gather(other.receive(wait_s=0.1), static.receive(wait_s=0.1))
            mine, theirs = set(static.assigned), dict(other.assigned)
            await static.release(list(static.assigned))
            await static.subscription.close()
            back = await stage.member(await stage.broker(**{"group.instance.id": "two"}))
            while not back.assigned:
                await asyncio.gather(other.receive(wait_s=0.1), back.receive(wait_s=0.1))
            assert set(back.assigned) == mine
            assert other.assigned == theirs, "no rebalance"

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


# The broker fails


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


def test_threads_end_with_their_broker(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(1)
            member = await stage.member()
            await member.take(1)

    play(scene())
    deadline = time.monotonic() + 10
    while [each for each in threading.enumerate() if each.name.startswith("onward-kafka")]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
