"""`replication=2`: what publish accepts, and what a member is assigned, is on the replica too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Broker
from onward.errors import BadSetting, BrokerError, PublishError
from tests.brokers.redis_stage import Stage, own_server, play, until
from tests.servers.redis_pair import RedisPair


@asynccontextmanager
async def staged(pair: RedisPair, **options: Any) -> AsyncIterator[Stage]:
    with pair.master.client() as client:
        stage = Stage(pair.url, client, **{"replication": 2, **options})
        try:
            async with asyncio.timeout(100):
                yield stage
        finally:
            await stage.close()


async def opened(url: str, **options: Any) -> Broker:
    broker = await open_broker(settings.load(url, **options))
    await broker.close()
    return broker


def test_publish_returns_when_the_replica_has_the_event(redis_pair: RedisPair) -> None:
    """Scenario 9: WAIT answers with fewer, and the write stays. It is asked again, and stored once."""

    async def scene() -> None:
        async with staged(redis_pair) as stage:
            broker = await stage.broker()
            assert broker.features.durability == "replicated"
            await broker.publish(stage.events(1))
            redis_pair.lag()
            publishing = asyncio.ensure_future(broker.publish(stage.events(1, start=1)))
            await asyncio.sleep(4.0)  # more than one WAIT
            assert stage.length == 2, "the master has it"
            assert not publishing.done()
            await asyncio.to_thread(redis_pair.catch_up)
            await publishing
            assert stage.length == 2, "asked again, and stored once"

    play(scene())


def test_an_event_that_the_replica_does_not_confirm_is_unknown(redis_pair: RedisPair) -> None:
    async def scene() -> None:
        async with staged(redis_pair, publish_timeout_s=3.0) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            redis_pair.lag()
            with pytest.raises(PublishError, match="0 of 1 replicas have the write") as raised:
                await broker.publish(stage.events(1, start=1))
            assert len(raised.value.unknown) == 1
            assert not raised.value.refused
            await asyncio.to_thread(redis_pair.catch_up)
            await broker.publish(stage.events(1, start=2))

    play(scene())


def test_a_new_connection_waits_for_a_write_of_the_one_before(redis_pair: RedisPair) -> None:
    """WAIT waits for all that the server had written when the last command of its connection was carried out."""

    async def scene() -> None:
        async with staged(redis_pair) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            redis_pair.lag()
            publishing = asyncio.ensure_future(broker.publish(stage.events(1, start=1)))
            await until(lambda: stage.length == 2)
            for _ in range(3):
                stage.client.client_kill_filter(_type="normal", skipme=True)
                await asyncio.sleep(1.0)
                assert not publishing.done(), "accepted, and the replica does not have it"
            await asyncio.to_thread(redis_pair.catch_up)
            await publishing
            assert stage.length == 2

    play(scene())


def test_a_partition_is_assigned_when_the_replica_knows_the_owner(redis_pair: RedisPair) -> None:
    async def scene() -> None:
        async with staged(redis_pair, lease_s=2.0) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            redis_pair.lag()
            member = await stage.member(broker)
            for _ in range(25):
                await member.receive()
            assert stage.client.hget(stage.keys.group(stage.group), "owner"), "the master knows it"
            assert not member.assigned
            await asyncio.to_thread(redis_pair.catch_up)
            await member.hold(1)
            with redis_pair.replica.client() as replica:
                owner = replica.hget(stage.keys.group(stage.group), "owner")
                assert owner == stage.client.hget(stage.keys.group(stage.group), "owner")

    play(scene())


def test_what_was_accepted_is_there_when_a_lagging_replica_is_promoted(redis_pair: RedisPair) -> None:
    async def scene() -> None:
        async with staged(redis_pair, lease_s=2.0, publish_timeout_s=4.0) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(20))
            redis_pair.lag()
            with pytest.raises(PublishError):
                await broker.publish(stage.events(5, start=20))
            await asyncio.to_thread(redis_pair.promote)
            without = await stage.broker(replication=1)
            await without.publish(stage.events(5, start=25))
            await member.until(lambda: {*range(20), *range(25, 30)} <= set(member.values))

    play(scene())


def test_too_few_replicas_are_refused_at_start(redis_pair: RedisPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.brokers.redis.broker._OPEN_S", 0.3)
    with pytest.raises(
        BrokerError, match=r"replication=3: .*has 1 connected replicas, 2 are needed; start more replicas"
    ):
        asyncio.run(opened(redis_pair.url, replication=3))
    with own_server() as server, pytest.raises(BrokerError, match="has 0 connected replicas, 1 are needed"):
        asyncio.run(opened(server.url, replication=2))


def test_a_server_with_a_replica_promises_fsync_only_for_itself(redis_pair: RedisPair) -> None:
    """A promoted replica may lack what the master had on its disk."""
    assert asyncio.run(opened(redis_pair.url)).features.durability == "window"
    with pytest.raises(BadSetting, match=r"durability='fsync'.*has 'window'.*replication=2"):
        asyncio.run(opened(redis_pair.url, durability="fsync"))
    assert asyncio.run(opened(redis_pair.url, replication=2, durability="window")).features.durability == "replicated"
