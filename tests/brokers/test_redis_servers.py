"""Servers that cannot be used, or not for now: each is an error or a trouble that names the thing, the cause and the
cure, and nothing is lost."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Broker, Fenced
from onward.brokers.redis import Streams, trimmer
from onward.errors import BadSetting, BrokerError, PublishError
from onward.testing.scenario import event
from tests.brokers.redis_stage import Stage, own_server, play, staged, until
from tests.servers.redis import RedisServer
from tests.servers.server import free_port

pytestmark = pytest.mark.servers


async def opened(url: str, **options: Any) -> Broker:
    broker = await open_broker(settings.load(url, **options))
    await broker.close()
    return broker


def refused(url: str, says: str, **options: Any) -> None:
    with pytest.raises(BrokerError, match=says):
        asyncio.run(opened(url, **options))


@pytest.mark.parametrize(
    ("options", "durability"),
    [
        (("--appendfsync", "always"), "fsync"),
        (("--appendfsync", "everysec"), "window"),
        (("--appendonly", "no"), "memory"),
    ],
)
def test_durability_is_what_the_server_has(
    options: tuple[str, ...], durability: str, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server(*options) as server:
        with caplog.at_level(logging.WARNING, "onward"):
            broker = asyncio.run(opened(server.url))
        assert broker.features.durability == durability
        assert ("appendonly yes" in caplog.text) == (durability == "memory")
        for wanted in ("fsync", "window"):
            is_weaker = durability == "memory" or (durability, wanted) == ("window", "fsync")
            if is_weaker:
                with pytest.raises(BadSetting, match=rf"durability='{wanted}'.*has '{durability}'.*appendfsync"):
                    asyncio.run(opened(server.url, durability=wanted))
            else:
                asyncio.run(opened(server.url, durability=wanted))


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.brokers.redis.broker._OPEN_S", 0.3)
    port = free_port()
    refused(f"redis://user:secret@127.0.0.1:{port}/0", rf"redis://\*\*\*@127.0.0.1:{port}/0 does not answer.*refused")


def test_a_server_that_comes_up_late_is_waited_for() -> None:
    with own_server() as server:
        server.pause()
        threading.Timer(1.0, server.resume).start()
        assert asyncio.run(opened(server.url)).features.fence


def test_a_wrong_password_is_refused_at_once() -> None:
    with own_server(password="right") as server:
        address = f"127.0.0.1:{server.port}/0"
        asyncio.run(opened(f"redis://:right@{address}"))
        begun = time.monotonic()
        refused(f"redis://:wrong@{address}", "refuses the user or the password.*correct them in the URL")
        refused(f"redis://nobody:right@{address}", "refuses the user or the password")
        refused(f"redis://{address}", "refuses the user or the password|authentication")
        assert time.monotonic() - begun < 4.0, "it was tried again and again"


@pytest.fixture
def acl_server() -> Iterator[RedisServer]:
    with own_server() as server:
        yield server


def _user(server: RedisServer, *rules: str) -> str:
    with server.client() as client:
        client.acl_setuser("app", enabled=True, reset=True, passwords=["+secret"])
        command: Any = client.execute_command
        command("ACL", "SETUSER", "app", *rules)
    return f"redis://app:secret@127.0.0.1:{server.port}/0"


def test_a_user_needs_only_our_keys_and_no_administration(acl_server: RedisServer) -> None:
    url = _user(acl_server, "~{*", "~onward:*", "+@all", "-@admin", "-@dangerous", "+info")

    async def scene() -> None:
        async with staged(acl_server, url=url, partitions=2) as stage:
            broker = await stage.broker()
            assert broker.features.durability == "window", "CONFIG may not be asked, so the weaker one is assumed"
            member = await (await stage.member(broker)).hold(2)
            await broker.publish(stage.events(10, keys=5))
            await member.take(10)
            assert not await member.settle()

    play(scene())


@pytest.mark.parametrize("command", ["xadd", "hset", "xrange"])
def test_a_missing_permission_is_named_at_start(acl_server: RedisServer, command: str) -> None:
    refused(_user(acl_server, "~*", "+@all", f"-{command}"), rf"no permission for.*{command.upper()}.*ACL SETUSER")


def test_a_user_that_may_not_run_scripts_or_info_is_refused(acl_server: RedisServer) -> None:
    refused(_user(acl_server, "~*", "+@all", "-@scripting"), "no permission for the command EVAL")
    refused(_user(acl_server, "~*", "+@all", "-info"), "no permission for the command INFO")
    refused(_user(acl_server, "~other:*", "+@all"), "no permission for")


def test_a_missing_key_pattern_is_named_in_place_of_all_commands(acl_server: RedisServer) -> None:
    url = _user(acl_server, "~onward:*", "+@all")
    with pytest.raises(BrokerError, match=r"keys that begin with \{; add the key pattern ~\{\*") as raised:
        asyncio.run(opened(url))
    assert "HGETALL" not in str(raised.value)


def test_a_checkup_leaves_out_streams_that_the_user_may_not_read(acl_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(acl_server) as stage:
            stage.options["streams"] = {stage.topic: Streams("scan")}
            await (await stage.member()).hold(1)
            url = _user(acl_server, "~{*", "~onward:*", "+@all", "-@admin", "-@dangerous", "+info")
            found = await (await stage.broker(url)).diagnose()
            (skipped,) = [each for each in found if "permission" in each.what]
            assert (skipped.level, skipped.cure) == ("warning", "")
            assert f"topic {stage.topic} is not checked" in skipped.what
            assert "no permission for the key scan" in skipped.what
            assert not [each for each in found if each.level == "error"]

    play(scene())


def test_a_permission_that_is_taken_away_is_named_and_nothing_is_lost(acl_server: RedisServer) -> None:
    url = _user(acl_server, "~*", "+@all")

    async def scene() -> None:
        async with staged(acl_server, url=url) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(1))
            _user(acl_server, "~*", "+@all", "-xadd", "-xrange")
            with pytest.raises(PublishError, match=r"XADD|xadd"):
                await broker.publish(stage.events(1, start=1))
            await broker.publish([])
            await member.until(lambda: any("XRANGE" in each for each in member.subscription.troubles()))
            _user(acl_server, "~*", "+@all")
            await broker.publish(stage.events(1, start=1))
            await member.take(2)
            assert member.values == [0, 1]
            assert not member.subscription.troubles()

    play(scene())


def test_a_replica_is_refused(redis_server: RedisServer) -> None:
    with own_server("--replicaof", redis_server.host, str(redis_server.port)) as replica:
        refused(replica.url, "read-only replica; connect to its master")


def test_a_master_that_becomes_a_replica_is_a_trouble_until_it_is_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        with own_server() as server:
            async with staged(server, publish_timeout_s=2.0, lease_s=2.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(1)
                await broker.publish(stage.events(1))
                client: Any = stage.client
                client.replicaof("127.0.0.1", free_port())
                with pytest.raises(
                    PublishError, match=r"1 event was not.*read-only replica; connect to its master"
                ) as raised:
                    await broker.publish(stage.events(1, start=1))
                assert len(raised.value.refused) == 1, "a refusal that the server answered is no doubt"
                await member.until(lambda: any("replica" in each for each in member.subscription.troubles()))
                client.replicaof("NO", "ONE")
                await broker.publish(stage.events(1, start=1))
                await member.until(lambda: {0, 1} <= set(member.values))
                assert not member.subscription.troubles()

    play(scene())


def test_a_server_that_evicts_is_refused() -> None:
    with own_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        refused(server.url, "maxmemory-policy allkeys-lru deletes events.*set maxmemory-policy noeviction")


def test_a_server_that_begins_to_evict_is_a_trouble_and_its_members_go_on() -> None:
    async def scene() -> None:
        with own_server("--maxmemory", "100mb") as server:
            async with staged(server, lease_s=1.5) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(1)
                stage.client.config_set("maxmemory-policy", "allkeys-lru")
                trouble = "maxmemory-policy allkeys-lru deletes events.*set maxmemory-policy noeviction"
                await member.until(lambda: re.search(trouble, str(member.subscription.troubles())) is not None)
                sure_until = member.subscription.sure_until()
                await member.until(lambda: member.subscription.sure_until() > sure_until + 1.5)
                await broker.publish(stage.events(1))
                await member.take(1)
                assert not await member.settle()
                assert "cannot be renewed" not in str(member.subscription.troubles())
                stage.client.config_set("maxmemory-policy", "noeviction")
                await member.until(lambda: not member.subscription.troubles())

    play(scene())


def test_a_database_that_is_no_number_is_refused() -> None:
    with pytest.raises(BadSetting, match="'shop' is no database"):
        asyncio.run(opened("redis://localhost/shop"))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:{port}/99", "no database with this number; use a lower one"),
        ("redis+sentinel://127.0.0.1:{port}/mymaster", "it is no Sentinel; use the port of a Sentinel, or.*redis://"),
        ("redis+cluster://127.0.0.1:{port}", "it is no cluster; write the URL as redis://"),
    ],
)
def test_a_url_that_does_not_fit_the_server_is_refused_at_once_with_the_cure(
    redis_server: RedisServer, url: str, says: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(BrokerError, match=says) as raised:
        asyncio.run(opened(url.format(port=redis_server.port)))
    assert time.monotonic() - begun < 4.0, "it was tried again and again"
    assert "is it running" not in str(raised.value)


def test_a_server_without_tls_is_named_as_a_possible_cause(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.brokers.redis.broker._OPEN_S", 0.3)
    refused(f"rediss://127.0.0.1:{redis_server.port}?client.socket_connect_timeout=0.5", "speak TLS.*use redis://")


def test_a_url_without_slashes_names_our_schemes() -> None:
    with pytest.raises(BadSetting, match=r"write redis://host:port") as raised:
        asyncio.run(opened("redis:localhost"))
    assert "unix" not in str(raised.value)


def test_a_client_setting_that_redis_py_does_not_have_is_refused(redis_server: RedisServer) -> None:
    with pytest.raises(BadSetting, match="names of redis-py"):
        asyncio.run(opened(redis_server.url, client={"no_such": 1}))
    assert asyncio.run(opened(f"{redis_server.url}?client.client_name=shop"))


@pytest.mark.parametrize(
    ("key", "ours"),
    [("{topic}", "hash"), ("{topic:0}", "stream"), ("{topic:0}:meta", "hash"), ("{topic:0}:marks", "zset")],
)
def test_a_key_of_another_type_is_named(redis_server: RedisServer, key: str, ours: str) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            name = key.replace("topic", stage.topic)
            stage.client.set(name, "mine") if ours != "zset" else stage.client.sadd(name, "mine")
            kind = "set" if ours == "zset" else "string"
            if ours == "zset":
                return await _replaced(stage, broker, name)
            for refused in (broker.publish(stage.events(1)), stage.member(broker)):
                with pytest.raises(BrokerError) as raised:
                    await refused
                assert f"key {name} is a {kind}, not a {ours}" in str(raised.value)
                assert "rename its key" in str(raised.value)
            stage.client.delete(name)
            await broker.publish(stage.events(1))
            return None

    play(scene())


async def _replaced(stage: Stage, broker: Broker, name: str) -> None:
    """The key of marks is created again with the partition, whatever it was."""
    await broker.publish(stage.events(1))
    assert stage.client.type(name) == b"zset"


def test_a_partition_whose_group_has_another_type_stands_still_alone(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=2, lease_s=1.5) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(2)
            key = stage.keys.group(stage.group)
            stage.client.copy(key, "kept")
            stage.client.set("mine", "mine")
            stage.client.rename("mine", key)  # at once: a missing key would be a dropped group
            await member.until(lambda: any(f"key {key} is a string" in each for each in member.subscription.troubles()))
            await broker.publish([event(stage.topic, f"key-{n}", n) for n in range(40)])
            await member.until(lambda: any(each.partition.index == 1 for each in member.deliveries))
            stage.client.rename("kept", key)
            await member.until(lambda: len(set(member.values)) == 40)

    play(scene())


def test_out_of_memory_stops_publishers_and_not_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases and settles go on, so that finished events are trimmed, and memory comes back."""
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.2)

    async def scene() -> None:
        with own_server("--maxmemory-policy", "noeviction") as server:
            async with staged(server, retention_s=0.0, lease_s=3.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(1)
                await broker.publish([event(stage.topic, "a", n, headers={"x": "y" * 500}) for n in range(8_000)])
                used: Any = stage.client.info("memory")["used_memory"]
                stage.client.config_set("maxmemory", used - (1 << 20))
                with pytest.raises(PublishError, match=r"out of memory \(maxmemory\).*raise maxmemory") as raised:
                    await broker.publish([event(stage.topic, "a", 8_000)])
                assert len(raised.value.refused) == 1
                await member.take(8_000)
                assert not await member.settle()
                await asyncio.sleep(4.0)  # longer than the lease
                await member.receive()
                assert not any(isinstance(each, Fenced) for each in member.history), "a lease was not renewed"
                await until(lambda: stage.length < 1_000)
                await broker.publish([event(stage.topic, "a", 8_000)])
                await member.take(8_001)

    play(scene())


@contextmanager
def _endless_script(server: RedisServer) -> Iterator[None]:
    def run() -> None:
        with server.client(60.0) as client, pytest.raises(Exception, match=r"killed|Script"):
            client.eval("while true do end", 0)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        with server.client() as client:
            client.script_kill()
        thread.join()


def test_a_script_of_another_program_that_does_not_end_is_waited_for() -> None:
    """BUSY at every step."""

    async def scene() -> None:
        with own_server("--lua-time-limit", "50") as server:
            async with staged(server, lease_s=10.0, publish_timeout_s=10.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(1)
                with _endless_script(server):
                    publishing = asyncio.ensure_future(broker.publish(stage.events(3)))
                    await asyncio.sleep(1.0)
                    assert not publishing.done()
                await publishing
                await member.take(3)
                assert not await member.settle()
                assert not any(isinstance(each, Fenced) for each in member.history)

    play(scene())


def test_a_cut_connection_is_made_again_for_ever(redis_server: RedisServer) -> None:
    async def scene() -> None:
        with redis_server.proxy() as proxy:
            async with staged(redis_server, url=proxy.url, partitions=2, lease_s=10.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(2)
                for n in range(4):
                    await broker.publish(stage.events(4, start=4 * n, keys=4))
                    proxy.cut()
                    await asyncio.sleep(0.3)
                    proxy.mend()
                    await member.take(4 * n + 4)
                assert sorted(member.values) == list(range(16))
                assert not any(isinstance(each, Fenced) for each in member.history)

    play(scene())


def test_a_connection_that_is_cut_in_the_middle_of_a_window_stores_every_event_once(redis_server: RedisServer) -> None:
    async def scene() -> None:
        with redis_server.proxy() as proxy:
            async with staged(redis_server, url=proxy.url, publish_timeout_s=60.0) as stage:
                broker = await stage.broker()
                await broker.publish(stage.events(1))
                for turn in range(6):
                    start = 1 + 3_000 * turn
                    publishing = asyncio.ensure_future(broker.publish(stage.events(3_000, start=start)))
                    await asyncio.sleep(0.005 * turn)
                    proxy.cut()
                    await asyncio.sleep(0.05)
                    proxy.mend()
                    await publishing
                assert stage.length == 18_001
                member = await stage.member(await stage.broker(redis_server.url))
                await member.take(18_001)
                assert member.values == list(range(18_001))

    play(scene())


def test_findings_of_a_server(redis_server: RedisServer) -> None:
    async def scene() -> None:
        with own_server("--appendfsync", "everysec") as server:
            async with staged(server) as stage:
                broker = await stage.broker()
                await broker.publish(stage.events(1))
                findings = {finding.what: finding for finding in await broker.diagnose()}
                text = "\n".join(findings)
                assert "Redis 7" in text or "answers" in text
                assert "durability window" in text
                assert f"no group reads topic {stage.topic}" in text
                member = await (await stage.member(broker)).hold(1)
                await member.subscription.close()
                text = "\n".join(finding.what for finding in await broker.diagnose())
                assert f"group {stage.group} of topic {stage.topic} has unfinished events and no live member" in text
                await asyncio.to_thread(server.kill)
                (finding,) = await broker.diagnose()
                assert finding.level == "error"
                assert "does not answer" in finding.what

    play(scene())
