"""Settling on Redis when a part of a call cannot be carried out."""

import pytest

from onward.brokers.base import Filter, State
from onward.errors import AsideError
from onward.event import Partition
from onward.testing.aside import make_record
from onward.testing.scenario import event
from tests.brokers.redis_harness import RedisHarness, harness
from tests.brokers.redis_stage import play, staged
from tests.servers.redis import RedisServer

__all__ = ["harness"]


def test_records_of_a_partition_that_must_be_settled_again_do_not_count_as_stored_beside_refused_ones(
    harness: RedisHarness, redis_server: RedisServer
) -> None:
    """One partition answers that the server was replaced, the other refuses its records: nothing was done in both."""

    async def scene() -> None:
        async with staged(redis_server, partitions=2, lease_s=30.0) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, f"key-{n}", n) for n in range(20)])
            member = await (await stage.member(broker)).hold(2)
            await member.take(20)
            first = {each.partition: each for each in reversed(member.deliveries)}
            large = {"blob": "x" * 5_000}
            records = [
                make_record(
                    each,
                    member.assigned[partition].log_id,
                    State.DEAD,
                    event=event(stage.topic, "k", 1, headers=large if partition.index else {}),
                )
                for partition, each in first.items()
            ]
            stage.client.hset(stage.keys.group(stage.group), "inc", "of another server")
            with harness.refuse_aside(larger_than=4_000), pytest.raises(AsideError) as raised:
                await member.subscription.settle(member.progress(), aside=records)
            assert set(raised.value.partitions) == {Partition(stage.topic, 0), Partition(stage.topic, 1)}
            assert not (await broker.aside(stage.group).scan(Filter(), None, 10)).records

    play(scene())
