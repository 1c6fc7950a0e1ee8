"""What a partition needs to flow again after pressure, rebalances and silence."""

import asyncio
from typing import cast

from onward.brokers.kafka.reader import _AHEAD
from onward.brokers.kafka.subscription import KafkaSubscription
from onward.brokers.partition import partition_of
from onward.testing.harness import Member
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, staged

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
