"""Streams of other programs as topics: reading them, and a real consumer group that shows what is open."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from onward.brokers.base import Progress, Tries
from onward.brokers.redis import Streams
from onward.brokers.redis.keys import PartitionKeys
from onward.brokers.redis.positions import position_of
from onward.errors import PartitionsDiffer
from onward.event import Delivery
from onward.testing.scenario import Member
from tests.brokers.redis_stage import Stage, play, staged
from tests.servers.redis import RedisServer


class StreamStage:
    """A topic on streams that a raw client writes to: the other program."""

    def __init__(self, stage: Stage, streams: Streams) -> None:
        self.stage = stage
        self.streams = streams
        self.client: Any = stage.client
        stage.options["streams"] = {stage.topic: streams}

    @property
    def stream(self) -> str:
        return self.streams.stream(0)

    @property
    def keys(self) -> PartitionKeys:
        return PartitionKeys.foreign(self.stream)

    def add(self, *jobs: int, index: int = 0, **fields: Any) -> list[str]:
        """Entries as the other program writes them. Returns their ids."""
        stream = self.streams.stream(index)
        return [self.client.xadd(stream, {"job_id": f"job-{n}", "n": n, **fields}).decode() for n in jobs]

    def pending(self) -> dict[str, int]:
        """By id of each pending entry: its delivery count."""
        rows = self.client.xpending_range(self.stream, self.stage.group, "-", "+", 10_000)
        assert {row["consumer"] for row in rows} <= {b"onward"}
        return {row["message_id"].decode(): row["times_delivered"] for row in rows}

    def delivered(self) -> str:
        """The group's last-delivered id."""
        (group,) = self.client.xinfo_groups(self.stream)
        assert group["name"].decode() == self.stage.group
        return str(group["last-delivered-id"].decode())

    async def member(self, shards: int = 1, **options: Any) -> Member:
        return await (await self.stage.member(**options)).hold(shards)


def ids(deliveries: list[Delivery]) -> list[str]:
    return [delivery.event.headers["onward-stream-id"] for delivery in deliveries]


@asynccontextmanager
async def streaming(
    server: RedisServer, *, mapping: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[StreamStage]:
    async with staged(server, **options) as stage:
        yield StreamStage(stage, Streams(f"other-{uuid4().hex[:8]}:events", **{"key": "job_id", **(mapping or {})}))


def test_entries_of_other_programs_are_events(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server, mapping={"shards": 4}) as stage:
            for index in range(4):
                stage.add(index, index + 4, index=index)
            member = await stage.member(4)
            await member.take(8)
            for index in range(4):
                mine = [each for each in member.deliveries if each.partition.index == index]
                assert [each.event.key for each in mine] == [f"job-{index}", f"job-{index + 4}"]
                assert [json.loads(each.event.value or b"") for each in mine] == [
                    {"job_id": f"job-{n}", "n": str(n)} for n in (index, index + 4)
                ]
                for each in mine:
                    id_ = each.event.headers["onward-stream-id"]
                    assert each.event.headers["onward-stream"] == stage.streams.stream(index)
                    assert each.position == position_of(id_.encode())
                    assert each.event.time == int(id_.partition("-")[0]) / 1000
            assert len({each.event.id for each in member.deliveries}) == 8

    play(scene())


def test_one_field_is_the_value(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server, mapping={"value": "body"}) as stage:
            stage.add(1, body=b"\xff\x00 raw")
            member = await stage.member()
            (delivery,) = await member.take(1)
            assert delivery.event.value == b"\xff\x00 raw"
            assert delivery.event.key == "job-1"

    play(scene())


def test_an_entry_has_the_same_event_id_in_every_delivery(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            stage.add(1, 2)
            first = await stage.member()
            seen = [each.event for each in await first.take(2)]
            await first.subscription.close()
            second = await stage.member()
            assert [each.event for each in await second.take(2)] == seen

    play(scene())


def test_a_new_group_is_a_real_one_at_its_start(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            before = stage.add(1, 2)
            member = await stage.member(start="latest")
            assert stage.delivered() == before[-1]
            added = stage.add(3)
            await member.take(1)
            assert ids(member.deliveries) == added

    play(scene())


def test_a_group_that_others_used_goes_on_where_they_were(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            added = stage.add(1, 2, 3)
            stage.client.xgroup_create(stage.stream, stage.stage.group, added[1])
            member = await stage.member(start="earliest")
            await member.take(1)
            await member.quiet()
            assert ids(member.deliveries) == added[2:]

    play(scene())


def test_the_pending_list_shows_what_is_open_and_nothing_else(redis_server: RedisServer) -> None:
    """A handler that fails, or does not end, leaves its entry in the pending list (checklist of seed 001)."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            added = stage.add(*range(6))
            member = await stage.member()
            deliveries = await member.take(6)
            await member.until(lambda: stage.pending() == dict.fromkeys(added, 1))
            assert stage.delivered() == added[-1]
            first, _, third, *_ = deliveries
            tries = {deliveries[1].position: Tries(failed=2)}
            done_above = [(third.position, third.position + 1)]
            progress = Progress(first.partition, first.epoch, first.position + 1, done_above, tries=tries)
            assert not await member.subscription.settle([progress])
            assert stage.pending() == {added[1]: 3, added[3]: 1, added[4]: 1, added[5]: 1}
            assert not await member.settle()
            assert stage.pending() == {}

    play(scene())


def test_the_next_owner_goes_on_with_the_pending_list(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            added = stage.add(*range(4))
            first = await stage.member()
            await first.take(4)
            assert not await first.settle(first.deliveries[:2])
            await first.subscription.close()
            assert stage.pending() == dict.fromkeys(added[2:], 1)
            second = await stage.member()
            assert ids(await second.take(2)) == added[2:]
            assert not await second.settle()
            assert stage.pending() == {}

    play(scene())


@pytest.mark.parametrize(
    "other", [None, Streams("elsewhere"), Streams("elsewhere", shards=2)], ids=["none", "name", "shards"]
)
def test_a_process_with_another_mapping_refuses_to_start(redis_server: RedisServer, other: Streams | None) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            await stage.member()
            topic = stage.stage.topic
            broker = await stage.stage.broker(streams={} if other is None else {topic: other})
            with pytest.raises(PartitionsDiffer, match=stage.streams.name):
                await stage.stage.member(broker)

    play(scene())
