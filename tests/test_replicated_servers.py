"""The Redis Cluster and the Redis behind Sentinel: they replace a master that fails, and are healed after a test."""

import pytest
from redis.crc import key_slot
from redis.exceptions import TryAgainError

from tests.servers.redis_cluster import RedisCluster
from tests.servers.redis_sentinel import RedisSentinel

pytestmark = pytest.mark.more

SLOT = key_slot(b"x")  # of every key with the tag {x}


def test_the_replica_of_a_killed_master_takes_over_with_its_keys(redis_cluster: RedisCluster) -> None:
    former = redis_cluster.owner(SLOT)
    replica = redis_cluster.replica(former)
    with redis_cluster.client() as client:
        client.set("a{x}", "copied")
        with former.client() as its_client:
            assert its_client.get("a{x}") == b"copied"
            assert its_client.wait(1, 10_000) == 1
        assert redis_cluster.fail_over(SLOT) is replica
        assert client.get("a{x}") == b"copied"
    redis_cluster.heal()
    assert redis_cluster.owner(SLOT) is replica
    assert redis_cluster.replica(replica) is former


def test_a_node_that_restarts_at_once_has_its_slots_still(redis_cluster: RedisCluster) -> None:
    master = redis_cluster.owner(SLOT)
    with redis_cluster.client() as client:
        client.set("a{x}", "stored")
        master.restart()
        redis_cluster.wait_until_ok()
        assert redis_cluster.owner(SLOT) is master
        assert client.get("a{x}") == b"stored"


def test_a_slot_moves_key_by_key(redis_cluster: RedisCluster) -> None:
    source = redis_cluster.owner(SLOT)
    target = next(node for node in redis_cluster.masters() if node is not source)
    both = "return redis.call('MGET', KEYS[1], KEYS[2])"
    with redis_cluster.client() as client:
        client.mset({"a{x}": "1", "b{x}": "2"})
        with redis_cluster.moving(SLOT, target) as move:
            assert set(move.keys()) == {b"a{x}", b"b{x}"}
            move.move("a{x}")
            assert move.keys() == [b"b{x}"]
            with source.client() as its_client, pytest.raises(TryAgainError):
                its_client.eval(both, 2, "a{x}", "b{x}")
            assert client.get("a{x}") == b"1"
            assert client.get("b{x}") == b"2"
        assert redis_cluster.owner(SLOT) is target
        assert client.eval(both, 2, "a{x}", "b{x}") == [b"1", b"2"]


def test_a_flush_deletes_the_keys_of_every_master(redis_cluster: RedisCluster) -> None:
    with redis_cluster.client() as client:
        for number in range(100):
            client.set(f"key-{number}", "1")
        redis_cluster.flush()
        assert client.dbsize() == 0


def test_the_url_names_a_node_that_runs(redis_cluster: RedisCluster) -> None:
    first = redis_cluster.nodes[0]
    assert redis_cluster.url == f"redis+cluster://127.0.0.1:{first.port}"
    first.kill()
    assert redis_cluster.url == f"redis+cluster://127.0.0.1:{redis_cluster.nodes[1].port}"


def test_sentinel_promotes_a_replica_of_a_killed_master(redis_sentinel: RedisSentinel) -> None:
    former = redis_sentinel.master()
    with former.client() as client:
        client.set("proof", "copied")
        assert client.wait(2, 10_000) == 2
    promoted = redis_sentinel.fail_over()
    assert promoted is not former
    with promoted.client() as client:
        assert client.get("proof") == b"copied"
        client.set("proof", "written after")
    redis_sentinel.heal()
    with former.client() as client:
        assert client.get("proof") == b"written after"


def test_sentinel_promotes_a_replica_of_a_silent_master(redis_sentinel: RedisSentinel) -> None:
    former = redis_sentinel.master()
    former.pause()
    with redis_sentinel.wait_for_another(former).client() as client:
        client.set("proof", "stored")
    former.resume()
    with former.client() as client:
        client.set("proof", "lost")  # it does not know yet that it was replaced
    redis_sentinel.heal()
    with former.client() as client:
        assert client.get("proof") == b"stored"


def test_a_promoted_node_that_restarts_is_a_master_still(redis_sentinel: RedisSentinel) -> None:
    """Sentinel stores each node's role in its configuration file."""
    redis_sentinel.fail_over()
    redis_sentinel.heal()
    promoted = redis_sentinel.master()
    promoted.restart()
    assert promoted.replication()["role"] == "master"
    redis_sentinel.heal()
    assert sorted(node.replication()["role"] for node in redis_sentinel.nodes) == ["master", "slave", "slave"]


def test_the_url_of_sentinel_names_every_sentinel(redis_sentinel: RedisSentinel) -> None:
    ports = [sentinel.port for sentinel in redis_sentinel.sentinels]
    assert redis_sentinel.url == "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports) + "/mymaster"
