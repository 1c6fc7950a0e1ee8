"""Masters that are killed and replaced under load, on a cluster and behind Sentinel, for ONWARD_STORM_S seconds."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onward.testing.scenario import Kit
from tests.brokers.redis_harness import RedisHarness
from tests.brokers.redis_stage import play
from tests.brokers.test_redis_storm import PARTITIONS, Ledger, balanced, member_of_storm, publish
from tests.servers.redis_cluster import SLOTS, RedisCluster
from tests.servers.redis_sentinel import RedisSentinel
from tests.storm import STORM_S

pytestmark = [pytest.mark.more, pytest.mark.storm, pytest.mark.timeout(STORM_S + 200)]

Servers = RedisCluster | RedisSentinel


async def storm(servers: Servers, fail_over: Callable[[], object], folder: Path, replication: int) -> None:
    """What publish accepted with `replication` is there after every fail-over, is handled, and first runs of a key keep
    the order of its stream. No run has a superseded fence."""
    options = {"partitions": PARTITIONS, "lease_s": 1.0, "publish_timeout_s": 60.0}
    kit = Kit(RedisHarness(servers, folder), options)
    path, ledger, sent, replaced = folder / "storm.effects", Ledger(), 0, 0
    try:
        broker = await kit.broker(replication=replication)
        for _ in range(3):
            member_of_storm(kit, servers, path)
        end, next_at = time.monotonic() + STORM_S, time.monotonic() + 3
        while time.monotonic() < end:
            if time.monotonic() > next_at:
                failing = asyncio.create_task(asyncio.to_thread(replace, servers, fail_over))
                while not failing.done():
                    sent = await publish(broker, kit.topic, ledger, sent)
                await failing
                replaced += 1
                next_at = time.monotonic() + random.uniform(1, 3)
            sent = await publish(broker, kit.topic, ledger, sent)
            await asyncio.sleep(0.05)
        await balanced(client_of(servers), kit.topic, path, ledger)
        print(f"\n{sent} events, {replaced} fail-overs")  # noqa: T201
        assert replaced
    finally:
        await kit.close()


def replace(servers: Servers, fail_over: Callable[[], object]) -> None:
    """A replica becomes the master, and the former master its replica, without which nothing is replicated."""
    fail_over()
    servers.heal()


def client_of(servers: Servers) -> Any:
    """Something that has a client of all keys."""
    return servers if isinstance(servers, RedisCluster) else servers.master()


def test_masters_of_a_cluster_are_replaced_under_load(redis_cluster: RedisCluster, tmp_path: Path) -> None:
    redis_cluster.flush()
    play(storm(redis_cluster, lambda: redis_cluster.fail_over(random.randrange(SLOTS)), tmp_path, 2))


def test_a_master_behind_sentinel_is_replaced_under_load(redis_sentinel: RedisSentinel, tmp_path: Path) -> None:
    play(storm(redis_sentinel, redis_sentinel.fail_over, tmp_path, 3))
