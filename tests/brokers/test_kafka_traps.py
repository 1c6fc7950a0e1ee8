"""The traps of consuming Kafka key by key, by number, on a real broker. The list shows where each one is tested.

Defects of another consumer: all by their numbers in test_kafka_defects.py
   1 a single attempt             6 epochs that start over
   2 a log that begins above 0    7 a timeout in a process
   3 transaction markers          8 a worker that is killed
   4 a store that refuses         9 large batches
   5 done above a gap            10 CancelledError
Traps: here unless a file is named
   1 offsets with holes           test_trap_1 (compaction), test_defect_2 (retention), test_defect_3 (markers, aborts)
   2 commit what is done          test_trap_2
   3 restore                      test_trap_3, three tests; done-above with holes: flow/test_traps.py, test_trap_03
   4 skip at intake               test_trap_4, test_defect_5
   5 epochs                       test_trap_5, test_defect_6; at dispatch: flow/test_traps.py, test_trap_05
   6 a stale run                  test_trap_6
   7 revoke                       test_trap_7; under load: test_kafka_torture.py, test_ten_members
   8 lost is not revoked          test_kafka_faults.py, test_trap_8_and_9
   9 commit errors                test_kafka_faults.py, test_trap_9; a coordinator that is killed: test_kafka_nodes.py
                                  commits that age: test_kafka_outages.py, test_idle_progress
  10 too much for a commit        test_trap_10
  11 foreign metadata             test_trap_11
  12 polling while paused         test_trap_12; what arrives while paused: flow/test_traps.py, test_trap_12
  13 a retry blocks its key       test_kafka_handlers.py, test_trap_13; parking: test_kafka.py, TestKafkaFailure
  14 a waiting retry is no load   test_kafka_handlers.py, test_trap_14; as memory: flow/test_traps.py, test_trap_14
  15 dead letters                 test_kafka_handlers.py, test_trap_15; test_defect_4, test_defect_7
  16 tombstones, keys             test_trap_16_and_20; lanes: flow/test_traps.py, test_trap_16
  17 the undecodable              test_kafka_handlers.py, test_trap_17
  18 process workers              test_defect_8, test_defect_9; engines/test_processes.py, engines/test_faults.py
  19 BaseException                test_kafka_handlers.py, test_trap_19; test_defect_10; engines/test_tasks.py
  20 a stable name                test_trap_16_and_20
  21 exactly-once output          not promised: inboxes make effects happen once
  22 messages after a revoke      test_trap_22
"""

import asyncio
import logging
import random
import time

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from onward import Event
from onward.brokers.base import Fenced, Progress, Revoked
from onward.brokers.core.partitioner import partition_of
from onward.brokers.kafka.commits import Commits
from onward.context import current
from onward.event import Partition, new_id
from onward.testing.scenario import OVER_LEASE_S, event
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, run_until, running, staged, until

__all__ = ["harness"]


def test_trap_1_a_compacted_log_is_committed_to_its_end(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            compacted = {"cleanup.policy": "compact", "segment.ms": "50", "min.cleanable.dirty.ratio": "0.01"}
            new = NewTopic(stage.topic, 1, 1, config=compacted)
            harness.admin.create_topics([new])[stage.topic].result(30)
            left: list[int] = []
            broker, deadline = await stage.broker(), time.monotonic() + 30
            while left == [*range(len(left))]:  # until compaction has made holes after the first event, which stays
                assert time.monotonic() < deadline, "nothing was compacted"
                keys = [f"once-{time.monotonic()}", *["often"] * 9]
                await broker.publish([event(stage.topic, key, n) for n, key in enumerate(keys)])
                left = await asyncio.to_thread(_offsets, harness, stage.topic)
            assert left[0] == 0
            app, handled = stage.app(), list[int]()

            @app.handler(stage.topic, group=stage.group)
            async def handle(event: Event) -> None:
                handled.append(current().position)

            await run_until(app, lambda: stage.watermark() == left[-1] + 1)
            assert set(handled) <= set(left), "handled an event that is not in the log"
            assert left[-1] in handled

    play(scene())


def _offsets(harness: KafkaHarness, topic: str) -> list[int]:
    """The offsets in the log, as a plain consumer finds them."""
    conf = {"bootstrap.servers": harness.bootstrap, "group.id": "x", "enable.partition.eof": True}
    consumer = Consumer(conf | {"enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    found: list[int] = []
    while (message := consumer.poll(30)) is not None and message.error() is None:
        found.append(message.offset())
    consumer.close()
    return found


def test_trap_2_only_done_events_are_committed(harness: KafkaHarness) -> None:
    """Twenty events run at once and end in a random order. The commit follows the lowest open one."""

    async def scene() -> None:
        async with staged(harness) as stage:
            app, gates = stage.app(), dict[int, asyncio.Event]()

            @app.handler(stage.topic, group=stage.group)
            async def handle(event: Event) -> None:
                gate = gates[current().position] = asyncio.Event()
                await gate.wait()

            def follows(lowest: int) -> bool:
                committed = stage.watermark() or 0
                assert committed <= lowest, "committed an event that has not ended"
                return committed == lowest

            await stage.publish(20, keys=20)
            async with running(app):
                await until(lambda: len(gates) == 20)
                for position in random.Random(2).sample(range(20), 20):
                    gates.pop(position).set()
                    await until(lambda: follows(min(gates, default=20)))

    play(scene())


def test_trap_3_a_rewind_replays_and_metadata_of_another_offset_does_not_count(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(10)
            member = await stage.member()
            await member.take(10)
            first = member.deliveries[0]
            await member.subscription.settle([Progress(first.partition, first.epoch, 2, [(5, 10)])])
            await member.subscription.close()
            (_, metadata) = stage.committed()[0]
            for offset, text in ((1, metadata), (1, "")):  # a tool copied the text, or reset it
                stage.reset(offset, text)
                again = await stage.member()
                await again.take(9)
                assert again.values == [*range(1, 10)]
                (assigned,) = again.assigned.values()
                assert assigned.stored is not None
                assert not assigned.stored.done_above
                await again.subscription.close()

    play(scene())


def test_trap_3_an_offset_beyond_the_log_skips_no_event(
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


def test_trap_3_events_removed_by_retention_are_reported(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(10)
            member = await stage.member()
            await member.take(10)
            await member.settle(member.deliveries[:2])
            await member.subscription.close()
            place = TopicPartition(stage.topic, 0, 6)
            await asyncio.to_thread(harness.admin.delete_records([place])[TopicPartition(stage.topic, 0)].result, 30)
            again = await stage.member()
            await again.take(4)
            assert again.values == [6, 7, 8, 9]
            assert "positions 2 to 6 were removed by retention" in caplog.text

    with caplog.at_level(logging.WARNING):
        play(scene())


def test_trap_4_events_that_the_metadata_lists_as_done_are_skipped_and_counted(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(10, keys=10)
            member = await stage.member()
            await member.take(10)
            first = member.deliveries[0]
            await member.subscription.settle([Progress(first.partition, first.epoch, 1, [(3, 10)])])
            await member.subscription.close()
            app, handled = stage.app(), list[int]()

            @app.handler(stage.topic, group=stage.group)
            async def handle(event: Event) -> None:
                handled.append(current().position)

            async with running(app):
                await until(lambda: stage.watermark() == 10)
                (reading,) = app.readings()
            assert handled == [1, 2]
            assert (reading.delivered, reading.skipped, reading.done) == (2, 7, 2)

    play(scene())


def test_trap_5_a_partition_assigned_again_has_a_newer_epoch_and_the_older_one_settles_nothing(
    harness: KafkaHarness,
) -> None:
    async def scene() -> None:
        async with staged(harness, max_poll_gap_s=3.0) as stage:
            await stage.publish(3)
            member = await stage.member()
            await member.take(3)
            before = member.progress()
            await asyncio.sleep(4.5)  # it does not receive for too long: the partition is lost, then assigned again
            await member.take(6)
            old, new = member.deliveries[2], member.deliveries[5]
            assert (old.position, new.position) == (2, 2)
            assert new.epoch > old.epoch
            assert await member.subscription.settle(before) == [old.partition]
            assert stage.watermark() == 0, "the settle of a former ownership took effect"
            assert not await member.settle()
            assert stage.watermark() == 3

    play(scene())


def test_trap_6_a_run_that_outlives_its_ownership_blocks_its_key_in_its_process(harness: KafkaHarness) -> None:
    """A partition moves to another member while its handlers run, and comes back while they still run."""

    async def scene() -> None:
        async with staged(harness, partitions=2, revoke_grace_s=0.3) as stage:
            app, ended = stage.app(), asyncio.Event()
            runs: dict[str, list[int]] = {}
            at_once: dict[str, int] = {}
            most = 0

            @app.handler(stage.topic, group=stage.group)
            async def handle(event: Event) -> None:
                nonlocal most
                key = event.key or ""
                runs.setdefault(key, []).append(current().fence or 0)
                at_once[key] = at_once.get(key, 0) + 1
                most = max(most, at_once[key])
                if event.value != b"behind":
                    await ended.wait()
                at_once[key] -= 1

            await stage.publish(8, keys=8)
            async with running(app):
                await until(lambda: len(runs) == 8)
                other = await (await stage.member()).hold(1)
                await other.until(lambda: bool(other.deliveries))
                moved = {each.event.key or "" for each in other.deliveries}
                await other.release(list(other.assigned))
                await other.subscription.close()
                await until(lambda: app.readings()[0].delivered == 8 + len(moved))
                behind = [Event(new_id(), stage.topic, f"behind-{n}", b"behind") for n in range(8)]
                await (await stage.broker()).publish(behind)
                await until(lambda: len(runs) == 16)  # they start after the earlier events, if those may start
                assert not any(len(fences) > 1 for fences in runs.values()), "a key started during its own stale run"
                ended.set()
                await until(lambda: sum((stage.watermark(index) or 0) for index in (0, 1)) == 16)
            assert most == 1
            assert {key for key, fences in runs.items() if len(fences) > 1} == moved
            assert all(fences == sorted(set(fences)) for fences in runs.values()), "a later run has a higher fence"

    play(scene())


def test_trap_7_a_clean_rebalance_repeats_nothing_and_other_partitions_flow_meanwhile(harness: KafkaHarness) -> None:
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
            await asyncio.sleep(OVER_LEASE_S)  # the group waits for the release
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


def test_trap_7_a_partition_revoked_before_it_was_announced_is_given_back_clean(
    harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member's first commits wait in its queue while the partition moves to another member. They must not be sent
    after that: the coordinator would accept them and set the other member's progress back."""
    slow: list[Commits] = []
    work = Commits.work

    def waits(commits: Commits) -> None:
        if not slow:
            slow.append(commits)
        if commits is not slow[0]:
            work(commits)

    monkeypatch.setattr(Commits, "work", waits)

    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            await stage.publish(40, keys=40)
            first = await stage.member()
            await first.until(lambda: bool(slow) and len(slow[0]._queue._orders) == 2)
            second = await (await stage.member()).hold(1)
            await second.until(lambda: len(second.deliveries) > 5)
            assert not await second.settle()
            (partition,) = second.assigned
            assert not second.assigned[partition].unclean, "unclean although no event can have run"
            before = stage.committed()[partition.index]
            monkeypatch.setattr(Commits, "work", work)
            await first.hold(1)
            assert stage.committed()[partition.index] == before, "set back by a member that does not own it"

    play(scene())


def test_trap_7_a_member_that_leaves_during_a_rebalance_delays_no_other_member(harness: KafkaHarness) -> None:
    """Until all members have joined again, the coordinator does not read the requests of the second one. If it did not
    read that this member leaves, the others would wait for a whole session."""

    async def scene() -> None:
        options = {"lease_s": 60.0, "client": {"heartbeat.interval.ms": 300}}
        async with staged(harness, partitions=2, revoke_grace_s=20.0, **options) as stage:
            first = await (await stage.member(yields=False)).hold(2)
            second = await stage.member()
            while not any(isinstance(each, Revoked) for each in first.history):
                await asyncio.gather(first.receive(wait_s=0.1), second.receive(wait_s=0.1))
            third = await stage.member()
            await asyncio.sleep(1.5)  # some heartbeats: all but the first have joined again
            leaving = asyncio.create_task(second.subscription.close())
            await asyncio.sleep(1.0)
            released = time.monotonic()
            await first.release(next(each.partitions for each in first.history if isinstance(each, Revoked)))
            while not third.assigned:
                await asyncio.gather(first.receive(wait_s=0.1), third.receive(wait_s=0.1))
                assert time.monotonic() - released < 30.0
            await leaving

    play(scene())


def test_trap_10_progress_that_does_not_fit_into_a_commit_throttles_its_partition_only(harness: KafkaHarness) -> None:
    """Half of 130,000 positions are done, at random: too many for 4,096 characters."""

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


@pytest.mark.parametrize("metadata", ["", "kafka-streams", "O1junk", "O1\u3400\u3401.x.4", "x" * 4000, "a.b.c"])
def test_trap_11_with_foreign_metadata_nothing_counts_as_done(harness: KafkaHarness, metadata: str) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(5)
            stage.reset(2, metadata)
            member = await stage.member()
            await member.take(3)
            assert member.values == [2, 3, 4]
            assert not await member.settle()
            assert stage.watermark() == 5

    play(scene())


def test_trap_12_polling_goes_on_while_everything_is_paused_and_handlers_run_long(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(3)
            member = await (await stage.member()).hold(1)
            await member.take(3)
            await member.subscription.pause(list(member.assigned))
            await asyncio.sleep(OVER_LEASE_S)
            assert not await member.settle()
            assert not [each for each in member.history if isinstance(each, Fenced)]

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
            await asyncio.to_thread(producer.flush, 30)
            await member.take(3)
            tombstone, empty, keyless = (each.event for each in member.deliveries)
            assert (tombstone.value, tombstone.time, dict(tombstone.headers)) == (None, 1.234, {"n": "", "b": "\\xff"})
            assert (empty.value, empty.key, keyless.key) == (b"", "", None)
            assert tombstone.id == f"{stage.topic}/0/0", "the same in every delivery"

    play(scene())


def test_trap_22_events_read_ahead_of_a_revoked_partition_are_dropped_and_not_done(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            first = await (await stage.member(yields=False)).hold(2)
            await stage.publish(400, keys=40)
            while len({each.partition for each in first.deliveries}) < 2:
                await first.receive(limit=1)  # the rest is read ahead, and waits
            second = await stage.member()
            while not any(isinstance(each, Revoked) for each in first.history):
                await asyncio.gather(first.receive(limit=0, wait_s=0.1), second.receive(wait_s=0.1))
            (revoked,) = [each for each in first.history if isinstance(each, Revoked)]
            (partition,) = revoked.partitions
            before = len(first.deliveries)
            for _ in range(5):
                await first.receive()
            assert partition not in {each.partition for each in first.deliveries[before:]}
            await first.release([partition])
            await second.hold(1)
            there = [n for n in range(400) if partition_of(f"key-{n % 40}", 2) == partition.index]
            await second.take(len(there))
            assert second.values == there, "an event counted as done although no member received it"

    play(scene())
