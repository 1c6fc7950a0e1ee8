"""Redis behind Sentinel: the master is killed or suspended, and a replica takes over. `make test-more` runs the
suites."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from onward import clock, settings
from onward.brokers import open_broker
from onward.brokers.base import Broker, Fenced
from onward.brokers.redis.address import RedisAddress
from onward.brokers.redis.link import LinkDown, ServerLink
from onward.errors import BadSetting, BrokerError
from onward.settings import Settings
from onward.testing import AsideSuite, BrokerSuite, FailureSuite
from onward.testing.scenario import Member
from tests.brokers.redis_harness import RedisHarness
from tests.brokers.redis_stage import Stage, own_server, play
from tests.servers.redis_sentinel import RedisSentinel
from tests.servers.server import free_port

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def harness(redis_sentinel: RedisSentinel, tmp_path: Path) -> Iterator[RedisHarness]:
    with redis_sentinel.master().client() as client:
        client.flushall()
    yield RedisHarness(redis_sentinel, tmp_path)
    with redis_sentinel.master().client() as client:
        client.flushall()


@pytest.mark.more
class TestSentinel(BrokerSuite):
    pass


@pytest.mark.more
class TestSentinelAside(AsideSuite):
    pass


@pytest.mark.more
class TestSentinelFailure(FailureSuite):
    pass


@asynccontextmanager
async def staged(sentinel: RedisSentinel, **options: Any) -> AsyncIterator[Stage]:
    with sentinel.master().client() as client:
        stage = Stage(sentinel.url, client, **options)
        try:
            async with asyncio.timeout(200):
                yield stage
        finally:
            await stage.close()


async def _opened(url: str, **options: Any) -> Broker:
    broker = await open_broker(settings.load(url, **options))
    await broker.close()
    return broker


async def settled(member: Member) -> None:
    """The same call again until it is answered, as the consumer does."""
    for _ in range(100):
        try:
            assert not await member.settle()
        except BrokerError:
            await member.receive()
        else:
            return
    raise AssertionError("never settled")


def test_a_master_that_is_killed_is_replaced_and_nothing_is_lost(redis_sentinel: RedisSentinel) -> None:
    """With replication=2. The owners go on, no position comes twice, and the former master comes back as a replica."""

    async def scene() -> None:
        async with staged(redis_sentinel, partitions=4, lease_s=30.0, replication=2) as stage:
            broker = await stage.broker()
            assert broker.features.durability == "replicated"
            member = await (await stage.member(broker)).hold(4)
            await broker.publish(stage.events(100, keys=20))
            await member.take(100)
            await settled(member)
            before = dict(member.assigned)
            await asyncio.to_thread(redis_sentinel.fail_over)
            await broker.publish(stage.events(100, start=100, keys=20))
            await member.take(200)
            assert sorted(member.values) == list(range(200))
            assert len({(each.partition, each.position) for each in member.deliveries}) == 200
            assert member.assigned == before
            await settled(member)
            await asyncio.to_thread(redis_sentinel.heal)
            await broker.publish(stage.events(100, start=200, keys=20))
            await member.take(300)
            assert sorted(member.values) == list(range(300))
            await member.until(lambda: not member.subscription.troubles())

    play(scene())


@pytest.mark.more
def test_no_lease_is_renewed_on_a_former_master_that_wakes_up(redis_sentinel: RedisSentinel) -> None:
    """It accepts writes for ten seconds after it wakes up. Another member owns the partition on the next master."""

    async def scene() -> None:
        async with staged(redis_sentinel, lease_s=9.0) as stage:
            first = await (await stage.member(await stage.broker())).hold(1)
            former = redis_sentinel.master()
            former.pause()
            await asyncio.to_thread(redis_sentinel.wait_for_another, former)
            former.resume()
            second = await stage.member(await stage.broker(), yields=False)
            end = clock.now() + 12.0
            while clock.now() < end:
                await first.receive()
                await second.receive()
                now = clock.now()
                sure = [each for each in (first, second) if each.assigned and each.subscription.sure_until() > now]
                assert len(sure) < 2, "two members are sure of one partition"
            assert first.assigned, "it goes on with the next master"

    play(scene())


def test_a_sentinel_that_is_dead_is_passed_over(redis_sentinel: RedisSentinel) -> None:
    redis_sentinel.sentinels[0].kill()
    assert asyncio.run(_opened(redis_sentinel.url)).features.fence


def test_a_url_that_names_no_master_is_refused(redis_sentinel: RedisSentinel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.brokers.redis.broker._OPEN_S", 0.3)
    base = redis_sentinel.url.rpartition("/")[0]
    for path in ("", "/", "/mymaster/shop"):
        with pytest.raises(BadSetting, match="name of the master behind the Sentinels"):
            asyncio.run(_opened(f"{base}{path}"))
    with pytest.raises(BrokerError, match=r"correct the name.*knows no master with the name other"):
        asyncio.run(_opened(f"{base}/other"))
    with pytest.raises(BrokerError, match=r"Sentinel 127.0.0.1:\d+: .*refused"):
        asyncio.run(_opened(f"redis+sentinel://127.0.0.1:{free_port()}/mymaster"))


def test_without_replication_a_master_that_can_be_replaced_promises_a_window(redis_sentinel: RedisSentinel) -> None:
    assert asyncio.run(_opened(redis_sentinel.url)).features.durability == "window"
    with pytest.raises(BadSetting, match=r"durability='fsync'.*has 'window'.*replication=2"):
        asyncio.run(_opened(redis_sentinel.url, durability="fsync"))
    assert asyncio.run(_opened(redis_sentinel.url, replication=3)).features.durability == "replicated"


@pytest.mark.servers
def test_a_reader_leaves_a_server_that_became_a_replica() -> None:
    """It would go on answering reads, and never with our incarnation."""
    with own_server() as server, server.client() as client:
        link = ServerLink(RedisAddress.of(server.url, Settings()))
        link.connect()
        client.replicaof("127.0.0.1", free_port())
        with pytest.raises(LinkDown, match="read-only replica"):
            link.refresh()
        assert not link.is_connected


def test_a_link_follows_the_sentinels(redis_sentinel: RedisSentinel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the former master was suspended, and nothing has cut the connection."""
    monkeypatch.setattr("onward.brokers.redis.link._CONFIRM_S", 0.0)
    link = ServerLink(RedisAddress.of(redis_sentinel.url, Settings()))
    link.connect()
    before, former = link.incarnation(""), redis_sentinel.master()
    former.pause()
    redis_sentinel.wait_for_another(former)
    former.resume()
    link.connect()
    assert link.incarnation("") != before
    link.close()


def test_a_lease_outlives_a_fail_over(redis_sentinel: RedisSentinel) -> None:
    async def scene() -> None:
        async with staged(redis_sentinel, lease_s=10.0) as stage:
            member = await (await stage.member()).hold(1)
            await asyncio.to_thread(redis_sentinel.fail_over)
            await member.until(lambda: member.subscription.sure_until() > clock.now() + 9.0)
            assert not any(isinstance(each, Fenced) for each in member.history)

    play(scene())
