"""Ten defects of another Kafka consumer that handles keys in parallel, by number, tested on a real broker."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer, TopicPartition

from onward import Event, Onward, Retry
from onward.context import current
from onward.event import new_id
from onward.testing.scenario import event, whole_lines
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import Stage, play, run_until, staged, until

__all__ = ["harness"]


def test_defect_1_a_single_attempt_is_made(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app, handled = stage.app(), list[bytes]()

            @app.handler(stage.topic, group=stage.group, retry=Retry(attempts=1))
            async def handle(event: Event) -> None:
                handled.append(event.value or b"")

            await stage.publish(100, keys=10)
            await run_until(app, lambda: len(handled) >= 100)
            assert sorted(handled) == sorted(str(n).encode() for n in range(100))
            assert stage.watermark() == 100

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
            assert stage.watermark() == 20

    play(scene())


def test_defect_3_transaction_markers_do_not_stop_progress(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, "k", 0)])
            await asyncio.to_thread(_transactions, harness, stage.topic, 10)
            app, handled = stage.app(), list[bytes]()

            @app.handler(stage.topic, group=stage.group)
            async def handle(event: Event) -> None:
                handled.append(event.value or b"")

            await run_until(app, lambda: stage.watermark() == 23)
            assert len(handled) == 11, "one before, ten in transactions, none of the aborted transaction"
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
    producer.flush(30)
    producer.abort_transaction(30)


def test_defect_4_a_dead_letter_that_cannot_be_stored_stays_open(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app, begun, refused = stage.app(), list[bytes](), asyncio.Event()

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
                await until(lambda: "dead events cannot be stored" in caplog.text)
                assert stage.watermark() == 0, "committed an event that is neither done nor stored"
            await until(lambda: stage.watermark() == 5)
            app.stop()
            await running

    play(scene())


def test_defect_5_events_done_above_the_watermark_do_not_run_again(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, drain_timeout_s=0.2) as stage:
            await stage.publish(200, keys=200)
            handled: list[bytes] = []
            blocked = asyncio.Event()

            def make(*, block: bool) -> Onward:
                app = stage.app()

                @app.handler(stage.topic, group=stage.group, concurrency=300)
                async def handle(event: Event) -> None:
                    if event.value == b"0" and block:
                        await blocked.wait()
                    handled.append(event.value or b"")

                return app

            await run_until(make(block=True), lambda: len(handled) == 199 and bool(stage.committed()[0][1]))
            assert stage.watermark() == 0
            await run_until(make(block=False), lambda: stage.watermark() == 200)
            assert len(handled) == 200, "events that were done ran again"

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


def in_a_process(event: Event) -> None:
    """Die or hang at the first attempt if a header says so; otherwise write down the event."""
    if current().attempt == 1 and (first := event.headers.get("first")):
        os.kill(os.getpid(), signal.SIGKILL) if first == "die" else time.sleep(60)
    with open(event.headers["effects"], "a") as effects:
        effects.write(f"{event.key} {len(event.value or b'')} {event.headers['n']}\n")


class Workshop:
    """Events for `in_a_process`. Event 10 dies or hangs at its first attempt, if `first` says so."""

    def __init__(self, stage: Stage, folder: Path, count: int, *, first: str = "", size: int = 10) -> None:
        self.effects = folder / "effects"
        self.count = count
        self.events = [
            Event(
                new_id(),
                stage.topic,
                f"k{n % 5}",
                b"x" * size,
                {"effects": str(self.effects), "n": str(n)} | ({"first": first} if first and n == 10 else {}),
            )
            for n in range(count)
        ]

    def handled(self) -> list[int]:
        """The numbers of the handled events, in their order."""
        return [int(line.split()[2]) for line in whole_lines(self.effects)]


async def at_work(stage: Stage, workshop: Workshop, **options: Any) -> None:
    """Run an application until all events are committed."""
    app = stage.app()
    app.handler(stage.topic, group=stage.group, engine="processes", workers=2, **options)(in_a_process)
    await (await stage.broker()).publish(workshop.events)
    await run_until(app, lambda: stage.watermark() == workshop.count)


def test_defect_7_a_timeout_in_a_process_makes_one_dead_letter_and_all_other_events_are_handled(
    harness: KafkaHarness, tmp_path: Path
) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            workshop = Workshop(stage, tmp_path, 40, first="hang")
            await at_work(stage, workshop, timeout_s=4.0, retry=Retry(attempts=1))
            assert sorted(workshop.handled()) == [n for n in range(40) if n != 10]
            (letter,) = await stage.letters()
            assert letter.failure is not None
            assert (letter.position, letter.event.id, letter.failure.reason) == (
                10,
                workshop.events[10].id,
                "exhausted",
            )
            assert "Timeout" in letter.failure.error

    play(scene())


def test_defect_8_after_a_worker_is_killed_all_events_are_handled_in_order(
    harness: KafkaHarness, tmp_path: Path
) -> None:
    """Trap 18 too: another worker runs the events that the dead one had not started, in order."""

    async def scene() -> None:
        async with staged(harness) as stage:
            workshop = Workshop(stage, tmp_path, 40, first="die")
            await at_work(stage, workshop, concurrency=20)
            done = workshop.handled()
            assert sorted(done) == [*range(40)], "each event takes effect once: only the run that died is repeated"
            for key in range(5):
                assert [n for n in done if n % 5 == key] == [*range(key, 40, 5)]
            assert not await stage.letters()

    play(scene())


def test_defect_9_batches_larger_than_any_pipe_are_handled(harness: KafkaHarness, tmp_path: Path) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            workshop = Workshop(stage, tmp_path, 64, size=400_000)
            await at_work(stage, workshop, concurrency=64)
            assert sorted(workshop.handled()) == [*range(64)]

    play(scene())


def test_defect_10_a_handler_that_raises_cancelled_error_is_resolved(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app, calls = stage.app(), []

            @app.handler(stage.topic, group=stage.group, retry=Retry(attempts=2, first_delay_s=0.01))
            async def handle(event: Event) -> None:
                calls.append(event.value)
                if calls.count(event.value) == 1:
                    raise asyncio.CancelledError

            await stage.publish(3)
            await run_until(app, lambda: stage.watermark() == 3)

    play(scene())
