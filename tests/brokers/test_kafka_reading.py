"""What a partition needs to flow again after pressure, rebalances and silence."""

import asyncio
from concurrent.futures import Future
from typing import Any, cast

import pytest
from confluent_kafka.admin import OffsetSpec

from onward.brokers.kafka import origins
from onward.brokers.kafka.reader import _AHEAD
from onward.brokers.kafka.subscription import KafkaSubscription
from onward.brokers.partition import partition_of
from onward.errors import BrokerError
from onward.event import Partition
from onward.testing.harness import Member
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, staged
from tests.servers.kafka import KafkaServer

__all__ = ["harness"]


def _resting(member: Member) -> int:
    """How many partitions its reader has stopped to fetch."""
    return len(cast("KafkaSubscription", member.subscription)._reader._stopped)


def test_a_partition_that_rested_is_read_when_it_comes_back(harness: KafkaHarness) -> None:
    """Paused with enough read ahead, its fetching stops; that must end with the ownership it was stopped for."""

    async def scene() -> None:
        async with staged(harness, partitions=2) as stage:
            count = 6 * _AHEAD
            await stage.publish(count, keys=20)
            first = await (await stage.member()).hold(2)
            first.handled = 0  # nothing is settled: all of it comes again
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


def test_lag_that_cannot_be_told_is_a_broker_error_and_is_told_again(
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


def test_a_leader_that_never_answers_is_a_broker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def list_offsets(self, asked: dict[Any, Any], **_: Any) -> dict[Any, "Future[Any]"]:
            return {place: Future() for place in asked}

    monkeypatch.setattr(origins, "_ASK_S", 0.01)
    with pytest.raises(BrokerError, match="no answer in time"):
        origins.offsets(Silent(), [Partition("t", 0)], OffsetSpec.latest())
