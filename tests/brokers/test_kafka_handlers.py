"""Handlers that fail on a Kafka consumer: the traps of failing, by number (see test_kafka_traps.py)."""

import asyncio

import pytest
from confluent_kafka import Producer

from onward import Event, Retry
from onward.event import new_id
from onward.testing.scenario import event
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, run_until, running, staged, until

__all__ = ["harness"]


def test_trap_13_a_failed_event_blocks_its_key_and_nothing_else(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app, tried = stage.app(), list[tuple[str, bytes]]()

            @app.handler(stage.topic, group=stage.group, retry=Retry(attempts=3, first_delay_s=2.0, factor=1, jitter=0))
            async def handle(event: Event) -> None:
                tried.append((event.key or "", event.value or b""))
                if event.value == b"0" and tried.count((event.key or "", b"0")) < 3:
                    raise ValueError("not yet")

            broker = await stage.broker()
            await broker.publish([event(stage.topic, "bad", n) for n in range(3)])
            await broker.publish([event(stage.topic, "good", n) for n in range(1, 11)])
            await run_until(app, lambda: stage.watermark() == 13)
            assert [value for key, value in tried if key == "bad"] == [b"0", b"0", b"0", b"1", b"2"]
            second = [at for at, each in enumerate(tried) if each == ("bad", b"0")][1]
            assert len([key for key, _ in tried[:second] if key == "good"]) == 10, "other keys waited too"

    play(scene())


def test_trap_14_a_retry_that_waits_uses_no_slot(harness: KafkaHarness) -> None:
    """The only slot is free while the failed event waits, so all other events end meanwhile."""

    async def scene() -> None:
        async with staged(harness) as stage:
            app, done = stage.app(), list[bytes]()
            retry = Retry(attempts=2, first_delay_s=20.0, jitter=0)  # longer than the test, too short for parking

            @app.handler(stage.topic, group=stage.group, concurrency=1, retry=retry)
            async def handle(event: Event) -> None:
                if event.value == b"0":
                    raise ValueError("later")
                done.append(event.value or b"")

            await stage.publish(50, keys=50)
            async with running(app):
                await until(lambda: len(done) == 49, within_s=15.0)
                (reading,) = app.readings()
                assert (reading.busy, reading.retried) == (0, 1)
                assert (stage.watermark() or 0) == 0

    play(scene())


def test_trap_15_a_dead_letter_is_complete_and_only_its_key_waits_until_it_is_stored(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app, begun, refused, done = stage.app(), asyncio.Event(), asyncio.Event(), list[str]()

            @app.handler(stage.topic, group=stage.group, timeout_s=8.0, retry=Retry(attempts=1))
            async def handle(event: Event) -> None:
                begun.set()
                await refused.wait()
                if event.type == "Hangs":
                    await asyncio.sleep(60)
                done.append(f"{event.key}-{(event.value or b'').decode()}")

            bad = Event(new_id(), stage.topic, "bad", b"\x00\xff", {"trace": "t"}, "Hangs", 1_700_000_000.5)
            broker = await stage.broker()
            await broker.publish(
                [bad, event(stage.topic, "bad", 1), *[event(stage.topic, "good", n) for n in range(5)]]
            )
            async with running(app):
                await begun.wait()
                with harness.refuse_aside():
                    refused.set()
                    await until(lambda: "dead events cannot be stored" in caplog.text)
                    await until(lambda: len(done) == 5)
                    assert done == [f"good-{n}" for n in range(5)], "the bad key went on, or the other keys did not"
                    assert not stage.watermark()
                await until(lambda: stage.watermark() == 7)
            assert done[-1] == "bad-1"
            (letter,) = await stage.letters()
            assert letter.event.whole() == bad, "the dead letter is not the published event"
            assert letter.failure is not None
            assert "Timeout" in letter.failure.error

    play(scene())


def test_trap_17_an_undecodable_event_is_a_dead_letter_with_its_raw_bytes(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(0)
            producer = Producer({"bootstrap.servers": harness.bootstrap})
            for value in (b'{"n": 1}', b"\xff{not json", b'{"n": 3}'):
                producer.produce(stage.topic, value, key=b"k")
            await asyncio.to_thread(producer.flush, 30)
            app, handled = stage.app(), list[int]()

            @app.handler(stage.topic, group=stage.group, retry=Retry(attempts=5, first_delay_s=60.0))
            async def handle(value: dict[str, int]) -> None:
                handled.append(value["n"])

            await run_until(app, lambda: stage.watermark() == 3)
            assert handled == [1, 3]
            (letter,) = await stage.letters()
            assert (letter.position, letter.event.key, letter.event.value) == (1, "k", b"\xff{not json")
            assert letter.failure is not None
            assert (letter.failure.reason, letter.failure.attempts) == ("undecodable", 1)

    play(scene())


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=lambda each: type(each).__name__
)
def test_trap_19_any_exception_of_a_handler_resolves_its_event(harness: KafkaHarness, error: BaseException) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            app, calls = stage.app(), list[bytes]()

            @app.handler(stage.topic, group=stage.group, concurrency=1, retry=Retry(attempts=2, first_delay_s=0.01))
            async def handle(event: Event) -> None:
                calls.append(event.value or b"")
                if event.value == b"0" or calls.count(event.value or b"") == 1:
                    raise error

            await stage.publish(3)
            await run_until(app, lambda: stage.watermark() == 3)
            assert calls == [b"0", b"0", b"1", b"1", b"2", b"2"], "its slot is free and its key goes on"
            assert [letter.position for letter in await stage.letters()] == [0]

    play(scene())
