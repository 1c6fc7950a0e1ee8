"""Keys of another program under our names: each is named with its type, in an error or a trouble, and when it is gone
everything goes on."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from onward.brokers.base import Broker, Filter, State
from onward.brokers.redis.keys import RELAYS, TOPICS, TopicKeys
from onward.errors import BrokerError
from onward.testing.aside import make_record
from onward.testing.scenario import Member
from tests.brokers.redis_stage import Stage, play, staged
from tests.servers.redis import RedisServer

Step = Callable[[Stage, Broker, Member], Any]


class KeyCase(NamedTuple):
    """`name`: of a key that a running group has. `step`: what reports it; None: a trouble does."""

    name: Callable[[Stage], str]
    step: Step | None


def publish(stage: Stage, broker: Broker, member: Member) -> Any:
    return broker.publish(stage.events(1, start=3))


def publish_by_relay(stage: Stage, broker: Broker, member: Member) -> Any:
    return broker.publish(stage.events(1, start=3), relay=("shard/0", 1))


def set_aside(stage: Stage, broker: Broker, member: Member) -> Any:
    (assigned,) = member.assigned.values()
    return member.subscription.settle([], aside=[make_record(member.deliveries[0], assigned.log_id, State.HELD)])


def scan(stage: Stage, broker: Broker, member: Member) -> Any:
    return broker.aside(stage.group).scan(Filter(), None, 10)


def list_topics(stage: Stage, broker: Broker, member: Member) -> Any:
    return broker.topics()


CASES = {
    "stream": KeyCase(lambda stage: stage.keys.stream, publish),
    "meta": KeyCase(lambda stage: stage.keys.meta, publish),
    "relays of a partition": KeyCase(lambda stage: stage.keys.relays, publish_by_relay),
    "relays": KeyCase(lambda stage: RELAYS, publish_by_relay),
    "rows": KeyCase(lambda stage: stage.keys.rows(stage.group), set_aside),
    "bodies": KeyCase(lambda stage: stage.keys.bodies(stage.group), set_aside),
    "places": KeyCase(lambda stage: stage.keys.places(stage.group), scan),
    "topics": KeyCase(lambda stage: TOPICS, list_topics),
    "group": KeyCase(lambda stage: stage.keys.group(stage.group), None),
    "moves": KeyCase(lambda stage: stage.keys.moves(stage.group), None),
    "members": KeyCase(lambda stage: TopicKeys(stage.topic).members(stage.group), None),
    "news": KeyCase(lambda stage: TopicKeys(stage.topic).news(stage.group), None),
    "groups": KeyCase(lambda stage: stage.keys.groups, None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_key_of_another_type_is_named(redis_server: RedisServer, case: KeyCase, monkeypatch: Any) -> None:
    monkeypatch.setattr("onward.brokers.redis.trimmer._INTERVAL_S", 0.2)

    async def scene() -> None:
        async with staged(redis_server, lease_s=3.0) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(3))
            await member.take(3)
            name, client = case.name(stage), stage.client
            with replaced(client, name):
                found = await complaint(case, stage, broker, member)
                assert f"key {name} is a string, not a" in found
                assert "rename its key" in found
            await broker.publish(stage.events(1, start=4))
            await member.until(lambda: 4 in member.values, 15.0)
            await member.until(lambda: not member.subscription.troubles(), 15.0)

    play(scene())


@contextmanager
def replaced(client: Any, name: str) -> Iterator[None]:
    """At once: a key that is missing for a moment would be a lost one."""
    existed = client.exists(name)
    with client.pipeline(transaction=True) as change:
        if existed:
            change.rename(name, "kept")
        change.set(name, "mine")
        change.execute()
    yield
    with client.pipeline(transaction=True) as change:
        change.delete(name)
        if existed:
            change.rename("kept", name)
        change.execute()


async def complaint(case: KeyCase, stage: Stage, broker: Broker, member: Member) -> str:
    if case.step is not None:
        with pytest.raises(BrokerError) as raised:
            await case.step(stage, broker, member)
        return str(raised.value)

    def said() -> list[str]:
        return [each for each in member.subscription.troubles() if f"key {case.name(stage)} is a" in each]

    await member.until(lambda: bool(said()), 15.0)
    return said()[0]


def test_a_damaged_counter_refuses_a_publish(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(1))
            stage.client.hset(stage.keys.meta, "bytes", "abc")
            with pytest.raises(BrokerError, match=r"damaged or changed by another program .*; restore it") as raised:
                await broker.publish(stage.events(1, start=1))
            assert "user_script" not in str(raised.value)
            assert "script:" not in str(raised.value)

    play(scene())


@pytest.mark.parametrize("field", ["fence", "lease", "above", "watermark"])
def test_damaged_progress_stops_its_partition_and_no_other(redis_server: RedisServer, field: str) -> None:
    """For its next owner. When it is as it was, the partition goes on."""

    async def scene() -> None:
        async with staged(redis_server, partitions=2, lease_s=1.0) as stage:
            broker, client = await stage.broker(), stage.client
            member = await (await stage.member(broker)).hold(2)
            await broker.publish(stage.events(8, keys=8))
            await member.take(8)
            await member.settle()
            await member.subscription.close()
            name: Any = stage.keys.group(stage.group)
            before: Any = client.hget(name, field)
            if field == "watermark":
                client.hdel(name, field)
            else:
                client.hset(name, field, "garbage")
            again = await (await stage.member(broker)).hold(1)
            await again.until(lambda: bool(damage(again, f"{stage.topic}/0")), 10.0)
            (found,) = damage(again, f"{stage.topic}/0")
            assert "restore it from a backup, or drop the group or topic" in found
            assert field == "watermark" or name in found
            assert not damage(again, f"{stage.topic}/1")
            await broker.publish(stage.events(8, start=8, keys=8))
            await again.until(lambda: len(again.values) >= 1, 10.0)
            client.hset(name, field, before)
            await again.until(lambda: set(range(8, 16)) <= set(again.values), 15.0)
            await again.until(lambda: not again.subscription.troubles(), 15.0)

    play(scene())


def damage(member: Member, partition: str) -> list[str]:
    return [each for each in member.subscription.troubles() if "damaged" in each and partition in each]


def test_a_row_that_is_no_member_stops_nothing(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=2, lease_s=1.0) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(2)
            name = TopicKeys(stage.topic).members(stage.group)
            stage.client.hset(name, "x", "garbage")
            await member.until(lambda: any(f"HDEL {name} x" in each for each in member.subscription.troubles()), 10.0)
            other = await stage.member(await stage.broker())
            while (len(member.assigned), len(other.assigned)) != (1, 1):
                await asyncio.gather(member.receive(), other.receive())
            assert len((await broker.groups(stage.topic))[0].members) == 2
            stage.client.hdel(name, "x")
            await member.until(lambda: not member.subscription.troubles(), 15.0)

    play(scene())


def test_events_arrive_though_the_doorbell_cannot_listen(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=2) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(2)
            await broker.publish(stage.events(4, keys=4))
            await member.take(4)
            with replaced(stage.client, TopicKeys(stage.topic).news(stage.group)):
                await member.until(lambda: any("a second late" in each for each in member.subscription.troubles()))
                for n in range(2):
                    await member.receive(wait_s=1.2)
                    await broker.publish(stage.events(4, start=4 * n + 4, keys=4))
                    await member.until(lambda n=n: len(member.values) == 4 * n + 8, 5.0)  # type: ignore[misc]

    play(scene())


def test_a_list_of_members_that_cannot_be_read_moves_no_partition(redis_server: RedisServer) -> None:
    """A member that believed to be alone would take every partition that is free."""

    async def scene() -> None:
        async with staged(redis_server, partitions=4, lease_s=1.5) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(4)
            with replaced(stage.client, TopicKeys(stage.topic).members(stage.group)):
                await member.until(lambda: any("changes its owner" in each for each in member.subscription.troubles()))
                other = await stage.member(await stage.broker())
                await broker.publish(stage.events(8, keys=8))
                await member.take(8)
                assert not await member.settle()
                await member.quiet(2.0)
                await other.quiet(0.2)
                assert (len(member.assigned), len(other.assigned)) == (4, 0)
            while (len(member.assigned), len(other.assigned)) != (2, 2):
                await asyncio.gather(member.receive(), other.receive())

    play(scene())
