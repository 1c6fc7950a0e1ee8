"""A Redis Cluster: slots that move, masters that die, nodes that do not answer. `make test-more` runs the suites."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from onward import clock, settings
from onward.brokers import open_broker
from onward.brokers.base import Broker, Fenced
from onward.brokers.core.partitioner import partition_of
from onward.brokers.redis.keys import PartitionKeys, TopicKeys
from onward.errors import BadSetting, BrokerError
from onward.event import Partition
from onward.testing import AsideSuite, BrokerSuite, FailureSuite
from onward.testing.scenario import Member, event
from tests.brokers.redis_harness import RedisHarness
from tests.brokers.redis_stage import Stage, play
from tests.servers.redis import RedisServer
from tests.servers.redis_cluster import RedisCluster, RedisNode

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def harness(redis_cluster: RedisCluster, tmp_path: Path) -> Iterator[RedisHarness]:
    redis_cluster.flush()
    yield RedisHarness(redis_cluster, tmp_path)
    redis_cluster.flush()


@pytest.mark.more
class TestCluster(BrokerSuite):
    pass


@pytest.mark.more
class TestClusterAside(AsideSuite):
    pass


@pytest.mark.more
class TestClusterFailure(FailureSuite):
    pass


@asynccontextmanager
async def staged(cluster: RedisCluster, **options: Any) -> AsyncIterator[Stage]:
    with cluster.client() as client:
        stage = Stage(cluster.url, client, **options)
        try:
            async with asyncio.timeout(200):
                yield stage
        finally:
            await stage.close()


def slot_of(stage: Stage, index: int) -> int:
    slot: int = key_slot(PartitionKeys.own(Partition(stage.topic, index)).stream.encode())
    return slot


def by_node(cluster: RedisCluster, stage: Stage, partitions: int) -> dict[RedisNode, list[int]]:
    """The partitions of the topic, by the node that has them."""
    found: dict[RedisNode, list[int]] = {}
    for index in range(partitions):
        found.setdefault(cluster.owner(slot_of(stage, index)), []).append(index)
    return found


def fenced(member: Member) -> set[int]:
    messages = [each for each in member.history if isinstance(each, Fenced)]
    return {partition.index for message in messages for partition in message.partitions}


def test_events_of_all_nodes_arrive_in_key_order(redis_cluster: RedisCluster) -> None:
    async def scene() -> None:
        async with staged(redis_cluster, partitions=9) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(9)
            assert len(by_node(redis_cluster, stage, 9)) == 3
            await broker.publish(stage.events(300, keys=30))
            await member.take(300)
            assert not await member.settle()
            for n in range(5):  # the doorbell of each stream rings
                begun = clock.now()
                await broker.publish(stage.events(9, start=300 + 9 * n, keys=9))
                await member.take(309 + 9 * n)
                assert clock.now() - begun < 0.8
            assert sorted(member.values) == list(range(345))
            assert not member.subscription.troubles()

    play(scene())


@pytest.mark.parametrize("has_list", [True, False])
def test_a_node_that_does_not_answer_does_not_stop_the_partitions_of_the_others(
    redis_cluster: RedisCluster, *, has_list: bool
) -> None:
    """Its leases lapse alone. When it answers again, its partitions come back."""

    async def scene() -> None:
        async with staged(redis_cluster, partitions=9, lease_s=6.0) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(9)
            await broker.publish(stage.events(90, keys=30))
            await member.take(90)
            nodes = by_node(redis_cluster, stage, 9)
            lists = redis_cluster.owner(key_slot(TopicKeys(stage.topic).topic.encode()))  # the group's members
            silent, its = next((node, its) for node, its in nodes.items() if (node is lists) == has_list)
            with only_fails_over_by_hand(redis_cluster, silent):
                silent.pause()
                others = [event(stage.topic, key, n) for n, key in enumerate(keys_at(nodes, silent, 9), 1_000)]
                await broker.publish(others)
                await member.until(lambda: set(member.values) >= set(range(1_000, 1_000 + len(others))))
                await member.until(lambda: fenced(member) == set(its))
                assert any(f"127.0.0.1:{silent.port}" in each for each in member.subscription.troubles())
                for n in range(5):
                    begun = clock.now()
                    await broker.publish([event(stage.topic, others[0].key, 2_000 + n)])
                    await member.until(lambda n=n: 2_000 + n in member.values)  # type: ignore[misc]
                    assert clock.now() - begun < 2.0, "the node that is silent holds up another one"
                assert not await member.settle()
                assert {each.index for each in member.assigned} == set(range(9)) - set(its)
                silent.resume()
            await member.hold(9)
            assert fenced(member) == set(its)
            await member.until(lambda: not member.subscription.troubles())

    play(scene())


@contextmanager
def only_fails_over_by_hand(cluster: RedisCluster, master: RedisNode) -> Iterator[None]:
    """Its replica does not replace it, and the other masters go on without its slots."""
    replica = cluster.replica(master)
    try:
        configure(cluster, "cluster-require-full-coverage", "no")
        with replica.client() as client:
            client.config_set("cluster-replica-no-failover", "yes")
        yield
    finally:
        master.resume()
        configure(cluster, "cluster-require-full-coverage", "yes")
        with replica.client() as client:
            client.config_set("cluster-replica-no-failover", "no")


def configure(cluster: RedisCluster, name: str, value: str) -> None:
    for node in cluster.nodes:
        with node.client() as client:
            client.config_set(name, value)


def keys_at(nodes: dict[RedisNode, list[int]], silent: RedisNode, partitions: int) -> list[str]:
    """Keys whose partitions are on other nodes."""
    elsewhere = {index for node, its in nodes.items() if node is not silent for index in its}
    return [key for key in map(str, range(60)) if partition_of(key, partitions) in elsewhere]


def test_a_master_that_dies_is_replaced_and_nothing_is_lost(redis_cluster: RedisCluster) -> None:
    """The replica has what was confirmed by it. Owners go on; no position comes twice."""

    async def scene() -> None:
        async with staged(redis_cluster, partitions=6, lease_s=30.0, replication=2) as stage:
            broker = await stage.broker()
            assert broker.features.durability == "replicated"
            member = await (await stage.member(broker)).hold(6)
            await broker.publish(stage.events(120, keys=30))
            await member.take(60)
            before = dict(member.assigned)
            await asyncio.to_thread(redis_cluster.fail_over, slot_of(stage, 0))
            heal = asyncio.to_thread(redis_cluster.heal)  # its replica must be there again for replication=2
            await heal
            await broker.publish(stage.events(120, start=120, keys=30))
            await member.take(240)
            assert sorted(member.values) == list(range(240))
            assert member.assigned == before, "an owner goes on"
            places = {(each.partition, each.position) for each in member.deliveries}
            assert len(places) == 240
            await settled(member)

    play(scene())


async def settled(member: Member) -> None:
    """The same call again until it is answered, as the consumer does."""
    for _ in range(50):
        try:
            assert not await member.settle()
        except BrokerError:
            await member.receive()
        else:
            return
    raise AssertionError("never settled")


def test_renewals_go_on_while_a_slot_moves_key_by_key(redis_cluster: RedisCluster) -> None:
    """Scenario 11. A script with a key that never was, or with keys on both sides, has to wait; a renewal has one key.
    On the other node everything has another incarnation: the owner goes on, and the same number is stored once."""

    async def scene() -> None:
        async with staged(redis_cluster, partitions=2, lease_s=2.0) as stage:
            broker, publishers = await stage.broker(), [await stage.broker(), await stage.broker()]
            member = await (await stage.member(broker)).hold(2)
            here, there = (next(key for key in map(str, range(9)) if partition_of(key, 2) == n) for n in (0, 1))
            await broker.publish([event(stage.topic, here, n) for n in range(5)])
            for publisher in publishers:  # they know the topic now
                await publisher.publish([event(stage.topic, there, 99)])
            await member.take(7)
            before, slot = dict(member.assigned), slot_of(stage, 0)
            source = redis_cluster.owner(slot)
            target = next(node for node in redis_cluster.masters() if node is not source)
            keys = stage.keys
            for n, moved in enumerate((keys.group(stage.group), keys.stream)):
                with redis_cluster.moving(slot, target) as move:
                    move.move(moved)  # the others stay; the list of notices and the publisher's key never were
                    end = clock.now() + 5.0  # more than two leases
                    publishing = asyncio.ensure_future(publishers[n].publish([event(stage.topic, here, 5 + n)]))
                    while clock.now() < end:
                        await member.receive()
                        assert not await member.settle()
                    assert not publishing.done()
                    assert member.assigned == before
                await publishing
                source, target = target, source
            await member.take(9)
            assert [value for value in member.values if value != 99] == list(range(7))
            assert member.assigned == before
            await settled(member)

    play(scene())


def test_a_slot_that_has_moved_makes_others_wait_for_a_lease(redis_cluster: RedisCluster) -> None:
    """The node it is on has another incarnation, so the last claim may be lost."""

    async def scene() -> None:
        async with staged(redis_cluster, lease_s=3.0) as stage:
            broker = await stage.broker()
            first = await (await stage.member(broker)).hold(1)
            await first.subscription.close()
            slot = slot_of(stage, 0)
            source = redis_cluster.owner(slot)
            target = next(node for node in redis_cluster.masters() if node is not source)
            with redis_cluster.moving(slot, target):
                pass
            begun = clock.now()
            second = await (await stage.member(broker)).hold(1)
            assert clock.now() - begun > 3.0
            (assigned,) = second.assigned.values()
            assert assigned.unclean

    play(scene())


def test_a_script_that_a_node_does_not_know_is_sent_with_its_text(redis_cluster: RedisCluster) -> None:
    async def scene() -> None:
        async with staged(redis_cluster, partitions=6) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(6)
            for n in range(3):
                for master in redis_cluster.masters():
                    with master.client() as client:
                        client.script_flush()
                await broker.publish(stage.events(30, start=30 * n, keys=30))
                await member.take(30 * n + 30)
                assert not await member.settle()
            assert sorted(member.values) == list(range(90))

    play(scene())


async def _opened(url: str, **options: Any) -> Broker:
    broker = await open_broker(settings.load(url, **options))
    await broker.close()
    return broker


def test_a_node_of_the_url_that_is_dead_is_passed_over(redis_cluster: RedisCluster) -> None:
    """Also by what a broker opens later, when the only node of its URL has died."""

    async def scene() -> None:
        dead = redis_cluster.owner(0)
        async with staged(redis_cluster, partitions=3) as stage:
            stage.url = f"redis+cluster://127.0.0.1:{dead.port}"
            broker = await stage.broker()
            await broker.publish(stage.events(9, keys=9))
            await asyncio.to_thread(redis_cluster.fail_over, 0)
            member = await (await stage.member(broker)).hold(3)
            await broker.publish(stage.events(9, start=9, keys=9))
            await member.until(lambda: set(range(9, 18)) <= set(member.values))
            alive = redis_cluster.owner(0)
            await stage.broker(f"{stage.url},127.0.0.1:{alive.port}")

    play(scene())


def test_a_url_that_does_not_fit_the_server_is_refused(redis_cluster: RedisCluster, redis_server: RedisServer) -> None:
    url = f"redis+cluster://127.0.0.1:{redis_cluster.masters()[0].port}"
    with pytest.raises(BadSetting, match="no numbered databases"):
        asyncio.run(_opened(f"{url}/1"))
    with pytest.raises(BadSetting, match=r"node of a cluster.*redis\+cluster://"):
        asyncio.run(_opened(url.replace("redis+cluster", "redis")))
    with pytest.raises(BrokerError, match=r"cluster support disabled"):
        asyncio.run(_opened(f"redis+cluster://127.0.0.1:{redis_server.port}"))


def test_a_cluster_whose_replicas_may_take_over_promises_a_window_and_not_fsync(
    redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.brokers.redis.broker._OPEN_S", 0.3)
    assert asyncio.run(_opened(redis_cluster.url)).features.durability == "window"
    with pytest.raises(BadSetting, match=r"durability='fsync'.*has 'window'.*replication=2"):
        asyncio.run(_opened(redis_cluster.url, durability="fsync"))
    with pytest.raises(BrokerError, match=r"replication=3.*1 connected replicas, 2 are needed"):
        asyncio.run(_opened(redis_cluster.url, replication=3))
