"""Onward together with other Kafka clients, and with Kafka's other ways to share partitions."""

import asyncio
import threading
import time

import msgspec
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from onward import Event, settings
from onward.brokers import open_broker
from onward.brokers.core.partitioner import partition_of
from onward.errors import PublishError
from onward.event import new_id
from onward.testing.scenario import event, first_times
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, staged, until
from tests.servers.kafka import KafkaServer

__all__ = ["harness"]


def test_the_partitioner_agrees_with_other_clients(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=8) as stage:
            await stage.publish(200, keys=200)
            producer = Producer({"bootstrap.servers": harness.bootstrap, "partitioner": "murmur2_random"})
            for n in range(200):
                producer.produce(stage.topic, b"%d" % n, key=f"key-{n}".encode())
            await asyncio.to_thread(producer.flush, 30)
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
            message = await asyncio.to_thread(consumer.poll, 30)
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
    """One event in the middle is too large for the topic, whichever batch it is sent in."""

    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(1)
            await asyncio.to_thread(harness.limit, stage.topic, "20000")
            broker = await stage.broker(client={"batch.size": 2000})
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


def test_contract_13_a_refused_event_stops_later_events_of_its_key_and_nothing_else(harness: KafkaHarness) -> None:
    """The broker refuses one event alone: earlier events are accepted, later ones of its key are not."""

    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            here, there = (next(f"k{n}" for n in range(99) if partition_of(f"k{n}", 2) == index) for index in (0, 1))
            broker = await stage.broker()
            call = [event(stage.topic, key, n) for n in range(5) for key in (here, there)]
            bad = call[4]  # the third of its key
            await broker.publish([event(stage.topic, here, 99)])
            with harness.refuse(bad), pytest.raises(PublishError) as raised:
                await broker.publish(call)
            assert [each.id for each in raised.value.refused] == [each.id for each in call[4:] if each.key == here]
            elsewhere = [each.id for each in call if each.key == there]  # their answers may be lost with the producer
            unknown = [each.id for each in raised.value.unknown]
            assert unknown == elsewhere[len(elsewhere) - len(unknown) :]
            await broker.publish([*raised.value.refused, *raised.value.unknown])
            member = await stage.member()
            await member.until(lambda: len({each.event.id for each in member.deliveries}) == 11)
            got = [(each.event.key or "", int(each.event.value or b"")) for each in member.deliveries]
            assert first_times(got) == {here: [99, 0, 1, 2, 3, 4], there: [0, 1, 2, 3, 4]}
            assert [n for key, n in got if key == here] == [99, 0, 1, 2, 3, 4], "a refused event was stored"

    play(scene())


def test_an_event_that_is_too_large_fails_no_other_event_sent_with_it(harness: KafkaHarness) -> None:
    """Many calls are sent together. Each call fails only because of its own events, whichever batch they are in."""

    async def scene() -> None:
        async with staged(harness, partitions=3) as stage:
            await stage.publish(1)
            await asyncio.to_thread(harness.limit, stage.topic, "20000")
            broker = await stage.broker()
            calls = [[event(stage.topic, f"key-{n % 40}", 10_000 + n)] for n in range(400)]
            calls += [[Event(new_id(), stage.topic, None, b"10")] for _ in range(20)]
            bad = [41, 130, 133, 410]
            for n in bad:
                calls[n] = [msgspec.structs.replace(calls[n][0], value=b"x" * 30_000)]
            answers = await asyncio.gather(*(broker.publish(call) for call in calls), return_exceptions=True)
            keys = {41: 1, 130: 10, 133: 13}
            behind = {n for first, key in keys.items() for n in range(first + 1, 400) if n % 40 == key}
            assert {n for n, answer in enumerate(answers) if answer is not None} == {*bad, *behind}
            for n in bad:
                (each,) = calls[n]
                assert f"event {each.id} of {each.size} bytes is too large for topic {stage.topic}" in str(answers[n])
            assert all("an earlier event of the same key" in str(answers[n]) for n in behind)
            assert all(isinstance(each, PublishError) and not each.unknown for each in answers if each is not None)
            member = await stage.member()
            accepted = [call[0] for n, call in enumerate(calls) if answers[n] is None]
            await member.take(1 + len(accepted))
            await member.quiet()
            got = [each.event for each in member.deliveries]
            assert len(got) == 1 + len(accepted), "an event was stored twice"
            for key in {each.key for each in accepted} - {None}:
                assert [each.id for each in got if each.key == key and each.value != b"0"] == [
                    each.id for each in accepted if each.key == key
                ]

    play(scene())


def test_only_the_events_that_are_too_large_are_refused(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            await stage.publish(1)
            await asyncio.to_thread(harness.limit, stage.topic, "20000")
            broker = await stage.broker()
            call = [event(stage.topic, f"k{n}", n) for n in range(1_000)]
            bad = range(0, 1_000, 10)
            for n in bad:
                call[n] = Event(new_id(), stage.topic, f"k{n}", b"x" * 21_000)
            with pytest.raises(PublishError, match=r"100 events were not accepted: .* and 95 more causes") as raised:
                await broker.publish(call)
            assert [each.id for each in raised.value.refused] == [call[n].id for n in bad]
            assert not raised.value.unknown
            assert stage.end() + stage.end(1) == 901

    play(scene())


def test_an_event_stored_without_an_answer_is_unknown_and_one_never_sent_is_refused(
    harness: KafkaHarness, kafka_server: KafkaServer
) -> None:
    """The first waits to be sent again when its time ends. The second is published while the broker is unreachable."""

    async def scene() -> None:
        with kafka_server.proxy() as proxy:
            async with staged(harness) as stage:
                await stage.publish(1)
                broker = await open_broker(settings.load(proxy.url, **stage.options, publish_timeout_s=4.0))
                try:
                    await broker.publish([event(stage.topic, "a", 1)])
                    stored = [event(stage.topic, "a", n) for n in range(2, 5)]
                    proxy.mute()
                    publishing = asyncio.create_task(broker.publish(stored))
                    await until(lambda: stage.end() == 5)
                    proxy.cut()
                    with pytest.raises(PublishError, match="no answer from Kafka") as first:
                        await publishing
                    with pytest.raises(PublishError, match="no answer from Kafka") as second:
                        await broker.publish([event(stage.topic, "a", 5)])
                    proxy.mend()
                finally:
                    await broker.close()
                assert [each.id for each in first.value.unknown] == [each.id for each in stored]
                assert not first.value.refused
                assert len(second.value.refused) == 1
                assert not second.value.unknown
                assert stage.end() == 5

    play(scene())


def test_the_fence_of_a_relay_is_not_compared(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            broker = await stage.broker()
            assert not broker.features.fenced_publish
            for n, fence in enumerate((4, 3)):
                await broker.publish([event(stage.topic, "a", n)], relay=("outbox/0", fence))
            assert stage.end() == 2

    play(scene())


@pytest.mark.parametrize(
    "client",
    [
        {"partition.assignment.strategy": "range"},
        {"partition.assignment.strategy": "roundrobin"},
        {"group.protocol": "consumer"},
    ],
    ids=["range", "roundrobin", "kip-848"],
)
def test_other_ways_to_share_partitions(harness: KafkaHarness, client: dict[str, str]) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=4, client=client) as stage:
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
            other = await (await stage.member(await stage.broker(client={"group.instance.id": "one"}))).hold(2)
            static = await stage.member(await stage.broker(client={"group.instance.id": "two"}))
            while len(static.assigned) < 1:
                await asyncio.gather(other.receive(wait_s=0.1), static.receive(wait_s=0.1))
            mine, theirs = set(static.assigned), dict(other.assigned)
            await static.release(list(static.assigned))
            await static.subscription.close()
            back = await stage.member(await stage.broker(client={"group.instance.id": "two"}))
            while not back.assigned:
                await asyncio.gather(other.receive(wait_s=0.1), back.receive(wait_s=0.1))
            assert set(back.assigned) == mine
            assert other.assigned == theirs, "there was a rebalance"

    play(scene())


def test_statistics_of_the_producer_do_not_pile_up_while_nothing_is_published(
    harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    monkeypatch.setattr("onward.brokers.kafka.producer_thread.INTERVAL_S", 0.1)
    monkeypatch.setattr("onward.brokers.kafka.sent_counts.SentCounts.update", lambda _, text: reports.append(text))

    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(1)
            before = len(reports)
            await until(lambda: len(reports) > before + 5)

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
