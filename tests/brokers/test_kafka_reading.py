"""Partitions are read again after pressure, rebalances and lost answers. Topics with small limits accept events."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException
from confluent_kafka.admin import OffsetSpec

from onward import Event
from onward.brokers.core.partitioner import partition_of
from onward.brokers.kafka import log_offsets
from onward.brokers.kafka.reader import _AHEAD
from onward.brokers.kafka.subscription import KafkaSubscription
from onward.errors import BrokerError, PublishError
from onward.event import Partition, new_id
from onward.testing.scenario import Member
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, staged
from tests.servers.kafka import KafkaServer

__all__ = ["harness"]


def _resting(member: Member) -> int:
    """How many partitions its reader has stopped fetching."""
    return len(cast("KafkaSubscription", member.subscription)._reader._stopped)


def test_a_partition_whose_fetching_stopped_is_read_when_it_is_assigned_again(harness: KafkaHarness) -> None:
    """The reader stops fetching a paused partition that has enough events. This must end with the ownership."""

    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            count = 6 * _AHEAD
            await stage.publish(count, keys=20)
            first = await (await stage.member()).hold(2)
            first.handled = 0  # nothing is settled, so all events are delivered again
            await first.subscription.pause(list(first.assigned))
            await first.until(lambda: _resting(first) == 2)
            second = await stage.member()
            while len(second.assigned) < 1 or len(first.assigned) != 1:
                await asyncio.gather(first.receive(wait_s=0.1), second.receive(wait_s=0.1, limit=0))
            (moved,) = second.assigned
            await second.subscription.close()
            await first.hold(2)
            epoch = first.assigned[moved].epoch
            all_of_it = [n for n in range(count) if partition_of(f"key-{n % 20}", 2) == moved.index]

            def read() -> list[int]:
                again = [each for each in first.deliveries if (each.partition, each.epoch) == (moved, epoch)]
                return [int(each.event.value or b"") for each in again]

            await first.until(lambda: len(read()) >= len(all_of_it))
            assert read() == all_of_it

    play(scene())


def test_events_are_accepted_by_a_topic_with_a_limit_below_our_batch_size(harness: KafkaHarness) -> None:
    """Each event fits, but a whole batch does not: the batches get smaller until they fit. Meanwhile the answers for
    other partitions are collected, so that none of their events is unknown."""

    async def scene() -> None:
        async with staged(harness, partitions=2, publish_timeout_s=8.0) as stage:
            await stage.publish(1)
            await asyncio.to_thread(harness.limit, stage.topic, "50000")
            broker = await stage.broker()
            left = events = [Event(new_id(), stage.topic, f"k{n % 4}", b"y" * 900) for n in range(400)]
            doubted: list[Event] = []
            for _ in range(5):
                try:
                    await broker.publish(left)
                    break
                except PublishError as error:
                    doubted += error.unknown
                    failed = {each.id for each in error.refused}
                    left = [each for each in left if each.id in failed]
            else:
                pytest.fail(f"{len(left)} events are still not accepted")
            assert not doubted
            member = await stage.member()
            await member.take(401)
            got = [each.event for each in member.deliveries if each.event.value != b"0"]
            for key in ("k0", "k1", "k2", "k3"):
                assert [each.id for each in got if each.key == key] == [each.id for each in events if each.key == key]

    play(scene())


def test_unknown_lag_is_a_broker_error_until_the_leader_answers_again(
    harness: KafkaHarness, kafka_server: KafkaServer
) -> None:
    async def scene() -> None:
        async with staged(harness, lease_s=10.0) as stage:
            await stage.publish(5)
            member = await (await stage.member()).hold(1)
            kafka_server.pause()
            with pytest.raises(BrokerError):
                await member.subscription.lag()
            kafka_server.resume()
            await member.take(5)
            lag = await member.subscription.lag()
            assert [each.undelivered for each in lag.values()] == [0]

    play(scene())


class Silent:
    """An admin client whose leaders never answer. It looks for new leaders only when metadata is requested."""

    def __init__(self, answer: int | None) -> None:
        self._answer = answer  # the offset that librdkafka reports instead
        self.looked = 0

    def list_offsets(self, asked: dict[Any, Any], **_: Any) -> dict[Any, "Future[Any]"]:
        futures: dict[Any, Future[Any]] = {place: Future() for place in asked}
        for future in futures.values():
            if self._answer is not None:
                future.set_result(SimpleNamespace(offset=self._answer))
        return futures

    def list_topics(self, timeout: float) -> None:
        self.looked += 1
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # no other node answers either


@pytest.mark.parametrize(
    ("answer", "why"), [(None, "no answer in time"), (OFFSET_INVALID, "the leader of t/0 does not answer")]
)
def test_a_leader_that_never_answers_is_a_broker_error(
    monkeypatch: pytest.MonkeyPatch, answer: int | None, why: str
) -> None:
    admin = Silent(answer)
    monkeypatch.setattr(log_offsets, "ASK_S", 0.01)
    with pytest.raises(BrokerError, match=why):
        log_offsets.offsets(admin, [Partition("t", 0)], OffsetSpec.latest())
    assert admin.looked, "the next request would go to the same leader"
