"""A client that has stopped reading, without an error, although the log has more: librdkafka #5430 and #5593."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from onward.brokers.kafka import aside_follower, stall_check
from onward.brokers.kafka.aside_topics import topic_name
from onward.brokers.kafka.broker import KafkaBroker
from onward.brokers.kafka.stall_check import STALL_S, StallCheck
from onward.brokers.kafka.subscription import KafkaSubscription
from onward.errors import BrokerError
from onward.testing.aside import GROUP, Owner, scanned
from onward.testing.scenario import Kit, event, scenario
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, staged

__all__ = ["harness"]

PLACE = ("orders", 0)


class Log:
    """An admin client that reports this end of the log; None: the leader does not answer."""

    def __init__(self, end: int | Exception | None) -> None:
        self._end = end

    def list_offsets(self, asked: dict[TopicPartition, Any], **_: Any) -> dict[TopicPartition, "Future[Any]"]:
        futures: dict[TopicPartition, Future[Any]] = {place: Future() for place in asked}
        for future in futures.values():
            if isinstance(self._end, Exception):
                future.set_exception(self._end)
            elif self._end is not None:
                future.set_result(SimpleNamespace(offset=self._end))
        return futures


def read(position: int, *, events: int = 0, flows: bool = True) -> Any:
    return SimpleNamespace(ahead=SimpleNamespace(position=position, events=events), flows=flows)


def test_a_partition_that_is_not_read_although_the_log_has_more_is_stuck() -> None:
    hold = read(7)
    look = StallCheck(Log(9)).look
    assert look({PLACE: hold}, 100.0) == []
    assert look({PLACE: hold}, 100.0 + STALL_S / 2) == []
    assert look({PLACE: hold}, 100.0 + STALL_S) == [PLACE]


@pytest.mark.parametrize(
    "end", [7, None, KafkaException(KafkaError(KafkaError._TIMED_OUT))], ids=["read", "unknown", "failed"]
)
def test_a_partition_that_is_read_to_its_end_or_whose_end_is_unknown_is_not_stuck(end: int | Exception | None) -> None:
    hold = read(7)
    look = StallCheck(Log(end)).look
    assert look({PLACE: hold}, 100.0) == look({PLACE: hold}, 100.0 + STALL_S) == []


@pytest.mark.parametrize("now", [read(8), read(7, events=1), read(7, flows=False)], ids=["read", "full", "paused"])
def test_a_partition_that_is_read_or_need_not_be_read_is_not_stuck(now: Any) -> None:
    hold = read(7)
    look = StallCheck(Log(9)).look
    look({PLACE: hold}, 100.0)
    hold.__dict__.update(now.__dict__)
    assert look({PLACE: hold}, 100.0 + STALL_S) == []


def test_the_check_starts_over_after_a_rest_and_for_another_ownership() -> None:
    hold, watch = read(7), StallCheck(Log(9))
    watch.look({PLACE: hold}, 100.0)
    watch.rest()
    assert watch.look({PLACE: hold}, 100.0 + STALL_S) == []
    assert watch.look({PLACE: read(7)}, 100.0 + 2 * STALL_S) == []


def test_a_reader_that_has_stopped_is_replaced(harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client behaves as in those defects: it fetches nothing from one partition, although it should."""
    monkeypatch.setattr(stall_check, "STALL_S", 1.0)

    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(2)
            assert isinstance(member.subscription, KafkaSubscription)
            await broker.publish([event(stage.topic, f"key-{n}", 0) for n in range(20)])
            await member.take(20)
            first = member.subscription._reader._consumer
            first.pause([TopicPartition(stage.topic, 1)])
            await broker.publish([event(stage.topic, f"key-{n}", 1) for n in range(20)])
            await member.take(40)
            assert member.subscription._reader._consumer is not first
            got = [(each.event.key, each.event.value) for each in member.deliveries]
            assert sorted(got) == sorted((f"key-{n}", b"%d" % turn) for n in range(20) for turn in range(2))

    play(scene())


class TestAside:
    @scenario(partitions=1)
    async def test_an_aside_that_cannot_be_read_further_is_read_with_a_new_client(self, kit: Kit) -> None:
        owner, other = await Owner.of(kit, 6), await kit.broker(partitions=1)
        assert isinstance(other, KafkaBroker)
        await owner.set_aside([owner.record(0)], 1)
        assert await scanned(other) == [owner.record(0)]
        follower = other._aside_log(GROUP)._follower
        assert follower._consumer is not None
        follower._consumer.pause([TopicPartition(topic_name(GROUP, kit.topic), 0)])
        await owner.set_aside([owner.record(1)], 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(aside_follower, "_CATCH_UP_S", 1.0)
            with pytest.raises(BrokerError, match="could not be read to its end"):
                await scanned(other)
        assert await scanned(other) == [owner.record(0), owner.record(1)]
