"""Leases on Redis: a server that loses its last writes gives no partition to two members, and no fence comes twice."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from onward import clock
from onward.brokers.base import Fenced, Progress
from onward.brokers.redis import lease_scripts
from onward.brokers.redis.keys import PartitionKeys, TopicKeys
from onward.brokers.redis.scripts import Script
from onward.errors import BrokerError, GroupDropped
from onward.event import Partition
from onward.testing.scenario import Kit, Member, MemberProcess, event
from tests.brokers.redis_harness import RedisHarness
from tests.brokers.redis_stage import own_server, play, staged
from tests.servers.redis import RedisServer


def kit_on(server: RedisServer, folder: Path, **options: object) -> Kit:
    return Kit(RedisHarness(server, folder), {"partitions": 1, "takeover_grace_s": 0.1, **options})


async def delivered(child: MemberProcess, count: int) -> dict[str, float]:
    """Its report of the last of so many deliveries."""
    while (report := await child.line())["report"] != "Delivery" or (count := count - 1):
        pass
    return dict(report)


def size(server: RedisServer) -> int:
    return server.appended.stat().st_size


@pytest.mark.servers
def test_a_takeover_that_the_server_lost_does_not_give_the_partition_back_to_the_silent_owner(tmp_path: Path) -> None:
    """Scenarios 5 and 7. The stored owner is the first one again. Its lease has lapsed, which is final."""

    async def scene() -> None:
        with own_server() as server:
            kit = kit_on(server, tmp_path)
            try:
                broker = await kit.broker()
                await broker.publish([event(kit.topic, "a", n) for n in range(3)])
                first = kit.child("hold")
                await delivered(first, 3)
                first.stop()
                before = size(server)
                second = await (await kit.member(broker)).hold(1)
                (taken,) = second.assigned.values()
                sure_until = second.subscription.sure_until()
                await asyncio.to_thread(server.forget, before)
                first.go_on()
                while (report := await first.line())["report"] != "Fenced":
                    assert not report["sure"], "the silent owner felt sure of what another one has"
                with server.client() as client:
                    key = PartitionKeys.own(Partition(kit.topic, 0)).group("group")
                    await second.until(lambda: int(client.hget(key, "fence") or 0) > (taken.fence or 0))
                assert clock.now() > sure_until, "given to another while the lost claim was sure"
                first.kill()
                assert any(isinstance(each, Fenced) for each in second.history)
                await second.hold(1)
                (again,) = second.assigned.values()
                assert (again.fence or 0) > (taken.fence or 0), "a fence came twice"
                assert again.unclean
                second.deliveries.clear()
                await second.take(3)
                assert second.values == [0, 1, 2]
            finally:
                await kit.close()

    play(scene())


@pytest.mark.servers
def test_a_free_partition_whose_claim_the_server_lost_is_not_given_away_at_once(tmp_path: Path) -> None:
    """Scenario 6: the owner of the lost claim is suspended and still sure."""

    async def scene() -> None:
        with own_server() as server:
            kit = kit_on(server, tmp_path)
            try:
                broker = await kit.broker()
                await broker.publish([event(kit.topic, "a", n) for n in range(3)])
                await (await (await kit.member(broker)).hold(1)).subscription.close()
                before = size(server)
                lost = kit.child("hold")
                last = await delivered(lost, 3)
                lost.stop()
                await asyncio.to_thread(server.forget, before)
                other = await (await kit.member(broker)).hold(1)
                assert clock.now() > last["sure_until"], "given to another while the lost claim was sure"
                (assigned,) = other.assigned.values()
                assert assigned.unclean, "what the lost owner was running may have run"
                await other.take(3)
            finally:
                await kit.close()

    play(scene())


def test_an_owner_keeps_its_partitions_over_a_short_restart(redis_server: RedisServer) -> None:
    """A renewal answers void: the incarnation is read again and written, and the lease goes on."""

    async def scene() -> None:
        with own_server() as server:
            async with staged(server, partitions=2, lease_s=10.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(2)
                await broker.publish(stage.events(4, keys=4))
                await member.take(4)
                before = dict(member.assigned)
                await asyncio.to_thread(server.restart)
                await broker.publish(stage.events(4, start=4, keys=4))
                await member.take(8)
                await _settled(member)
                assert member.assigned == before
                assert member.subscription.sure_until() > clock.now()
                assert not member.subscription.troubles()

    play(scene())


async def _settled(member: Member) -> None:
    """The same call again until it is answered, as the consumer does."""
    for _ in range(50):
        try:
            assert not await member.settle()
        except BrokerError:
            await member.receive()
        else:
            return
    raise AssertionError("never settled")


def test_nothing_is_settled_or_read_before_a_restarted_server_has_confirmed_the_owner(
    redis_server: RedisServer,
) -> None:
    """The server may have lost the writes of a member that took over."""

    async def scene() -> None:
        async with staged(redis_server, lease_s=30.0) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(3))
            member = await (await stage.member(broker)).hold(1)
            await member.take(3)
            before = dict(member.assigned)
            key = stage.keys.group(stage.group)
            stored = stage.client.hget(key, "watermark")
            stage.client.hset(key, "inc", "of another server")
            with pytest.raises(BrokerError, match="restarted or replaced"):
                await member.settle()
            assert stage.client.hget(key, "watermark") == stored
            await _settled(member)
            assert stage.client.hget(key, "watermark") != stored
            stage.client.hset(key, "inc", "of another server")
            await broker.publish(stage.events(1, start=3))
            await member.take(4)
            assert stage.client.hget(key, "inc") != b"of another server", "read before it was confirmed"
            assert member.assigned == before

    play(scene())


@pytest.mark.servers
def test_a_replication_id_that_changes_under_open_connections_stops_no_member() -> None:
    """A master changes it an hour after its last replica has left. Some connections know the new one, some the old."""

    async def scene() -> None:
        with own_server("--enable-debug-command", "yes") as server:
            async with staged(server, lease_s=10.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(1)
                await broker.publish(stage.events(3))
                await member.take(3)
                before = dict(member.assigned)
                client: Any = stage.client
                client.execute_command("DEBUG", "CHANGE-REPL-ID")
                for each in client.client_list():
                    if each["cmd"] == "hmget":  # the reader's last command
                        client.client_kill(each["addr"])
                await broker.publish(stage.events(3, start=3))
                await member.until(lambda: len(member.deliveries) == 6, 20.0)
                await _settled(member)
                assert member.assigned == before

    play(scene())


@pytest.mark.parametrize("name", ["RENEW", "VIEW"])
def test_an_error_in_one_half_of_a_look_neither_loses_nor_claims_what_we_hold(
    redis_server: RedisServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses writes for a moment shows our token and does not renew it."""

    async def scene() -> None:
        async with staged(redis_server, partitions=2, lease_s=3.0) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(2)
            before = dict(member.assigned)
            with monkeypatch.context() as patch:
                patch.setattr(lease_scripts, name, Script("return redis.error_reply('TRYAGAIN by the test')"))
                await member.until(lambda: bool(member.subscription.troubles()), 10.0)
            await member.until(lambda: not member.subscription.troubles(), 10.0)
            await broker.publish(stage.events(4, keys=4))
            await member.take(4)
            assert not await member.settle()
            assert member.assigned == before

    play(scene())


def test_members_that_are_gone_are_taken_off_the_list(tmp_path: Path, redis_server: RedisServer) -> None:
    async def scene() -> None:
        kit = kit_on(redis_server, tmp_path, lease_s=1.0)
        try:
            broker = await kit.broker()
            await broker.publish([event(kit.topic, "a", n) for n in range(3)])
            for _ in range(3):
                child = kit.child("hold")
                await child.line()
                child.kill()
            member = await (await kit.member(broker)).hold(1)
            with redis_server.client() as client:
                await member.until(lambda: client.hlen(f"{{{kit.topic}}}:members:group") == 1)
        finally:
            await kit.close()

    play(scene())


def test_a_fence_grows_though_the_servers_clock_went_back(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await member.subscription.close()
            ahead = 1 << 50  # milliseconds: the clock was there once
            stage.client.hset(stage.keys.group(stage.group), "fence", ahead)
            again = await (await stage.member(broker)).hold(1)
            (assigned,) = again.assigned.values()
            assert assigned.fence == ahead + 1
            await again.subscription.close()
            await broker.drop_group(stage.topic, stage.group)
            once_more = await (await stage.member(broker)).hold(1)
            (assigned,) = once_more.assigned.values()
            assert assigned.fence == ahead + 2, "a dropped group's fence came twice"

    play(scene())


def test_nothing_of_a_lapsed_lease_is_settled_or_renewed(redis_server: RedisServer) -> None:
    """Scenario 10, from inside: the server is stopped for longer than the lease, and no member has taken over."""

    async def scene() -> None:
        with own_server() as server:
            async with staged(server, lease_s=1.0) as stage:
                broker = await stage.broker()
                await broker.publish(stage.events(3))
                member = await (await stage.member(broker)).hold(1)
                await member.take(3)
                (before,) = member.assigned.values()
                progress = member.progress()
                server.pause()
                await asyncio.sleep(1.5)
                assert member.subscription.sure_until() < clock.now()
                assert list(await member.subscription.settle(progress)) == [Partition(stage.topic, 0)]
                await member.until(lambda: any(isinstance(each, Fenced) for each in member.history), 10.0)
                assert member.subscription.troubles(), "readiness does not say that the server is away"
                server.resume()
                await member.hold(1)
                (after,) = member.assigned.values()
                assert after.epoch > before.epoch
                assert after.unclean
                await member.take(6)
                assert member.values == [0, 1, 2] * 2
                await member.until(lambda: not member.subscription.troubles())

    play(scene())


def test_a_stopped_server_holds_up_nobody_for_longer_than_it_is_stopped(redis_server: RedisServer) -> None:
    async def scene() -> None:
        with own_server() as server:
            async with staged(server, partitions=4, lease_s=10.0) as stage:
                broker = await stage.broker()
                member = await (await stage.member(broker)).hold(4)
                server.pause()
                publishing = asyncio.ensure_future(broker.publish(stage.events(20, keys=20)))
                await asyncio.sleep(2.0)
                assert not publishing.done()
                server.resume()
                await publishing
                await member.take(20)
                assert len(member.assigned) == 4
                assert not any(isinstance(each, Fenced) for each in member.history)

    play(scene())


def test_a_paused_client_is_no_loss(redis_server: RedisServer) -> None:
    """CLIENT PAUSE, as in a fail-over by hand."""

    async def scene() -> None:
        async with staged(redis_server, lease_s=6.0) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            stage.client.client_pause(1_500)
            await broker.publish(stage.events(5))
            await member.take(5)
            assert not await member.settle()
            assert not any(isinstance(each, Fenced) for each in member.history)

    play(scene())


def test_a_member_hears_at_once_of_one_that_leaves(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=4, lease_s=30.0) as stage:
            one, two = await stage.broker(), await stage.broker()
            first, second = await stage.member(one), await stage.member(two)
            while (len(first.assigned), len(second.assigned)) != (2, 2):
                await asyncio.gather(first.receive(), second.receive())
            await first.release(list(first.assigned))
            started = clock.now()
            await asyncio.gather(first.subscription.close(), second.hold(4))
            assert clock.now() - started < 5.0, "it waited for a turn of its own"
            assert not any(assigned.unclean for assigned in second.assigned.values())

    play(scene())


def test_a_dropped_group_ends_a_member_that_slept(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await broker.publish(stage.events(2))
            await member.take(2)
            stage.client.delete(stage.keys.group(stage.group))  # as drop_group does
            with pytest.raises(GroupDropped, match="was dropped"):
                await member.until(lambda: False, 20.0)
            assert any(isinstance(each, Fenced) for each in member.history)
            assert await _lost(member) == [Partition(stage.topic, 0)]

    play(scene())


async def _lost(member: Member) -> list[Partition]:
    first = member.deliveries[0]
    return list(await member.subscription.settle([Progress(first.partition, first.epoch, first.position + 1)]))


def test_the_silence_of_a_dead_member_counts_from_its_last_renewal(redis_server: RedisServer) -> None:
    """Not from the survivor's next turn: here the other member renews right after a turn, and dies."""

    async def scene() -> None:
        async with staged(redis_server, lease_s=12.0, takeover_grace_s=0.0) as stage:
            broker = await stage.broker()
            client: Any = stage.client
            key, members = stage.keys.group(stage.group), TopicKeys(stage.topic).members(stage.group)
            first = await (await stage.member(broker)).hold(1)
            await first.subscription.close()

            def renew(beat: int) -> None:
                """As a member does that has a lease of 3 s."""
                client.hset(key, mapping={"owner": "7:other::uuid", "lease": 3000, "beat": beat})
                client.hset(members, "other::uuid", f"{beat} 3000 0")

            def turns() -> list[bytes]:
                return [value for name, value in client.hgetall(members).items() if name != b"other::uuid"]

            renew(100)
            survivor = await stage.member(broker)
            for beat in range(101, 104):
                before = turns()
                await survivor.until(lambda before=before: turns() != before)  # type: ignore[misc]
                renew(beat)
            died, slowest = clock.now(), 0.0
            while not survivor.assigned:
                asked = clock.now()
                await survivor.receive(wait_s=0.05)
                slowest = max(slowest, clock.now() - asked)
            assert 3.0 < clock.now() - died < 5.0 + 5 * slowest, "without a glance it takes 6.4 s"

    play(scene())
