"""Reading from Redis: the doorbell, foreign entries, ids at their limits, fairness, trimming and lag."""

import asyncio
import threading
import time
from typing import Any

import pytest

from onward.brokers.base import PASSING, Broker
from onward.brokers.redis import trimmer
from onward.brokers.redis.address import RedisAddress
from onward.brokers.redis.doorbell import RedisDoorbell
from onward.brokers.redis.link import ServerLink
from onward.brokers.redis.positions import position_of
from onward.errors import BrokerError
from onward.event import Partition
from onward.settings import Settings
from onward.testing.scenario import event
from tests.brokers.redis_stage import Stage, now_ms, play, set_id, staged, until
from tests.servers.redis import RedisServer


def _address(server: RedisServer) -> RedisAddress:
    return RedisAddress.of(server.url, Settings(url=server.url))


def test_the_doorbell_rings_for_an_event_between_the_read_and_the_block(redis_server: RedisServer) -> None:
    """Scenario 18: it listens from the ids that were read, not from the end."""
    stage_key = "{doorbell:0}"
    with redis_server.client() as client:
        client.delete(stage_key)
        read_to = client.xadd(stage_key, {"e": "1"})
        client.xadd(stage_key, {"e": "2"})  # no reader waits yet
        rung, told = threading.Event(), threading.Event()
        bell = RedisDoorbell(ServerLink(_address(redis_server)), ["{doorbell}:news:g"], ring=rung.set, tell=told.set)
        bell.start("test")
        try:
            bell.arm({stage_key: read_to.decode()})
            assert rung.wait(5.0)
            assert told.wait(5.0), "news before the connection is not missed"
        finally:
            bell.stop()
            client.delete(stage_key)


def test_the_doorbell_rings_for_a_stream_that_was_added_while_it_blocked(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.delete("{doorbell:1}")
        rung = threading.Event()
        bell = RedisDoorbell(
            ServerLink(_address(redis_server)), ["{doorbell}:news:h"], ring=rung.set, tell=lambda: None
        )
        bell.start("test")
        try:
            time.sleep(0.3)  # it blocks on the news alone
            begun = time.monotonic()
            blocked = bell.arm({"{doorbell:1}": "0-0"})
            assert blocked, "it blocks without the new stream"
            client.client_unblock(blocked)
            client.xadd("{doorbell:1}", {"e": "1"})
            assert rung.wait(5.0)
            assert time.monotonic() - begun < 0.9, "it waited for the end of its block"
        finally:
            bell.stop()
            client.delete("{doorbell:1}")


def test_a_publish_reaches_a_waiting_receive_at_once(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=4) as stage:
            broker, other = await stage.broker(), await stage.broker()
            member = await (await stage.member(broker)).hold(4)
            await member.receive(wait_s=0.3)
            took = []
            for n in range(8):
                waiting = asyncio.ensure_future(member.take(n + 1))
                await asyncio.sleep(0.15)
                begun = time.monotonic()
                await other.publish([event(stage.topic, f"key-{n}", n)])
                await waiting
                took.append(time.monotonic() - begun)
            assert sorted(took)[4] < 0.2, f"the median of {took}"

    play(scene())


def test_an_entry_of_another_program_stops_its_partition_and_names_itself(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=2) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(2)
            await broker.publish([event(stage.topic, f"key-{n}", n) for n in range(10)])
            await member.take(10)
            client: Any = stage.client
            foreign = client.xadd(stage.keys.stream, {"job": "7", "stage": "done"}).decode()
            await broker.publish([event(stage.topic, f"key-{n}", n) for n in range(10, 20)])
            await member.until(lambda: any(foreign in each for each in member.subscription.troubles()))
            (trouble,) = member.subscription.troubles()
            assert f"{stage.topic}/0" in trouble
            assert f"XDEL {stage.keys.stream} {foreign}" in trouble
            assert {each.partition.index for each in member.deliveries[10:]} <= {1}
            client.xdel(stage.keys.stream, foreign)
            await member.take(20)
            assert sorted(member.values) == list(range(20))
            assert not member.subscription.troubles()

    play(scene())


@pytest.mark.parametrize("fields", [{"e": b"\xc1"}, {"e": b""}, {"e": b"\x93\x01\x02\x03"}])
def test_an_entry_that_cannot_be_decoded_stops_its_partition(
    redis_server: RedisServer, fields: dict[str, bytes]
) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            client: Any = stage.client
            client.xadd(stage.keys.stream, fields)
            await member.until(lambda: any("stands still" in each for each in member.subscription.troubles()))
            assert not member.deliveries

    play(scene())


def test_an_id_that_does_not_fit_stops_its_partition(redis_server: RedisServer) -> None:
    """Scenario 12: it is never skipped."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(1))
            await member.take(1)
            client: Any = stage.client
            data = client.xrange(stage.keys.stream)[0][1][b"e"]
            client.xadd(stage.keys.stream, {"e": data}, id=f"{1 << 42}-0")
            await member.until(lambda: any(f"{1 << 42}-0" in each for each in member.subscription.troubles()))
            assert len(member.deliveries) == 1

    play(scene())


def test_a_clock_that_went_back_steps_to_the_next_millisecond_in_time(redis_server: RedisServer) -> None:
    """Scenario 12: while the clock is behind, Redis counts seq up, and a position has room for 2^21 of them."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(1))
            ahead_ms = now_ms(stage) + 3_600_000
            set_id(stage, f"{ahead_ms}-{(1 << 20) - 2}")
            for n in range(1, 5):
                await broker.publish(stage.events(1, start=n))
            await member.take(5)
            assert member.values == list(range(5))
            client: Any = stage.client
            ids = [id_.decode() for id_, _ in client.xrange(stage.keys.stream)][1:]
            assert ids[0] == f"{ahead_ms}-{(1 << 20) - 1}"
            assert ids[2] == f"{ahead_ms + 1}-1"
            positions = [each.position for each in member.deliveries]
            assert positions == sorted(set(positions))
            assert not await member.settle()
            lag = await member.subscription.lag()
            assert [each.undelivered for each in lag.values()] == [0]
            await member.subscription.pause(list(member.assigned))
            await member.receive(wait_s=0.0)
            await broker.publish(stage.events(1, start=5))
            (lag_now,) = (await member.subscription.lag()).values()
            assert (lag_now.undelivered, lag_now.oldest_age_s) == (1, 0.0), "an age in the future is 0"

    play(scene())


def test_a_full_partition_starves_no_other(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=4) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(20_000))
            await broker.publish([event(stage.topic, f"other-{n}", n) for n in range(40)])
            member = await (await stage.member(broker)).hold(4)
            hot = _hot(stage)
            await member.until(lambda: sum(each.partition != hot for each in member.deliveries) >= 20)
            assert len(member.deliveries) < 5_000, "the others waited for the full one"

    play(scene())


def _hot(stage: Stage) -> Partition:
    lengths: list[Any] = [stage.client.xlen(f"{{{stage.topic}:{index}}}") for index in range(4)]
    return Partition(stage.topic, lengths.index(max(lengths)))


def test_large_events_are_read_a_few_at_a_time(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """XRANGE has no limit of bytes: the size of what was read last sets how many are asked for."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            big = "x" * 100_000
            for n in range(0, 200, 20):
                await broker.publish([event(stage.topic, "a", each, headers={"big": big}) for each in range(n, n + 20)])
            asked: list[int] = []
            exchange = ServerLink.call

            def call(self: ServerLink, *commands: Any, copies: int = 0) -> list[Any]:
                asked.extend(each[-1] for each in commands if each[0] == "XRANGE")
                return exchange(self, *commands, copies=copies)

            monkeypatch.setattr(ServerLink, "call", call)
            member = await (await stage.member(broker)).hold(1)
            while len(member.deliveries) < 200:
                await member.receive(max_bytes=1 << 20)
            assert member.values == list(range(200))
            assert max(asked) <= 16, "more than the first look was asked for"

    play(scene())


def test_large_events_behind_many_small_ones_do_not_fill_the_memory(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches have grown with the small events. The server says how large the largest event is."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await _filled(stage, broker, 3_000)
            big = "x" * 100_000
            for n in range(3_000, 3_200, 20):
                await broker.publish([event(stage.topic, "a", each, headers={"big": big}) for each in range(n, n + 20)])
            sizes: list[int] = []
            exchange = ServerLink.call

            def call(self: ServerLink, *commands: Any, copies: int = 0) -> list[Any]:
                replies = exchange(self, *commands, copies=copies)
                for command, reply in zip(commands, replies, strict=True):
                    if command[0] == "XRANGE":
                        sizes.append(sum(len(data) for _, (_, data) in reply))
                return replies

            monkeypatch.setattr(ServerLink, "call", call)
            member = await (await stage.member(broker)).hold(1)
            while len(member.deliveries) < 3_200:
                await member.receive(max_bytes=1 << 20)
            assert member.values == list(range(3_200))
            assert max(sizes) < 5 << 20, "a reply was much larger than a receive may be"

    play(scene())


async def _filled(stage: Stage, broker: Broker, count: int) -> None:
    for start in range(0, count, 200):
        await broker.publish(stage.events(200, start=start))


def test_trimming_removes_what_every_group_has_finished_and_nothing_else(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.1)

    async def scene() -> None:
        async with staged(redis_server, retention_s=0.0, lease_s=1.0) as stage:
            broker = await stage.broker()
            await _filled(stage, broker, 4_000)
            fast = await (await stage.member(broker)).hold(1)
            stage.group = "slow"
            slow = await (await stage.member(broker)).hold(1)
            await fast.take(4_000)
            assert not await fast.settle()
            await slow.take(4_000)
            assert not await slow.settle(slow.deliveries[:2_000])
            await until(lambda: stage.length < 2_900)
            await asyncio.sleep(1.0)
            assert stage.length >= 2_000, "what a group had not finished was trimmed"
            client: Any = stage.client
            first = position_of(client.xrange(stage.keys.stream, count=1)[0][0])
            assert first is not None
            assert first <= slow.deliveries[2_000].position
            await slow.subscription.close()
            slow = await (await stage.member(broker)).hold(1)
            await slow.take(2_000)
            assert slow.values == list(range(2_000, 4_000))
            assert not await slow.settle()
            await until(lambda: stage.length < 1_000)

    play(scene())


def test_without_a_group_nothing_is_trimmed_and_a_passing_one_holds_back_nothing(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.1)

    async def scene() -> None:
        async with staged(redis_server, retention_s=0.0, lease_s=10.0) as stage:
            broker = await stage.broker()
            await _filled(stage, broker, 2_000)
            stage.group = f"{PASSING}tail.1"
            tail = await (await stage.member(broker)).hold(1)
            await asyncio.sleep(1.0)
            assert stage.length == 2_000
            assert 0 < int(stage.client.pttl(stage.keys.group(stage.group))) <= 3_600_000
            stage.group = "group"
            member = await (await stage.member(broker)).hold(1)
            await member.take(2_000)
            assert not await member.settle()
            await until(lambda: stage.length < 1_000)
            assert len(await broker.groups(stage.topic)) == 2
            await member.subscription.close()
            with pytest.raises(BrokerError, match=r"tail\.1.*in use"):
                await broker.drop_topic(stage.topic)
            await tail.subscription.close()
            assert [info.group for info in await broker.groups(stage.topic)] == ["group"]
            assert not [key for key in stage.client.scan_iter("*tail.1*") if b":p:" not in key]

    play(scene())


def test_retention_keeps_so_many_bytes_of_what_is_finished(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.1)

    async def scene() -> None:
        async with staged(redis_server, retention_bytes=100_000, lease_s=1.0) as stage:
            broker = await stage.broker()
            await _filled(stage, broker, 4_000)
            member = await (await stage.member(broker)).hold(1)
            await member.take(4_000)
            client: Any = stage.client
            size = len(client.xrange(stage.keys.stream, count=1)[0][1][b"e"])
            assert not await member.settle()
            await until(lambda: stage.length <= 100_000 // size)
            await asyncio.sleep(1.0)
            assert stage.length > 100_000 // size - 800, "more was trimmed than the limit asks for"

    play(scene())


def test_lag_counts_what_is_left_after_a_trim(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own figure is wrong then."""
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.1)

    async def scene() -> None:
        async with staged(redis_server, retention_s=0.0, lease_s=1.0) as stage:
            broker = await stage.broker()
            await _filled(stage, broker, 3_000)
            member = await (await stage.member(broker)).hold(1)
            (lag,) = (await member.subscription.lag()).values()
            assert lag.undelivered == 3_000
            await member.take(3_000)
            await member.settle()
            await until(lambda: stage.length < 1_000)
            await member.subscription.pause(list(member.assigned))
            await member.receive(wait_s=0.0)
            await broker.publish(stage.events(700, start=3_000))
            (lag,) = (await member.subscription.lag()).values()
            assert lag.undelivered == 700
            assert lag.oldest_age_s is not None
            assert 0.0 <= lag.oldest_age_s < 30.0

    play(scene())


def test_a_dropped_topic_leaves_no_keys(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=3) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(3)
            await broker.publish(stage.events(30, keys=10), relay=("shard/0", 1))
            await member.take(30)
            await member.settle()
            await member.subscription.close()
            await broker.drop_topic(stage.topic)
            left = {key.decode() for key in stage.client.scan_iter(f"{{{stage.topic}*")}
            assert all(":p:" in key for key in left), f"left behind: {left}"  # producers are forgotten in an hour
            assert all(int(stage.client.ttl(key)) > 0 for key in left)

    play(scene())


def test_a_group_starts_at_a_time_by_the_servers_clock(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(2))
            await asyncio.sleep(0.05)
            at = now_ms(stage) / 1000
            await broker.publish(stage.events(2, start=2))
            member = await stage.member(broker, start=at)
            await member.take(2)
            assert member.values == [2, 3]
            for stage.group, later_s in (("soon", 3_600.0), ("far", 1e12)):
                far = await (await stage.member(broker, start=at + later_s)).hold(1)
                await far.quiet(0.3)
                (assigned,) = far.assigned.values()
                assert assigned.log_id == member.assigned[assigned.partition].log_id

    play(scene())


def test_partitions_without_events_are_not_behind(redis_server: RedisServer) -> None:
    """Not if they never had one, nor if the last id of the stream was lifted after a restart."""

    async def scene() -> None:
        async with staged(redis_server, partitions=4) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(4)
            await broker.publish(stage.events(1))
            await member.take(1)
            await member.settle()
            client: Any = stage.client
            client.execute_command("XSETID", stage.keys.stream, f"{int(time.time() + 60) * 1000}-0")
            (info,) = await broker.groups(stage.topic)
            assert all(each.watermark == each.end for each in info.partitions.values()), info.partitions
            await broker.publish(stage.events(1, start=1))
            (info,) = await broker.groups(stage.topic)
            assert sum(each.end is not None and each.watermark < each.end for each in info.partitions.values()) == 1

    play(scene())
