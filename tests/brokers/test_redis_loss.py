"""A Redis that lost keys: by FLUSHALL, by DEL, by a crash that cut off its last writes."""

import asyncio
import logging
import re
from typing import Any
from uuid import uuid4

import pytest

from onward import Onward
from onward.brokers.base import Filter, State, record_id
from onward.brokers.redis import Streams, log_scripts, trimmer
from onward.brokers.redis.positions import position_of
from onward.event import Partition
from onward.testing.aside import make_record
from onward.testing.scenario import Member
from tests.brokers.redis_stage import now_ms, own_server, play, set_id, staged, until
from tests.brokers.test_redis_leases import size
from tests.servers.redis import RedisServer
from tests.servers.redis_pair import RedisPair


def test_after_flushall_the_topic_is_another_log_and_starts_at_its_beginning(redis_server: RedisServer) -> None:
    """Scenario 17; whatever `start` says, because the group has seen nothing of the new log."""

    async def scene() -> None:
        async with staged(redis_server, partitions=2) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(3, keys=3))
            member = await (await stage.member(broker, start="latest")).hold(2)
            before = {each.log_id for each in member.assigned.values()}
            await broker.publish(stage.events(3, start=3, keys=3))
            await member.take(3)
            stage.client.flushall()
            await broker.publish(stage.events(6, start=6, keys=6))
            await member.take(9)
            await member.hold(2)
            assert sorted(member.values[3:]) == list(range(6, 12))
            assert not before & {each.log_id for each in member.deliveries[3:]}, "read under an ownership that is gone"
            assert not before & {each.log_id for each in member.assigned.values()}
            assert not await member.settle(member.deliveries[3:])
            assert [spec.name for spec in await broker.topics()] == [stage.topic]
            (info,) = await broker.groups(stage.topic)
            assert len(info.partitions) == 2

    play(scene())


def test_after_flushall_the_log_names_the_cause_and_claims_no_other(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        topic = f"work-{uuid4().hex[:8]}"
        app = Onward(redis_server.url, partitions=2, lease_s=2.0)

        @app.handler(topic)
        async def work(number: int) -> None: ...

        async with asyncio.timeout(40), app.running():
            await app.publish(topic, 1, key="k")
            await until(lambda: app.readings()[0].done == 1)
            with redis_server.client() as client:
                client.flushall()
            await until(lambda: "no longer owns" in caplog.text)
        (error,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
        assert re.search(rf"keys of topic {topic} are gone \(.*{topic}/0, {topic}/1\): they were deleted or", error)
        assert "another member" not in caplog.text

    play(scene())


def test_after_flushall_without_a_publisher_the_group_is_there_again(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            stage.client.flushall()
            await member.until(lambda: bool(stage.client.exists(stage.keys.group(stage.group))), 20.0)
            await member.hold(1)

    play(scene())


@pytest.mark.parametrize("key", ["stream", "meta", "marks", "groups"])
def test_a_deleted_key_stops_nothing(redis_server: RedisServer, key: str) -> None:
    """Scenario 17: each alone. What was in a deleted stream is gone; what is published later arrives, in order."""

    async def scene() -> None:
        async with staged(redis_server, lease_s=1.5) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(3))
            await member.take(3)
            assert not await member.settle()
            stage.client.delete(getattr(stage.keys, key))
            await asyncio.sleep(0.1)
            await broker.publish(stage.events(3, start=3))
            await member.until(lambda: {3, 4, 5} <= set(member.values), 30.0)
            later = [value for value in member.values if value >= 3]
            assert list(dict.fromkeys(later)) == [3, 4, 5]
            await broker.publish(stage.events(1, start=6))
            await member.until(lambda: 6 in member.values)
            await member.until(lambda: len(member.assigned) == 1)
            await member.settle()

    play(scene())


def test_a_deleted_stream_is_another_log(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with staged(redis_server, lease_s=1.5) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(3))
            await member.take(3)
            await member.settle()
            (before,) = member.assigned.values()
            stage.client.delete(stage.keys.stream)
            await member.until(lambda: [each.log_id for each in member.assigned.values()] not in ([], [before.log_id]))
            (after,) = member.assigned.values()
            assert after.stored is None
            lag = await member.subscription.lag()
            assert [each.undelivered for each in lag.values()] == [0]

    with caplog.at_level(logging.ERROR, "onward"):
        play(scene())
    assert "its stream was deleted" in caplog.text


@pytest.mark.servers
def test_a_stream_that_is_deleted_after_a_restart_begins_again_with_the_next_publish() -> None:
    """The restart has lifted the ids above the clock, so those of the new stream lie below what was read."""

    async def scene() -> None:
        with own_server() as server:
            async with staged(server, lease_s=2.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(1)
                await broker.publish(stage.events(5))
                await member.take(5)
                await asyncio.to_thread(server.restart)
                await broker.publish(stage.events(5, start=5))
                await member.until(lambda: 9 in member.values, 60.0)
                with server.client() as client:
                    client.delete(stage.keys.stream)
                    await broker.publish(stage.events(5, start=10))
                    await member.until(lambda: set(range(10, 15)) <= set(member.values), 20.0)
                    counted: Any = client.hget(stage.keys.meta, "count")
                    assert int(counted) == 5
                lag = await member.subscription.lag()
                assert [each.undelivered for each in lag.values()] == [0]
                assert not await member.settle([each for each in member.deliveries if each.log_id == log_of(member)])

    play(scene())


def log_of(member: Member) -> str:
    (assigned,) = member.assigned.values()
    return assigned.log_id


def test_a_stream_of_others_that_begins_again_with_lower_ids_is_another_log(redis_server: RedisServer) -> None:
    async def scene() -> None:
        name = f"scan-{uuid4().hex[:8]}"
        async with staged(redis_server, lease_s=2.0) as stage:
            stage.topic, client = name, stage.client
            broker = await stage.broker(streams={name: Streams(name, key="k")})
            for n in range(3):
                client.xadd(name, {"k": "a", "n": n}, id=f"{now_ms(stage) + 60_000 + n}-0")
            member = await (await stage.member(broker)).hold(1)
            await member.take(3)
            await member.settle()
            before = log_of(member)
            with client.pipeline(transaction=True) as change:
                change.delete(name)
                change.xadd(name, {"k": "a", "n": 3})
                change.execute()
            await member.until(lambda: len(member.deliveries) == 4, 20.0)
            assert member.deliveries[3].log_id != before

    play(scene())


def test_a_deleted_list_of_groups_removes_nothing_that_a_group_has_not_read(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a group that runs, and of one that is stopped. Trimming goes on when each was started once."""
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.1)

    async def scene() -> None:
        async with staged(redis_server, lease_s=1.0, retention_s=0.0) as stage:
            broker = await stage.broker()
            for name in ("stopped", "slow"):
                await (await Member.join(broker, stage.topic, name)).subscription.close()
            slow = await (await Member.join(broker, stage.topic, "slow")).hold(1)
            for start in range(0, 2_000, 500):
                await broker.publish(stage.events(500, start=start))
            await slow.take(10)
            stage.client.delete(stage.keys.groups)
            fast = await (await Member.join(broker, stage.topic, "fast")).hold(1)
            await fast.take(2_000)
            await fast.settle()
            await fast.until(lambda: "is not trimmed" in caplog.text, 20.0)
            await slow.until(lambda: bool(stage.client.sismember(stage.keys.groups, "slow")), 20.0)
            assert stage.length == 2_000
            await slow.take(2_000)
            await slow.settle()
            stopped = await (await Member.join(broker, stage.topic, "stopped")).hold(1)
            assert stage.client.scard(stage.keys.groups) == 3
            await stopped.take(2_000)
            await stopped.settle()
            await stopped.until(lambda: stage.length < 1_000, 20.0)

    with caplog.at_level(logging.ERROR, "onward"):
        play(scene())


def test_a_dropped_group_does_not_count_for_trimming(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the list of groups was deleted before."""
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.1)

    async def scene() -> None:
        async with staged(redis_server, lease_s=1.0, retention_s=0.0) as stage:
            broker = await stage.broker()
            await (await Member.join(broker, stage.topic, "other")).subscription.close()
            member = await (await stage.member(broker)).hold(1)
            for start in range(0, 2_000, 500):
                await broker.publish(stage.events(500, start=start))
            stage.client.delete(stage.keys.groups)
            await broker.drop_group(stage.topic, "other")
            await member.take(2_000)
            await member.settle()
            await member.until(lambda: stage.length < 1_000, 20.0)

    play(scene())


def test_a_log_that_is_shorter_than_its_progress_is_another_one(redis_server: RedisServer) -> None:
    """Only the stream was restored from a backup, say: what is published now must not lie below the watermark."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(3))
            await member.take(3)
            await member.settle()
            (before,) = member.assigned.values()
            await member.subscription.close()
            stage.client.delete(stage.keys.stream)
            stage.client.xadd(stage.keys.stream, {"e": b"x"}, id="5-0")
            stage.client.xdel(stage.keys.stream, "5-0")
            again = await (await stage.member(broker)).hold(1)
            (after,) = again.assigned.values()
            assert after.log_id != before.log_id
            assert after.stored is None
            await broker.publish(stage.events(1, start=3))
            await again.take(1)

    play(scene())


def test_records_of_a_former_log_are_dead_letters(redis_server: RedisServer) -> None:
    """Their positions belong to other events now."""

    async def scene() -> None:
        async with staged(redis_server, lease_s=1.5) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(2))
            await member.take(2)
            (before,) = member.assigned.values()
            states = [State.WAITING, State.HELD]
            records = [
                make_record(each, before.log_id, state) for each, state in zip(member.deliveries, states, strict=True)
            ]
            assert not await member.subscription.settle(member.progress(), aside=records)
            stage.client.delete(stage.keys.stream)
            await member.until(lambda: [each.log_id for each in member.assigned.values()] not in ([], [before.log_id]))
            aside, partition = broker.aside(stage.group), Partition(stage.topic, 0)
            assert not await aside.load(partition, after=None, limit=10, max_bytes=1 << 20, dead=True)
            found = (await aside.scan(Filter(), None, 10)).records
            assert [each.state for each in found] == [State.DEAD] * 2
            assert all(each.failure is not None and each.failure.error == "TopicRecreated" for each in found)
            ids = [each.id for each in found]
            assert await aside.move(ids, expect=State.DEAD, to=State.WAITING, due=0.0) == 0
            assert await member.subscription.settle([], gone=ids[:1]) == []
            assert await aside.remove(ids, expect=State.DEAD) == 1

    play(scene())


def test_a_restarted_server_gives_no_position_twice_and_none_below_a_cursor(redis_server: RedisServer) -> None:
    """Scenario 8: a promoted replica that lags, or a server with a slower clock. The last writes are lost, and the
    remembered positions are ahead of the clock."""

    async def scene() -> None:
        with own_server() as server:
            async with staged(server, lease_s=6.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(1)
                await broker.publish(stage.events(2))
                await member.take(2)
                before = size(server)
                ahead = f"{now_ms(stage) + 20_000}-0"  # the lost server's clock is 20 s ahead
                set_id(stage, ahead)
                await broker.publish(stage.events(2, start=2))
                await member.take(4)
                await asyncio.to_thread(server.forget, before)
                await broker.publish(stage.events(2, start=4))
                await member.until(lambda: {4, 5} <= set(member.values), 60.0)
                check_positions(member)

    play(scene())


def check_positions(member: Member) -> None:
    """The events before the loss are 0 to 3."""
    positions: dict[int, set[str]] = {}
    for each in member.deliveries:
        positions.setdefault(each.position, set()).add(each.event.id)
    assert all(len(ids) == 1 for ids in positions.values()), "a position names two events"
    before = [each.position for each in member.deliveries if int(each.event.value or b"") < 4]
    after = [each.position for each in member.deliveries if int(each.event.value or b"") > 3]
    assert min(after) > max(before), "a new event lies below a cursor"


@pytest.mark.servers
def test_a_promoted_replica_that_lagged_gives_no_position_below_a_cursor(caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 8: the clock of the lost master was ahead, and what it had accepted last is reported as lost."""

    async def scene(pair: RedisPair) -> None:
        async with staged(pair.master, url=pair.url, lease_s=6.0) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(2))
            await member.take(2)
            assert not await member.settle()
            pair.catch_up()
            pair.lag()
            set_id(stage, f"{now_ms(stage) + 20_000}-0")
            await broker.publish(stage.events(2, start=2))
            await member.take(4)
            await asyncio.to_thread(pair.promote)
            await broker.publish(stage.events(2, start=4))
            await member.until(lambda: {4, 5} <= set(member.values), 60.0)
            check_positions(member)
            assert member.values.count(0) == 1, "what was settled before the loss ran again"
            with pair.replica.client() as client:
                length: Any = client.xlen(stage.keys.stream)
                assert length == 4, "the replica had what was not copied"
            await member.until(lambda: not member.subscription.troubles(), 20.0)

    pair = RedisPair()
    try:
        pair.start()
        with caplog.at_level(logging.ERROR, "onward"):
            play(scene(pair))
    finally:
        pair.close()
    assert "Redis lost events" in caplog.text


def test_open_lifts_an_empty_stream_too(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            client: Any = stage.client
            client.delete(stage.keys.stream)
            script = log_scripts.OPEN
            assert client.eval(script.text, 2, stage.keys.stream, stage.keys.meta, "another", 60_000) == b"ok"
            first = position_of(client.xinfo_stream(stage.keys.stream)["last-generated-id"])
            assert first is not None
            assert first > (now_ms(stage) + 50_000) << 21
            assert client.eval(script.text, 2, stage.keys.stream, stage.keys.meta, "another", 60_000) == b"ok"
            assert position_of(client.xinfo_stream(stage.keys.stream)["last-generated-id"]) == first, "lifted twice"

    play(scene())


def test_a_new_key_in_the_index_keeps_the_order_of_neighbouring_positions(redis_server: RedisServer) -> None:
    """Scenario 13: p and p + 1 are equal as Lua numbers and as scores."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(1))
            (only,) = await member.take(1)
            (assigned,) = member.assigned.values()
            base = (1 << 62) + 1
            assert float(base) == float(base + 1)
            records = []
            for position in (base + 1, base, base + 2):
                record = make_record(only, assigned.log_id, State.HELD)
                id_ = record_id(stage.group, assigned.log_id, only.partition, position)
                records.append(type(record)(**{**_fields(record), "id": id_, "position": position}))
            assert not await member.subscription.settle([], aside=records)
            aside = broker.aside(stage.group)
            loaded = await aside.load(only.partition, after=base, limit=10, max_bytes=1 << 20)
            assert [each.position for each in loaded] == [base + 1, base + 2]
            assert not await member.subscription.settle([], gone=[records[0].id])
            loaded = await aside.load(only.partition, after=None, limit=10, max_bytes=1 << 20)
            assert [each.position for each in loaded] == [base, base + 2]

    play(scene())


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


@pytest.mark.servers
def test_a_group_that_the_server_lost_is_not_a_dropped_group() -> None:
    """It begins where it began: the events before it joined are not for it."""

    async def scene() -> None:
        with own_server() as server:
            async with staged(server, lease_s=2.0) as stage:
                broker = await stage.broker()
                await broker.publish(stage.events(3))
                before = size(server)
                member = await (await stage.member(broker, start="latest")).hold(1)
                await asyncio.to_thread(server.forget, before)
                await broker.publish(stage.events(3, start=3))
                await member.take(3)
                await member.quiet(0.5)
                assert member.values == [3, 4, 5]

    play(scene())


@pytest.mark.servers
def test_a_server_without_a_file_comes_back_empty_and_all_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        with own_server("--appendonly", "no") as server:
            async with staged(server, lease_s=2.0, partitions=2) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(2)
                await broker.publish(stage.events(4, keys=4))
                await member.take(4)
                await asyncio.to_thread(server.restart)
                await broker.publish(stage.events(4, start=4, keys=4))
                await member.until(lambda: set(range(4, 8)) <= set(member.values), 60.0)

    play(scene())


@pytest.mark.servers
def test_an_aof_that_lost_its_end_is_balanced() -> None:
    """Kill -9 with the last writes cut off: what is left in the streams is handled, in order, and no settle is lost
    that was answered before the cut."""

    async def scene() -> None:
        with own_server() as server:
            async with staged(server, lease_s=2.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(1)
                await broker.publish(stage.events(50))
                await member.take(50)
                assert not await member.settle()
                kept = size(server)
                await broker.publish(stage.events(50, start=50))
                await member.take(100)
                await member.settle()
                await asyncio.to_thread(server.forget, kept)
                await until(lambda: stage.length == 50)
                await broker.publish(stage.events(20, start=100))
                await member.until(lambda: 119 in member.values, 60.0)
                assert [value for value in member.values if value >= 100] == sorted(
                    value for value in member.values if value >= 100
                )
                assert member.values.count(3) == 1, "what was settled before the cut ran again"

    play(scene())
