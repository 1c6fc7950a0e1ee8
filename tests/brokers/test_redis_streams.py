"""Streams of other programs as topics: reading them, and a real consumer group that shows what is open."""

import asyncio
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from onward import Onward, Retry
from onward.brokers.base import PASSING, AsideRecord, Broker, Filter, Moved, Progress, Reached, State, Tries, record_id
from onward.brokers.core.partitioner import partition_of
from onward.brokers.redis import Streams, trimmer
from onward.brokers.redis.foreign.streams import mapped
from onward.brokers.redis.keys import PartitionKeys
from onward.brokers.redis.positions import position_of
from onward.errors import BadSetting, BrokerError, PartitionsDiffer, Unserialisable
from onward.event import Delivery, Event, Partition, new_id
from onward.testing.scenario import Member
from tests.brokers.redis_stage import Stage, now_ms, own_server, play, staged, until
from tests.servers.redis import RedisServer


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "scan", "hash": "sha"}, r"\[streams\.work\]: hash = 'sha'; write one of 'md5', 'murmur2'"),
        ({"name": "scan", "shard": 2}, r"\[streams\.work\]: there is no field 'shard'; did you mean shards\?"),
        ({"name": "scan", "zzz": 2}, r"no field 'zzz'; the fields are name, shards"),
        ({"name": "scan", "shards": "two"}, r"\[streams\.work\]: Expected `int.*shards`$"),
        ({}, r"\[streams\.work\]: .*missing required field `name`; write .* name = 'scan:events'"),
        ("scan", r"\[streams\.work\]: .*; write a table, such as name = 'scan:events'"),
    ],
)
def test_a_mistake_in_a_table_of_streams_is_named_with_its_place(fields: Any, says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        mapped({"work": fields})


def test_streams_can_be_named_without_redis_py_and_the_url_names_the_extra() -> None:
    code = (
        "import asyncio, sys; sys.modules['redis'] = None\n"
        "from onward.brokers import open_broker\nfrom onward.brokers.redis import Streams\n"
        "from onward import settings\nfrom onward.errors import MissingExtra\n"
        "found = settings.load('redis://localhost', streams={'work': Streams('scan')})\n"
        "try:\n asyncio.run(open_broker(found))\nexcept MissingExtra as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'onward[redis]'" in out.stdout


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

    def has_group(self) -> bool:
        return bool(self.client.exists(self.stream) and self.client.xinfo_groups(self.stream))

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


def record(stage: StreamStage, delivery: Delivery, state: State, failed: int = 1) -> AsideRecord:
    id_ = record_id(stage.stage.group, delivery.log_id, delivery.partition, delivery.position)
    due = 2e9 if state is State.WAITING else None
    tries = Tries(failed=failed)
    return AsideRecord(
        id_, stage.stage.group, delivery.partition, delivery.position, state, due, delivery.event, tries, None
    )


def done(*deliveries: Delivery) -> list[Progress]:
    """Everything up to the last of these."""
    last = deliveries[-1]
    return [Progress(last.partition, last.epoch, last.position + 1)]


def test_what_waits_or_is_held_stays_pending_until_it_is_done_or_dead(redis_server: RedisServer) -> None:
    """Only success or a stored dead letter acknowledges."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            added = stage.add(*range(4))
            member = await stage.member()
            deliveries = await member.take(4)
            waiting, held = record(stage, deliveries[0], State.WAITING, 2), record(stage, deliveries[1], State.HELD, 0)
            dead = record(stage, deliveries[2], State.DEAD)
            settle = member.subscription.settle
            assert not await settle(done(*deliveries), aside=[waiting, held, dead])
            assert stage.pending() == {added[0]: 3, added[1]: 1}
            assert not await settle([], aside=[record(stage, deliveries[0], State.DEAD)])
            assert stage.pending() == {added[1]: 1}
            assert not await settle([], gone=[held.id])
            assert stage.pending() == {}

    play(scene())


def test_the_next_owner_keeps_what_waits_in_the_pending_list(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            added = stage.add(*range(4))
            first = await stage.member()
            deliveries = await first.take(4)
            waiting = record(stage, deliveries[0], State.WAITING)
            above = record(stage, deliveries[2], State.WAITING)
            progress = Progress(deliveries[0].partition, deliveries[0].epoch, deliveries[1].position)
            assert not await first.subscription.settle([progress], aside=[waiting, above])
            await first.subscription.close()
            second = await stage.member()
            assert ids(await second.take(3)) == added[1:]
            assert not await second.settle()
            assert stage.pending() == {added[0]: 2, added[2]: 2}
            assert not await second.subscription.settle([], gone=[waiting.id, above.id])
            assert stage.pending() == {}

    play(scene())


def test_what_an_operator_moves_is_seen_in_the_pending_list(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            added = stage.add(*range(3))
            broker = await stage.stage.broker()
            member = await (await stage.stage.member(broker)).hold(1)
            deliveries = await member.take(3)
            waiting = [record(stage, each, State.WAITING) for each in deliveries[:2]]
            dead = record(stage, deliveries[2], State.DEAD)
            assert not await member.subscription.settle(done(*deliveries), aside=[*waiting, dead])
            assert set(stage.pending()) == set(added[:2])
            aside = broker.aside(stage.stage.group)
            assert await aside.remove([waiting[0].id], expect=State.WAITING) == 1
            assert await aside.move([dead.id], expect=State.DEAD, to=State.WAITING, due=2e9) == 1
            await member.until(lambda: set(stage.pending()) == set(added[1:]))
            assert any(isinstance(each, Moved) for each in member.history)

    play(scene())


@pytest.mark.parametrize(
    ("mapping", "fields", "says"),
    [
        ({"value": "body"}, {"job_id": "job-9"}, "body"),
        ({"value": "body"}, {"body": "x"}, "job_id"),
        ({}, {"job_id": b"\xff"}, "job_id"),
        ({}, {"job_id": "job-9", "text": b"a\xffb"}, "text"),
    ],
)
def test_an_entry_that_does_not_fit_is_a_dead_letter_and_stops_nothing(
    redis_server: RedisServer, mapping: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    """Trap 10: one bad entry stops all reclaim on its shard."""

    async def scene() -> None:
        async with streaming(redis_server, mapping=mapping) as stage:
            stage.add(1, body="1")
            bad = stage.client.xadd(stage.stream, fields).decode()
            stage.add(2, body="2")
            broker = await stage.stage.broker()
            member = await (await stage.stage.member(broker)).hold(1)
            deliveries = await member.take(2)
            assert [each.event.key for each in deliveries] == ["job-1", "job-2"]
            (letter,) = (await broker.aside(stage.stage.group).scan(Filter(topic=stage.stage.topic), None, 10)).records
            assert letter.state is State.DEAD
            assert letter.failure
            assert letter.failure.reason == "undecodable"
            assert bad in letter.failure.message
            assert says in letter.failure.message
            assert letter.event.headers == {"onward-stream": stage.stream, "onward-stream-id": bad}
            assert not await member.settle()
            assert stage.pending() == {}
            assert not member.subscription.troubles()

    play(scene())


def test_a_last_entry_that_does_not_fit_is_passed(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            member = await stage.member()
            bad = stage.client.xadd(stage.stream, {"other": "1"}).decode()
            await member.until(lambda: any(isinstance(each, Reached) for each in member.history))
            (reached,) = [each for each in member.history if isinstance(each, Reached)]
            position = position_of(bad.encode())
            assert position is not None
            assert reached.position == position + 1
            assert not await member.subscription.settle([Progress(reached.partition, reached.epoch, reached.position)])
            assert stage.delivered() == bad

    play(scene())


def test_a_partition_waits_while_the_dead_letter_of_a_bad_entry_cannot_be_stored(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            member = await stage.member()
            rows = stage.keys.rows(stage.stage.group)
            stage.client.set(rows, "in the way")
            stage.add(1)
            bad = stage.client.xadd(stage.stream, {"other": "1"}).decode()
            stage.add(2)
            await member.take(1)
            await member.until(lambda: any(bad in each and rows in each for each in member.subscription.troubles()))
            await member.quiet()
            stage.client.delete(rows)
            await member.take(2)
            assert [each.event.key for each in member.deliveries] == ["job-1", "job-2"]
            assert not member.subscription.troubles()

    play(scene())


def test_an_id_that_does_not_fit_stops_its_partition(redis_server: RedisServer) -> None:
    """Scenario 12."""

    async def scene() -> None:
        async with streaming(redis_server, mapping={"shards": 2}) as stage:
            member = await stage.member(2)
            stage.client.xadd(stage.stream, {"job_id": "a"}, id=f"{1 << 42}-0")
            stage.add(1, index=1)
            await member.take(1)
            await member.until(lambda: any(f"{1 << 42}-0" in each for each in member.subscription.troubles()))
            stage.add(2, index=1)
            await member.take(2)
            assert {each.partition.index for each in member.deliveries} == {1}

    play(scene())


def test_another_consumer_in_the_group_stops_the_partition_and_is_named(redis_server: RedisServer) -> None:
    """Scenario 14: XREADGROUP of another program in our group. Nothing is lost."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            member = await stage.member()
            stage.add(1)
            await member.take(1)
            assert not await member.settle()
            stage.add(2)
            taken = stage.client.xreadgroup(stage.stage.group, "intruder-7", {stage.stream: ">"})
            stage.add(3)
            await member.until(lambda: any("intruder-7" in each for each in member.subscription.troubles()))
            assert not await member.settle()
            stage.add(4)
            await member.quiet(1.0)
            assert "job-4" not in [each.event.key for each in member.deliveries]
            rows = stage.client.xpending_range(stage.stream, stage.stage.group, "-", "+", 10)
            assert [row["message_id"] for row in rows] == [id_ for id_, _ in taken[0][1]], "it keeps what it read"

    play(scene())


def test_a_group_that_was_destroyed_is_created_again_at_our_progress(redis_server: RedisServer) -> None:
    """Trap 7: after NOGROUP never at 0 or $."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            member = await stage.member()
            added = stage.add(*range(5))
            deliveries = await member.take(5)
            waiting = record(stage, deliveries[0], State.WAITING)
            assert not await member.subscription.settle(done(*deliveries[:2]), aside=[waiting])
            stage.client.xgroup_destroy(stage.stream, stage.stage.group)
            assert not await member.settle(member.deliveries[:3])
            await member.until(lambda: set(stage.pending()) == {added[0], *added[3:]})
            assert stage.delivered() == added[-1]
            await member.quiet()
            stage.client.xgroup_destroy(stage.stream, stage.stage.group)
            await member.subscription.close()
            second = await stage.member()
            assert stage.delivered() == added[2]
            assert ids(await second.take(2)) == added[3:]

    play(scene())


def published(stage: StreamStage, key: str | None, value: bytes | None, **fields: Any) -> Event:
    return Event(new_id(), stage.stage.topic, key, value, **fields)


def seed_shard(key: str, shards: int) -> int:
    """As the other program chooses it."""
    return int.from_bytes(hashlib.md5(key.encode()).digest()[:8], "big") % shards


def test_a_publish_writes_the_fields_of_the_mapping_to_the_shard_of_the_key(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server, mapping={"shards": 4, "hash": "md5"}) as stage:
            broker = await stage.stage.broker()
            values = [{"job_id": f"job-{n}", "stage": "vision", "seq": n, "tags": ["a"]} for n in range(20)]
            await broker.publish([published(stage, each["job_id"], json.dumps(each).encode()) for each in values])  # type: ignore[arg-type]
            found = {}
            for index in range(4):
                for _, fields in stage.client.xrange(stage.streams.stream(index)):
                    found[fields[b"job_id"].decode()] = index, fields
            assert {key: index for key, (index, _) in found.items()} == {
                f"job-{n}": seed_shard(f"job-{n}", 4) for n in range(20)
            }
            assert found["job-7"][1] == {b"job_id": b"job-7", b"stage": b"vision", b"seq": b"7", b"tags": b'["a"]'}
            member = await (await stage.stage.member(broker)).hold(4)
            await member.take(20)
            assert {each.event.key for each in member.deliveries} == {f"job-{n}" for n in range(20)}

    play(scene())


def test_a_publish_with_one_field_as_the_value_is_read_as_it_was(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server, mapping={"value": "body", "shards": 2, "hash": "murmur2"}) as stage:
            broker = await stage.stage.broker()
            await broker.publish([published(stage, f"job-{n}", b"\x00\xff%d" % n) for n in range(600)])
            member = await (await stage.stage.member(broker)).hold(2)
            deliveries = await member.take(600)
            found = {each.event.key: (each.event.value, each.partition.index) for each in deliveries}
            assert found == {f"job-{n}": (b"\x00\xff%d" % n, partition_of(f"job-{n}", 2)) for n in range(600)}

    play(scene())


@pytest.mark.parametrize(
    ("key", "value", "more", "says"),
    [
        ("job-1", b"7", {}, "JSON object"),
        ("job-1", b"{}", {}, "fields"),
        ("job-1", None, {}, "tombstone"),
        (None, b'{"a": 1}', {}, "no key"),
        ("job-1", b'{"job_id": "job-2"}', {}, "another key"),
        ("job-1", b'{"a": 1}', {"headers": {"h": "1"}}, "headers"),
    ],
)
def test_an_event_that_has_no_place_in_the_mapping_is_refused(
    redis_server: RedisServer, key: str | None, value: bytes | None, more: dict[str, Any], says: str
) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            broker = await stage.stage.broker()
            with pytest.raises(Unserialisable, match=says):
                await broker.publish([published(stage, key, value, **more)])
            assert stage.client.xlen(stage.stream) == 0

    play(scene())


def test_a_publish_to_shards_needs_the_hash_of_the_other_program(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server, mapping={"shards": 4}) as stage:
            broker = await stage.stage.broker()
            with pytest.raises(BadSetting, match="hash='md5'"):
                await broker.publish([published(stage, "job-1", b'{"a": 1}')])

    play(scene())


def test_publishers_with_different_hashes_do_not_mix(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server, mapping={"shards": 4, "hash": "md5"}) as stage:
            await (await stage.stage.broker()).publish([published(stage, "job-1", b'{"a": 1}')])
            other = msgspec.structs.replace(stage.streams, hash="murmur2")
            broker = await stage.stage.broker(streams={stage.stage.topic: other})
            with pytest.raises(PartitionsDiffer, match="hash='md5'"):
                await broker.publish([published(stage, "job-1", b'{"a": 1}')])

    play(scene())


def test_an_answer_that_was_lost_publishes_once(redis_server: RedisServer) -> None:
    """Scenario 1, for a stream of others: the producer's number says that the call was carried out."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            with redis_server.proxy() as proxy:
                broker = await stage.stage.broker(proxy.url)
                await broker.publish([published(stage, "job-0", b'{"a": 0}')])
                proxy.mute()
                publishing = asyncio.ensure_future(broker.publish([published(stage, "job-1", b'{"a": 1}')]))
                await until(lambda: stage.client.xlen(stage.stream) == 2)
                proxy.cut()
                proxy.mend()
                await publishing
            assert [fields[b"a"] for _, fields in stage.client.xrange(stage.stream)] == [b"0", b"1"]

    play(scene())


def test_operators_need_no_mapping(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server, mapping={"shards": 2}) as stage:
            member = await stage.member(2)
            stage.add(1)
            (delivery,) = await member.take(1)
            dead = record(stage, delivery, State.DEAD)
            assert not await member.subscription.settle(done(delivery), aside=[dead])
            topic, group = stage.stage.topic, stage.stage.group
            operator = await stage.stage.broker(streams={})
            assert topic in [spec.name for spec in await operator.topics() if spec.partitions == 2]
            aside = operator.aside(group)
            (found,) = (await aside.scan(Filter(topic=topic), None, 10)).records
            assert found.event.headers["onward-stream-id"] == ids([delivery])[0]
            (info,) = await operator.groups(topic)
            assert info.partitions[0].watermark == delivery.position + 1
            assert await aside.move([dead.id], expect=State.DEAD, to=State.WAITING, due=2e9) == 1
            await member.until(lambda: any(isinstance(each, Moved) for each in member.history))

    play(scene())


def test_a_dropped_group_is_gone_from_the_stream_and_can_come_again(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            added = stage.add(1, 2)
            member = await stage.member()
            await member.take(2)
            await member.settle()
            await member.subscription.close()
            operator = await stage.stage.broker(streams={})
            await operator.drop_group(stage.stage.topic, stage.stage.group)
            assert stage.client.xinfo_groups(stage.stream) == []
            again = await stage.member()
            assert ids(await again.take(2)) == added

    play(scene())


def test_a_group_in_which_another_consumer_has_open_entries_is_not_dropped(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            member = await stage.member()
            await member.subscription.close()
            stage.add(1)
            stage.client.xreadgroup(stage.stage.group, "intruder-7", {stage.stream: ">"})
            broker = await stage.stage.broker()
            with pytest.raises(BrokerError, match="intruder-7"):
                await broker.drop_group(stage.stage.topic, stage.stage.group)
            assert len(await broker.groups(stage.stage.topic)) == 1

    play(scene())


def test_dropping_the_topic_leaves_the_streams_to_their_owner(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server, mapping={"shards": 2}) as stage:
            stage.add(1, 2)
            member = await stage.member(2)
            await member.take(2)
            assert not await member.settle()
            await member.subscription.close()
            operator = await stage.stage.broker(streams={})
            await operator.drop_topic(stage.stage.topic)
            assert stage.client.xlen(stage.stream) == 2
            assert len(stage.client.xinfo_groups(stage.stream)) == 1
            name = stage.streams.name
            left = {key.decode() for key in stage.client.keys(f"*{name}*")}
            assert left == {f"{name}:0", f"{name}:1"}

    play(scene())


def test_the_number_of_shards_can_change_when_the_topic_is_forgotten(redis_server: RedisServer) -> None:
    """The redeploy guide: the group goes on where it was, and repeats nothing."""

    async def scene() -> None:
        async with streaming(redis_server, mapping={"shards": 2}) as stage:
            stage.add(1, 2)
            member = await stage.member(2)
            await member.take(2)
            assert not await member.settle()
            await member.subscription.close()
            topic, more = stage.stage.topic, Streams(stage.streams.name, shards=3, key="job_id")
            broker = await stage.stage.broker(streams={topic: more})
            with pytest.raises(PartitionsDiffer, match=f"await app.broker.drop_topic\\('{topic}'\\)"):
                await stage.stage.member(broker)
            await (await stage.stage.broker()).drop_topic(topic)
            member = await (await stage.stage.member(broker)).hold(3)
            added = [*stage.add(3), *stage.add(4, index=2)]
            assert sorted(ids(await member.take(2))) == sorted(added)

    play(scene())


def test_a_passing_group_leaves_no_group_in_the_stream(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            stage.add(1)
            stage.stage.group = f"{PASSING}tail"
            member = await stage.member()
            await member.take(1)
            assert not await member.settle()
            assert stage.client.xinfo_groups(stage.stream) == []

    play(scene())


def test_a_passing_group_skips_an_entry_that_does_not_fit(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onward")

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            bad = stage.client.xadd(stage.stream, {"other": "no key"}).decode()
            stage.add(1)
            stage.stage.group = f"{PASSING}tail"
            broker = await stage.stage.broker()
            member = await (await stage.stage.member(broker)).hold(1)
            await member.take(1)
            (record,) = [each for each in caplog.records if bad in each.message]
            assert "has no field job_id" in record.message
            assert "skipped" in record.message
            assert "dead letter" not in record.message
            assert PASSING not in record.message
            page = await broker.aside(stage.stage.group).scan(Filter(frozenset({State.DEAD})), None, 10)
            assert list(page.records) == []

    play(scene())


def test_the_doctor_knows_no_backlog_limit_of_streams_of_others(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            stage.add(1)
            member = await stage.member()
            await member.subscription.close()
            broker = await stage.stage.broker()
            await broker.drop_group(stage.stage.topic, stage.stage.group)
            operator = await stage.stage.broker(streams={})
            for each in (broker, operator):
                found = [f"{finding.what}; {finding.cure}" for finding in await each.diagnose()]
                assert not [each for each in found if stage.stage.topic in each]

    play(scene())


def test_a_stream_belongs_to_one_topic(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            await stage.member()
            first, stage.stage.topic = stage.stage.topic, f"{stage.stage.topic}-too"
            broker = await stage.stage.broker(streams={stage.stage.topic: stage.streams})
            with pytest.raises(PartitionsDiffer, match=first):
                await stage.stage.member(broker)

    play(scene())


def test_lag_counts_what_was_not_delivered(redis_server: RedisServer) -> None:
    """Also in the middle of a long stream, where the server's own figure is unknown after SETID."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            stage.add(*range(1500))
            broker = await stage.stage.broker()
            member = await (await stage.stage.member(broker)).hold(1)

            async def undelivered() -> int | None:
                (lag,) = (await member.subscription.lag()).values()
                return lag.undelivered

            await member.receive(limit=5)
            assert await undelivered() == 1500 - len(member.deliveries)
            while len(member.deliveries) < 700:
                await member.receive(limit=100)
            assert await undelivered() == 1500 - len(member.deliveries)
            await member.settle()
            (group,) = stage.client.xinfo_groups(stage.stream)
            assert group["lag"] == 1500 - len(member.deliveries), "autoscalers look at it"
            await member.take(1500)
            assert await undelivered() == 0
            await member.settle()
            (group,) = stage.client.xinfo_groups(stage.stream)
            assert group["lag"] == 0

    play(scene())


def test_what_others_trim_before_it_was_read_is_counted_as_lost(redis_server: RedisServer) -> None:
    """Scenario 15 and trap 8."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            broker = await stage.stage.broker()
            member = await (await stage.stage.member(broker)).hold(1)
            stage.add(1, 2)
            stage.client.xadd(stage.stream, {"other": "no key"})
            await member.take(2)
            await member.subscription.lag()
            await member.subscription.pause([Partition(stage.stage.topic, 0)])
            stage.add(*range(10))
            stage.client.xtrim(stage.stream, maxlen=4, approximate=False)
            await member.subscription.lag()
            assert lost_of(broker) == 6
            await member.subscription.resume([Partition(stage.stage.topic, 0)])
            await member.take(6)
            await member.subscription.lag()
            assert lost_of(broker) == 6

    play(scene())


def test_what_others_trim_between_two_runs_is_counted_at_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream is older than the group. The next owner reports the loss when it begins, and only once."""

    async def run(stage: StreamStage, ids_: list[str]) -> float:
        broker = await stage.stage.broker()
        member = await (await stage.stage.member(broker)).hold(1)
        lost = lost_of(broker)
        await member.take(len(ids_))
        assert ids(member.deliveries) == ids_
        await member.settle()
        await member.subscription.lag()
        assert lost_of(broker) == lost
        await member.subscription.close()
        return lost

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            assert await run(stage, stage.add(1, 2, 3)) == 0
            (group,) = stage.client.xinfo_groups(stage.stream)
            assert group["entries-read"] == 3
            left = stage.add(*range(4, 9))[-2:]
            stage.client.xtrim(stage.stream, maxlen=2, approximate=False)
            assert await run(stage, left) == 3
            assert "3 entries of stream" in caplog.text
            assert await run(stage, []) == 0

    play(scene())


def test_what_is_trimmed_completely_is_reported_by_one_owner(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            brokers = [await stage.stage.broker() for _ in range(2)]
            member = await (await stage.stage.member(brokers[0])).hold(1)
            await member.subscription.pause([Partition(stage.stage.topic, 0)])
            stage.add(1, 2)
            stage.client.xtrim(stage.stream, maxlen=0, approximate=False)
            await member.subscription.lag()
            assert lost_of(brokers[0]) == 2
            await member.until(lambda: stage.client.xinfo_groups(stage.stream)[0]["entries-read"] == 2)
            await member.subscription.close()
            await (await stage.stage.member(brokers[1])).hold(1)
            assert lost_of(brokers[1]) == 0

    play(scene())


@pytest.mark.parametrize("is_read", [True, False])
def test_a_group_in_the_middle_of_a_long_stream_reports_no_loss(redis_server: RedisServer, is_read: bool) -> None:
    """How many entries are before it the server knows only if consumers have read them."""

    async def scene() -> None:
        async with streaming(redis_server, reclaim_idle_s=0.1) as stage:
            added = stage.add(*range(900))
            stage.client.xgroup_create(stage.stream, stage.stage.group, "0" if is_read else added[449])
            if is_read:
                stage.client.xreadgroup(stage.stage.group, "old", {stage.stream: ">"}, count=450, noack=True)
            broker = await stage.stage.broker()
            member = await (await stage.stage.member(broker)).hold(1)
            (lag,) = (await member.subscription.lag()).values()
            assert lag.undelivered == (450 if is_read else None)
            await member.take(450)
            (lag,) = (await member.subscription.lag()).values()
            assert (lag.undelivered, lost_of(broker)) == (0, 0)

    play(scene())


def lost_of(broker: Broker) -> float:
    """What its metrics say."""
    (figure,) = [each for each in broker.figures() if each.name == "stream_lost"]
    return sum(sample.value for sample in figure.samples)


def trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.1)


def test_streams_of_others_are_not_trimmed(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    trimming(monkeypatch)

    async def scene() -> None:
        async with streaming(redis_server, retention_s=0.001, lease_s=1.0) as stage:
            stage.add(*range(300))
            member = await stage.member()
            await member.take(300)
            await member.settle()
            await member.quiet(1.0)
            assert stage.client.xlen(stage.stream) == 300

    play(scene())


@pytest.mark.parametrize("retention", [{"retention_s": 0.001}, {"retention_events": 100}, {"retention_bytes": 5_000}])
def test_with_trim_what_every_group_has_finished_goes(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, retention: dict[str, Any]
) -> None:
    """Trap 8: never above the lowest pending or the last-delivered id of any group, also of others."""
    trimming(monkeypatch)

    async def scene() -> None:
        async with streaming(redis_server, mapping={"trim": True}, lease_s=1.0, **retention) as stage:
            added = stage.add(*range(1000))
            stage.client.xgroup_create(stage.stream, "theirs", "0")
            stage.client.xreadgroup("theirs", "worker", {stage.stream: ">"}, count=600)
            member = await stage.member()
            await member.take(1000)
            await member.settle()
            await member.quiet(0.7)
            assert stage.client.xlen(stage.stream) == 1000, "the other group has not acknowledged anything"
            stage.client.xack(stage.stream, "theirs", *added[:400])
            await member.until(lambda: stage.client.xlen(stage.stream) <= 700)
            first = stage.client.xrange(stage.stream, count=1)[0][0].decode()
            assert added.index(first) <= 400, "what the other group has not acknowledged stays"
            stage.client.xgroup_destroy(stage.stream, "theirs")
            await member.until(lambda: stage.client.xlen(stage.stream) <= 200)

    play(scene())


def test_a_waiting_entry_is_not_trimmed(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    trimming(monkeypatch)

    async def scene() -> None:
        async with streaming(redis_server, mapping={"trim": True}, lease_s=1.0, retention_s=0.001) as stage:
            added = stage.add(*range(500))
            member = await stage.member()
            deliveries = await member.take(500)
            waiting = record(stage, deliveries[250], State.WAITING)
            assert not await member.subscription.settle(done(*deliveries), aside=[waiting])
            await member.until(lambda: stage.client.xlen(stage.stream) < 400)
            assert added.index(stage.client.xrange(stage.stream, count=1)[0][0].decode()) <= 250
            await member.quiet(0.5)
            assert stage.client.xlen(stage.stream) >= 250

    play(scene())


@pytest.mark.servers
def test_a_position_that_comes_back_with_another_entry_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The anchor rule: a server that lost its last writes, and other programs that write ids which were read before."""

    async def scene() -> None:
        with own_server() as server:
            async with streaming(server, lease_s=10.0) as stage:
                member = await stage.member()
                ms = now_ms(stage.stage)
                stage.client.xadd(stage.stream, {"job_id": "kept"}, id=f"{ms}-0")
                await member.take(1)
                assert not await member.settle()
                size = server.appended.stat().st_size
                stage.client.xadd(stage.stream, {"job_id": "lost"}, id=f"{ms + 5_000}-0")
                await member.take(2)
                assert not await member.settle()
                before = member.deliveries[0].log_id
                server.forget(size)
                stage.client.xadd(stage.stream, {"job_id": "other"}, id=f"{ms + 4_000}-0")
                await member.until(lambda: "other" in [each.event.key for each in member.deliveries], 30.0)
                assert member.deliveries[-1].log_id != before, "an inbox would take it for done"
                assert [each.event.key for each in member.deliveries] == ["kept", "lost", "other"]
                assert not await member.settle(member.deliveries[-1:])

    play(scene())
    assert "new id" in caplog.text


def test_a_server_that_lost_nothing_that_was_read_keeps_the_log(redis_server: RedisServer) -> None:
    """A restart ends no ownership and no retry."""

    async def scene() -> None:
        with own_server() as server:
            async with streaming(server, lease_s=10.0) as stage:
                member = await stage.member()
                stage.add(1, 2)
                await member.take(2)
                assert not await member.settle()
                epochs = {each.epoch for each in member.assigned.values()}
                server.kill()
                server.start()
                stage.add(3)
                await member.take(3)
                assert {each.epoch for each in member.deliveries} == epochs
                deadline = asyncio.get_running_loop().time() + 20.0
                while await settles(member):
                    assert asyncio.get_running_loop().time() < deadline
                assert stage.pending() == {}

    play(scene())


async def settles(member: Member) -> bool:
    """Whether it must settle once more, because the server has just been replaced."""
    try:
        assert not await member.settle()
    except BrokerError:
        await asyncio.sleep(0.05)
        return True
    return False


def test_the_next_owner_goes_back_to_the_last_entry_that_is_still_there(redis_server: RedisServer) -> None:
    """The stream was replaced by an older copy while no member ran."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            member = await stage.member()
            ms = now_ms(stage.stage)
            for n in range(3):
                copy = stage.client.dump(stage.stream)
                stage.client.xadd(stage.stream, {"job_id": f"job-{n}"}, id=f"{ms + 2_000 * n}-0")
                await member.take(n + 1)
                assert not await member.settle()
            await member.subscription.close()
            stage.client.restore(stage.stream, 0, copy, replace=True)
            stage.client.xadd(stage.stream, {"job_id": "later"}, id=f"{ms + 3_000}-0")
            second = await stage.member()
            await second.until(lambda: "later" in [each.event.key for each in second.deliveries])
            assert "job-0" not in [each.event.key for each in second.deliveries]
            assert second.deliveries[0].log_id != member.deliveries[0].log_id

    play(scene())


@pytest.mark.parametrize("how", ["xtrim", "xdel"])
def test_a_last_entry_that_others_remove_is_no_loss_once_it_was_read(redis_server: RedisServer, how: str) -> None:
    async def scene() -> None:
        async with streaming(redis_server) as stage:
            member = await stage.member()
            added = stage.add(*range(5))
            await member.take(5)
            assert not await member.settle()
            await member.subscription.close()
            stage.add(*range(5, 10))
            if how == "xtrim":
                stage.client.xtrim(stage.stream, maxlen=5, approximate=False)
            else:
                stage.client.xdel(stage.stream, added[-1])
            second = await stage.member()
            await second.take(5)
            assert [each.event.key for each in second.deliveries] == [f"job-{n}" for n in range(5, 10)]
            assert second.deliveries[0].log_id == member.deliveries[0].log_id

    play(scene())


def test_a_failing_handler_leaves_its_entry_pending_until_it_is_a_dead_letter(redis_server: RedisServer) -> None:
    """Checklist of seed 000: no acknowledgement after a failure, and the stream's id is there in every attempt."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            topic, seen, may_fail = stage.stage.topic, dict[str, list[str]](), asyncio.Event()
            app = Onward(stage.stage.url, streams={topic: stage.streams}, lease_s=3.0)

            @app.handler(topic, group=stage.stage.group, retry=Retry(attempts=2, first_delay_s=0.01))
            async def handle(job: dict[str, str], event: Event) -> None:
                seen.setdefault(event.headers["onward-stream-id"], []).append(job["job_id"])
                if job["job_id"] == "job-1":
                    await may_fail.wait()
                    raise ValueError("no")

            running = asyncio.ensure_future(app.run())
            bad, good = stage.add(1, 2)
            await until(lambda: good in seen and stage.has_group() and stage.pending() == {bad: 1})
            may_fail.set()
            await until(lambda: stage.pending() == {})
            app.stop()
            await running
            assert seen == {bad: ["job-1", "job-1"], good: ["job-2"]}
            aside = (await stage.stage.broker()).aside(stage.stage.group)
            (letter,) = (await aside.scan(Filter(topic=topic), None, 10)).records
            assert letter.event.headers["onward-stream-id"] == bad

    play(scene())


def test_a_record_that_is_removed_does_not_acknowledge_an_entry_that_is_open(redis_server: RedisServer) -> None:
    """After a takeover, the flow removes the records of events that it starts, whether there are any or not."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            added = stage.add(*range(5))
            member = await stage.member()
            delivery = (await member.take(5))[3]
            await member.until(lambda: len(stage.pending()) == 5)
            record = record_id(stage.stage.group, delivery.log_id, delivery.partition, delivery.position)
            assert not await member.subscription.settle([], gone=[record])
            assert list(stage.pending()) == added
            assert not await member.settle()
            assert stage.pending() == {}

    play(scene())


@pytest.mark.servers
def test_entries_whose_claims_a_server_lost_are_pending_again_and_not_done() -> None:
    """The entries are on its disk; what it lost is that they were given out."""

    async def scene() -> None:
        with own_server() as server:
            async with streaming(server, lease_s=30.0) as stage:
                first = await stage.member()
                added = stage.add(*range(10))
                size = server.appended.stat().st_size
                await first.take(10)
                await first.until(lambda: list(stage.pending()) == added)
                await asyncio.to_thread(server.forget, size)
                added += stage.add(*range(10, 15))
                await first.take(15)
                await first.until(lambda: list(stage.pending()) == added)
                await first.subscription.close()
                second = await stage.member()
                assert ids(await second.take(15)) == added

    play(scene())


@pytest.mark.servers
def test_acknowledgements_that_a_server_lost_are_made_again() -> None:
    async def scene() -> None:
        with own_server() as server:
            async with streaming(server, lease_s=30.0) as stage:
                member = await stage.member()
                added = stage.add(*range(10))
                await member.take(10)
                await member.until(lambda: list(stage.pending()) == added)
                size = server.appended.stat().st_size
                assert not await member.settle()
                assert stage.pending() == {}
                await asyncio.to_thread(server.forget, size)
                assert list(stage.pending()) == added
                await until(lambda: any("b" in each["flags"] for each in stage.client.client_list()))  # the doorbell
                await member.until(lambda: stage.pending() == {})

    play(scene())


@pytest.mark.parametrize("command", ["DELCONSUMER", "DESTROY"])
def test_a_group_that_others_tidy_up_loses_nothing(redis_server: RedisServer, command: str) -> None:
    """Our progress counts, not the pending list."""

    async def scene() -> None:
        async with streaming(redis_server) as stage:
            added = stage.add(*range(8))
            member = await stage.member()
            await member.take(8)
            await member.until(lambda: list(stage.pending()) == added)
            if command == "DESTROY":
                stage.client.xgroup_destroy(stage.stream, stage.stage.group)
                stage.client.xgroup_create(stage.stream, stage.stage.group, "$")
            else:
                stage.client.xgroup_delconsumer(stage.stream, stage.stage.group, "onward")
            await member.subscription.close()
            second = await stage.member()
            assert ids(await second.take(8)) == added

    play(scene())
