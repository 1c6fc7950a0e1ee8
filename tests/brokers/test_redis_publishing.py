"""Publishing to Redis: answers that are lost, calls that arrive late, refusals in a row, limits."""

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from onward.brokers.base import Broker, Filter
from onward.brokers.redis import courier as courier_module
from onward.brokers.redis import log_scripts, topics
from onward.brokers.redis.address import RedisAddress
from onward.brokers.redis.scripts import Script
from onward.errors import (
    Backlogged,
    BadSetting,
    BrokerError,
    PartitionsDiffer,
    PublishError,
    RelayFenced,
    TooLarge,
    Unserialisable,
)
from onward.event import Partition, new_id
from onward.settings import Settings
from onward.testing.scenario import event
from tests.brokers.redis_harness import RedisHarness, harness
from tests.brokers.redis_stage import Stage, own_server, play, staged, until
from tests.servers.redis import RedisServer

__all__ = ["harness"]


async def values(stage: Stage, broker: Broker, count: int) -> list[int]:
    """What a new group reads, until there is no more."""
    member = await stage.member(broker)
    await member.take(count)
    await member.quiet(0.3)
    return member.values


def test_a_call_whose_answer_is_lost_is_sent_again_and_stored_once(redis_server: RedisServer) -> None:
    """Scenarios 1 and 16: redis-py's own retries would store it twice."""

    async def scene() -> None:
        with redis_server.proxy() as proxy:
            async with staged(redis_server, url=proxy.url, partitions=2) as stage:
                broker = await stage.broker()
                await broker.publish(stage.events(4, keys=4))
                proxy.mute()
                publishing = asyncio.ensure_future(broker.publish(stage.events(10, start=4, keys=4)))
                await until(lambda: _length(stage, 2) == 14)
                proxy.cut()
                await asyncio.sleep(0.2)
                assert not publishing.done()
                proxy.mend()
                await publishing
                assert _length(stage, 2) == 14, "what was asked again was stored twice"
                await broker.publish(stage.events(2, start=14, keys=4))
                assert _length(stage, 2) == 16

    play(scene())


def _length(stage: Stage, partitions: int) -> int:
    lengths = [stage.client.xlen(f"{{{stage.topic}:{index}}}") for index in range(partitions)]
    return sum(lengths)


def test_a_late_copy_on_an_old_connection_stores_nothing(redis_server: RedisServer) -> None:
    """Scenario 2: the first copy is held up on its way, and arrives behind the second."""

    async def scene() -> None:
        with redis_server.proxy() as proxy:
            async with staged(redis_server, url=proxy.url) as stage:
                broker = await stage.broker()
                await broker.publish(stage.events(1))
                proxy.stall()
                publishing = asyncio.ensure_future(broker.publish(stage.events(5, start=1)))
                await asyncio.sleep(6.0)  # longer than an answer may take
                proxy.mend()
                await publishing
                await broker.publish(stage.events(1, start=6))
                await asyncio.sleep(0.3)
                assert await values(stage, broker, 7) == list(range(7))

    play(scene())


def test_nothing_is_stored_behind_a_refusal_in_a_row_of_calls(harness: RedisHarness, redis_server: RedisServer) -> None:
    """Scenario 3: one window is several calls; the second is refused, so the third must not be stored."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            events = stage.events(1_400, start=1)
            with harness.refuse(events[700]), pytest.raises(PublishError) as raised:
                await broker.publish(events)
            refused = [int(each.value or b"") for each in raised.value.refused]
            assert refused == list(range(501, 1_401))
            assert stage.length == 501
            await broker.publish(raised.value.refused)
            assert await values(stage, broker, 1_401) == list(range(1_401))

    play(scene())


def test_a_server_that_forgot_the_scripts_is_given_them_again(redis_server: RedisServer) -> None:
    """Scenario 4: NOSCRIPT between two windows, and for every other script too."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            member = await stage.member(broker)
            for n in range(3):
                await broker.publish(stage.events(1, start=n))
                stage.client.script_flush()
                await member.take(n + 1)
                assert not await member.settle()
            assert member.values == [0, 1, 2]

    play(scene())


def test_scripts_that_come_and_go_between_two_calls_are_no_loss(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """NOSCRIPT for the first call of a window, and a gap for the second, which found the script again."""
    ended = threading.Event()

    def come_and_go() -> None:
        with redis_server.client() as client:
            while not ended.is_set():
                client.script_flush()
                client.script_load(log_scripts.PUBLISH.text)

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            for n in range(40):
                await broker.publish(stage.events(1_500, start=1_500 * n))
            assert stage.length == 60_000

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        play(scene())
    finally:
        ended.set()
        thread.join()
    assert "lost events" not in caplog.text


def test_a_topic_that_cannot_be_declared_again_for_now_was_not_dropped(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            stage.client.flushall()
            with monkeypatch.context() as patch:
                patch.setattr(topics, "DECLARE", Script("return redis.error_reply('TRYAGAIN by the test')"))
                publishing = asyncio.ensure_future(broker.publish(stage.events(2, start=1)))
                await asyncio.sleep(0.5)
                assert not publishing.done()
            await publishing
            assert await values(stage, broker, 2) == [1, 2]

    play(scene())


def test_what_got_no_answer_is_unknown_and_a_late_copy_of_it_stores_nothing_behind_newer_events(
    redis_server: RedisServer,
) -> None:
    """A number never stands for other events: the next call would be taken for the one that is still on its way."""

    async def scene() -> None:
        with redis_server.proxy() as proxy:
            async with staged(redis_server, url=proxy.url, publish_timeout_s=1.5) as stage:
                broker = await stage.broker()
                await broker.publish(stage.events(1))
                proxy.stall()
                with pytest.raises(PublishError) as raised:
                    await broker.publish(stage.events(2, start=1))
                assert [int(each.value or b"") for each in raised.value.unknown] == [1, 2]
                direct = await stage.broker(redis_server.url)
                assert direct is not broker
                proxy.cut()
                proxy.mend()
                await broker.publish(stage.events(2, start=3))
                found = await values(stage, broker, 3)
                assert found in ([0, 3, 4], [0, 1, 2, 3, 4]), "an event of the key was stored behind a newer one"

    play(scene())


def test_a_producer_whose_call_is_unknown_is_sealed(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            courier = broker._publisher._courier  # type: ignore[attr-defined]
            producer = courier._producers[Partition(stage.topic, 0)]
            former = producer.name
            producer.rename()
            await broker.publish(stage.events(1, start=1))
            assert int(stage.client.get(stage.keys.producer(former)) or 0) > 1 << 50
            assert not producer.sealing
            assert producer.name != former

    play(scene())


def test_a_publisher_that_closes_leaves_no_key_behind_unless_a_call_is_in_doubt(redis_server: RedisServer) -> None:
    async def scene() -> None:
        with redis_server.proxy() as proxy:
            async with staged(redis_server, url=proxy.url) as stage:
                clean, doubtful = await stage.broker(), await stage.broker()
                await clean.publish(stage.events(3))
                await clean.close()
                assert not list(stage.client.scan_iter(f"{stage.keys.producer('')}*"))
                await doubtful.publish(stage.events(1, start=3))
                proxy.mute()
                publishing = asyncio.ensure_future(doubtful.publish(stage.events(1, start=4)))
                await until(lambda: stage.length == 5)
                proxy.cut()
                proxy.mend()
                await publishing
                await doubtful.close()
                (left,) = stage.client.scan_iter(f"{stage.keys.producer('')}*")
                assert 0 < int(stage.client.ttl(left)) <= 3_600, "a late copy would be stored"
                assert stage.length == 5

    play(scene())


def test_a_server_that_is_away_refuses_in_time_and_nothing_of_it_is_stored(redis_server: RedisServer) -> None:
    async def scene() -> None:
        with own_server() as server:
            async with staged(server, publish_timeout_s=1.0) as stage:
                broker = await stage.broker()
                await broker.publish(stage.events(1))
                await asyncio.to_thread(server.kill)
                with pytest.raises(PublishError, match="publish_timeout_s=1") as raised:
                    await broker.publish(stage.events(2, start=1))
                assert len(raised.value.refused) + len(raised.value.unknown) == 2
                await asyncio.to_thread(server.start)
                await broker.publish(stage.events(1, start=3))
                found = await values(stage, broker, 2)
                assert found == [0, 3]

    play(scene())


async def _flood(stage: Stage, broker: Broker, *, keys: int) -> None:
    for _ in range(1_000):
        await broker.publish(stage.events(10, keys=keys))


def test_a_hung_connection_takes_no_longer_than_the_timeout(redis_server: RedisServer) -> None:
    async def scene() -> None:
        with redis_server.proxy() as proxy:
            async with staged(redis_server, url=proxy.url, publish_timeout_s=1.0) as stage:
                broker = await stage.broker()
                await broker.publish(stage.events(1))
                proxy.stall()
                started = time.monotonic()
                with pytest.raises(PublishError, match="does not answer"):
                    await broker.publish(stage.events(1, start=1))
                assert time.monotonic() - started < 3.0
                await asyncio.to_thread(proxy.mend)

    play(scene())


def test_an_incarnation_that_another_program_removed_is_written_again(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, publish_timeout_s=3.0) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            stage.client.hdel(stage.keys.meta, "inc")
            await broker.publish(stage.events(1, start=1))
            assert await values(stage, broker, 2) == [0, 1]

    play(scene())


def test_an_answer_that_comes_again_and_again_does_not_make_the_publisher_spin(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with staged(redis_server, publish_timeout_s=1.0) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            monkeypatch.setattr(log_scripts, "OPEN", Script("return 'ok'"))
            stage.client.hset(stage.keys.meta, "inc", "forged")
            calls = _calls(stage)
            with pytest.raises(PublishError, match=r"answers 'void' .* again and again.*restore"):
                await broker.publish(stage.events(1, start=1))
            assert _calls(stage) - calls < 200

    play(scene())


def _calls(stage: Stage) -> int:
    stats: Any = stage.client.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


def test_the_backlog_of_a_topic_has_a_limit(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=2, max_backlog_bytes=40_000) as stage:
            broker = await stage.broker()
            with pytest.raises(Backlogged, match=r"no group reads it.*start its consumers") as raised:
                await _flood(stage, broker, keys=10)
            assert raised.value.refused
            stored = _length(stage, 2)
            assert 200 < stored <= 40_000 // 60
            member = await stage.member(broker)
            await member.take(stored)
            with pytest.raises(Backlogged, match=r"group group is the furthest behind.*onward groups drop group"):
                await broker.publish(stage.events(10, keys=10))
            assert not await member.settle()
            await broker.publish(stage.events(10, keys=10))
            await member.take(stored + 10)

    play(scene())


def test_one_busy_partition_may_use_the_whole_limit(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=8, max_backlog_bytes=40_000) as stage:
            broker = await stage.broker()
            with pytest.raises(Backlogged):
                await _flood(stage, broker, keys=1)
            assert 250 < _length(stage, 8) < 40_000 // 60, "a partition was held to its equal share"

    play(scene())


def test_a_relay_is_fenced_in_every_partition(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=4) as stage:
            old, new = await stage.broker(), await stage.broker()
            shard = f"{new_id()}/0"
            await old.publish(stage.events(1), relay=(shard, 1))
            await new.publish(stage.events(1, start=1), relay=(shard, (1 << 63) - 1))
            with pytest.raises(RelayFenced, match=str((1 << 63) - 1)) as raised:
                await old.publish(stage.events(8, start=2, keys=8), relay=(shard, (1 << 63) - 2))
            assert len(raised.value.refused) == 8

    play(scene())


def test_a_relay_that_loses_the_race_is_fenced_by_the_partition(redis_server: RedisServer) -> None:
    """The new relay publishes between the old one's two looks."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            shard = f"{new_id()}/0"
            await broker.publish(stage.events(1), relay=(shard, 1))
            stage.client.hset(stage.keys.relays, shard, f"{2:019d}")
            with pytest.raises(RelayFenced, match="fence 2"):
                await broker.publish(stage.events(1, start=1), relay=(shard, 1))
            await broker.publish(stage.events(1, start=1))
            assert stage.length == 2

    play(scene())


def test_another_partition_count_stops_a_publisher(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            other = await stage.broker(partitions=3)
            await other.drop_topic(stage.topic)
            await other.publish(stage.events(3, keys=3))
            with pytest.raises(PublishError, match=r"3 partitions.*expects 1"):
                await broker.publish(stage.events(1))
            with pytest.raises(PartitionsDiffer):
                await broker.publish(stage.events(1))

    play(scene())


def test_another_hash_version_is_refused(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            await (await stage.broker()).publish(stage.events(1))
            stage.client.hset(f"{{{stage.topic}}}", "hash", "md5")
            broker = await stage.broker()
            for refused in (broker.publish(stage.events(1)), stage.member(broker)):
                with pytest.raises(PartitionsDiffer, match=r"md5.*murmur2"):
                    await refused
            assert stage.topic in [spec.name for spec in await broker.topics()]
            assert not (await broker.aside(stage.group).scan(Filter(), None, 10)).records, "it stopped operators"
            await broker.drop_topic(stage.topic)
            assert not await broker.groups(stage.topic)

    play(scene())


def test_an_event_that_is_too_large_is_refused_before_anything_is_sent(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, max_event_bytes=100) as stage:
            broker = await stage.broker()
            with pytest.raises(TooLarge, match="max_event_bytes is 100"):
                await broker.publish([*stage.events(1), event(stage.topic, "k" * 101, 1)])
            assert stage.length == 0

    play(scene())


def test_idle_producers_take_a_new_name(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server forgets a producer after an hour; its number would be a gap, and look like a loss."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            for key in stage.client.scan_iter(f"{stage.keys.producer('')}*"):
                stage.client.delete(key)
            monkeypatch.setattr(courier_module, "_ASK_AGAIN_S", 0.0001)
            producers = broker._publisher._courier._producers  # type: ignore[attr-defined]
            before = producers[Partition(stage.topic, 0)].name
            monkeypatch.setattr(courier_module, "_ASK_AGAIN_S", 60.0)
            producers[Partition(stage.topic, 0)].used -= 61.0
            await broker.publish(stage.events(1, start=1))
            assert producers[Partition(stage.topic, 0)].name != before
            assert stage.length == 2

    play(scene())


def test_a_lost_window_is_reported_and_publishing_goes_on(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The producer's last number is not there any more: the server has lost what it accepted."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            for n in range(3):
                await broker.publish(stage.events(1, start=n))
            (key,) = stage.client.scan_iter(f"{stage.keys.producer('')}*")
            stage.client.set(key, 1)
            with caplog.at_level(logging.ERROR, "onward"):
                await broker.publish(stage.events(1, start=3))
            assert "lost events" in caplog.text
            assert "its last 2 publish calls" in caplog.text
            assert await values(stage, broker, 4) == [0, 1, 2, 3]

    play(scene())


def test_the_client_has_no_retries_of_its_own() -> None:
    address = RedisAddress.of("redis://localhost/0", Settings(url="redis://localhost/0"))
    assert address.connection(1.0).retry.get_retries() == 0
    for name in ("retry", "retry_on_timeout", "decode_responses", "protocol", "socket_timeout"):
        with pytest.raises(BadSetting, match=name):
            RedisAddress.of("redis://localhost", Settings(client={name: 1}))  # type: ignore[arg-type]


def test_calls_go_out_in_the_order_in_which_they_entered_while_a_topic_is_looked_up(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await asyncio.gather(*[broker.publish(stage.events(1, start=n)) for n in range(30)])
            assert await values(stage, broker, 30) == list(range(30))

    play(scene())


def test_an_event_that_cannot_be_read_back_is_refused(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            for odd in (event(stage.topic, 7, 1), event(stage.topic, "\ud800", 1)):  # type: ignore[arg-type]
                with pytest.raises(Unserialisable):
                    await broker.publish([odd])
            assert stage.length == 0

    play(scene())


def test_a_topic_without_auto_declare_is_refused(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, auto_declare=False) as stage:
            broker = await stage.broker()
            with pytest.raises(BrokerError, match="auto_declare is off"):
                await broker.publish(stage.events(1))
            assert not stage.client.exists(stage.keys.meta)

    play(scene())
