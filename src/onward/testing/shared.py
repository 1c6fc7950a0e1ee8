"""Shared partitions: with ordering="none" several members hold a partition at once, and each event goes to one of them.

For brokers with `features.shared`. A shared partition may have no history, so every scenario subscribes before it
publishes. Delivery is at least once, but no scenario here gives a broker a reason to deliver an event twice.
"""

import asyncio
import time
from typing import Protocol

import pytest

from onward.brokers.base import Fenced, GroupSpec, Progress, Revoked, Topology, Tries
from onward.clock import now
from onward.errors import BrokerError, ConfigError
from onward.event import Delivery, Event, Partition, new_id
from onward.testing.aside import GROUP, scanned
from onward.testing.scenario import (
    BrokerUnderTest,
    Kit,
    Member,
    effects,
    event,
    publish_beside_cancelled_receives,
    scenario,
)
from onward.testing.shared_members import (
    DUE_S,
    dead,
    joined,
    numbered,
    receive_until,
    received,
    set_aside,
    shared_broker,
    take_exactly,
    waiting,
)
from onward.testing.shared_records import SharedRecordScenarios


class SharedUnderTest(BrokerUnderTest, Protocol):
    in_process: bool  # the broker is in the memory of this process, so no child can open its URL


class SharingScenarios:
    """How members share the events, and what a settle stores."""

    @scenario()
    async def test_every_member_holds_a_shared_partition_at_once(self, kit: Kit) -> None:
        one, two = await shared_broker(kit), await kit.broker()
        members = [await joined(kit, broker) for broker in (one, one, two)]
        await asyncio.gather(*(member.quiet() for member in members))
        assert len({frozenset(member.assigned) for member in members}) == 1, "the members hold different partitions"
        assert Partition(kit.topic, 0) in members[0].assigned
        for assigned in (each for member in members for each in member.assigned.values()):
            assert (assigned.shared, assigned.stored, assigned.fence, assigned.unclean) == (True, None, None, False)
            assert assigned.log_id
        history = [message for member in members for message in member.history]
        assert not any(isinstance(message, Revoked | Fenced) for message in history), (
            "lost its partition because another member joined"
        )

    @scenario()
    async def test_each_event_goes_to_one_member(self, kit: Kit) -> None:
        one, two = await shared_broker(kit), await kit.broker()
        members = [await joined(kit, broker) for broker in (one, one, two)]
        events = kit.events(300, keys=30)
        await one.publish(events)
        await received(members, 300)
        await asyncio.gather(*(member.quiet() for member in members))
        delivered = [delivery.event.id for member in members for delivery in member.deliveries]
        assert sorted(delivered) == sorted(event.id for event in events)

    @scenario()
    async def test_every_member_gets_a_share(self, kit: Kit) -> None:
        one, two = await shared_broker(kit), await kit.broker()
        members = [await joined(kit, broker) for broker in (one, one, two)]
        await one.publish(kit.events(300, keys=1))  # one key: without ordering, every member may get its events
        await received(members, 300)
        assert all(member.deliveries for member in members)

    @scenario()
    async def test_a_delivery_carries_its_epoch_and_its_log_id_and_no_tries(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        for _ in range(3):
            await broker.publish(kit.events(10, keys=5))
        await member.take(30)
        positions: dict[Partition, list[int]] = {}
        for delivery in member.deliveries:
            assigned = member.assigned[delivery.partition]
            assert (delivery.epoch, delivery.fence, delivery.log_id) == (assigned.epoch, None, assigned.log_id)
            assert (delivery.attempt, delivery.tries or Tries()) == (1, Tries())
            positions.setdefault(delivery.partition, []).append(delivery.position)
        assert all(each == sorted(set(each)) for each in positions.values()), "positions do not ascend"

    @scenario()
    async def test_unsettled_events_of_a_closed_member_go_to_another(self, kit: Kit) -> None:
        one, two = await shared_broker(kit), await kit.broker()
        first = await joined(kit, one)
        await one.publish(kit.events(10))
        await first.take(10)
        await first.settle(numbered(first, range(4)))
        second = await joined(kit, two)
        await second.quiet()
        await first.subscription.close()
        await take_exactly(second, 6)
        assert sorted(second.values) == list(range(4, 10))
        third = await joined(kit, one)
        assert not any(assigned.unclean for assigned in third.assigned.values())

    @scenario(max_poll_gap_s=3.0)
    async def test_unsettled_events_of_a_member_that_stopped_receiving_go_to_another(self, kit: Kit) -> None:
        one, two = await shared_broker(kit), await kit.broker(max_poll_gap_s=60.0)
        stuck = await joined(kit, one)
        await one.publish(kit.events(5))
        await stuck.take(5)
        await stuck.settle(numbered(stuck, [0]))
        assert stuck.subscription.sure_until() > now()
        member = await joined(kit, two)
        await member.take(4)
        assert now() > stuck.subscription.sure_until(), "taken over before the sure_until of the stuck member"
        assert sorted(member.values) == [1, 2, 3, 4]

    @scenario()
    async def test_settled_events_of_a_shared_partition_are_not_delivered_again(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        first = await joined(kit, broker)
        await broker.publish(kit.events(50, keys=5))
        await first.take(50)
        for _ in range(3):
            assert not await first.settle()
        await first.subscription.close()
        await (await joined(kit, broker)).quiet()

    @scenario()
    async def test_only_the_fresh_positions_of_a_settle_count(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        first = await joined(kit, broker)
        await broker.publish(kit.events(6))
        await first.take(6)
        epoch, partition = first.deliveries[0].epoch, first.deliveries[0].partition
        at = {int(each.event.value or b""): each.position for each in first.deliveries}
        beyond = max(at.values()) + 1
        for progress in (
            Progress(partition, epoch, beyond, (), [at[1]]),
            Progress(partition, epoch, 0, [(at[0], beyond)], [at[3]]),
            Progress(partition, epoch, beyond + 1_000_000),
            Progress(partition, epoch, 0),
        ):
            assert not await first.subscription.settle([progress])
        await first.subscription.close()
        second = await joined(kit, broker)
        await take_exactly(second, 4)
        assert sorted(second.values) == [0, 2, 4, 5]

    @scenario()
    async def test_two_groups_each_get_every_event(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        groups = [await joined(kit, broker, group) for group in ("one", "two")]
        await broker.publish(kit.events(60, keys=6))
        for member in groups:
            await take_exactly(member, 60)
            await member.settle()
        assert len({tuple(sorted(each.event.id for each in member.deliveries)) for member in groups}) == 1

    @scenario()
    async def test_a_declared_group_gets_events_from_before_its_first_member(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        wanted = Topology(groups=[GroupSpec(kit.topic, GROUP, "none", "latest")])
        (change,) = await broker.declare(wanted, apply=False)
        assert (change.what, change.action) == (f"group {GROUP} of topic {kit.topic}", "create")
        assert [each.action for each in await broker.declare(wanted, apply=True)] == ["create"]
        assert not list(await broker.declare(wanted, apply=True))
        await broker.publish(kit.events(20))
        await take_exactly(await joined(kit, await kit.broker()), 20)

    @scenario()
    async def test_a_paused_member_leaves_the_events_to_the_others(self, kit: Kit) -> None:
        one, two = await shared_broker(kit), await kit.broker()
        first = await joined(kit, one)
        await one.publish(kit.events(1))
        await first.take(1)
        await first.subscription.pause(list(first.assigned))
        await first.receive(wait_s=0.0)
        second = await joined(kit, two)
        await one.publish([event(kit.topic, None, n) for n in range(1, 20)])
        await receive_until([first, second], lambda: len(second.deliveries) == 19)
        assert first.values == [0], "delivered to a paused member"
        assert not await first.settle(), "pausing ended the ownership"
        await second.settle()
        await second.subscription.close()
        await one.publish([event(kit.topic, None, 20)])
        await first.quiet()
        await first.subscription.resume(list(first.assigned))
        await first.take(2)
        assert first.values == [0, 20]

    @scenario()
    async def test_unsettled_events_of_a_released_partition_go_to_another_member(self, kit: Kit) -> None:
        one, two = await shared_broker(kit), await kit.broker()
        first = await joined(kit, one)
        await one.publish(kit.events(6))
        await first.take(6)
        await first.settle(numbered(first, [0, 1]))
        late = first.progress(numbered(first, [2]))
        second = await joined(kit, two)
        await first.release(list(first.assigned), drained=False)
        await second.take(4)
        assert sorted(second.values) == [2, 3, 4, 5]
        assert list(await first.subscription.settle(late)) == [late[0].partition], (
            "a settle after the release took effect"
        )
        await first.quiet()
        assert not first.assigned, "assigned to a member that is about to leave"

    @scenario()
    async def test_epochs_grow_with_every_ownership(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        highest = -1
        for _ in range(3):
            member = await joined(kit, broker)
            epochs = [assigned.epoch for assigned in member.assigned.values()]
            assert min(epochs) > highest
            highest = max(epochs)
            await member.subscription.close()

    @scenario(max_poll_gap_s=3.0)
    async def test_a_settle_of_an_old_epoch_has_no_effect(self, kit: Kit) -> None:
        """A member that lost its ownership gets it back under a new epoch. Positions may begin again."""
        one, two = await shared_broker(kit), await kit.broker(max_poll_gap_s=60.0)
        slow = await joined(kit, one)
        await one.publish(kit.events(3))
        await slow.take(3)
        old, stale = slow.deliveries[0], slow.progress()
        letters = [dead(each) for each in slow.deliveries]
        rival = await joined(kit, two)
        await rival.take(3)
        assert list(await slow.subscription.settle(stale)) == [old.partition], "a settle after the takeover took effect"
        await rival.subscription.close()
        await slow.until(lambda: any(isinstance(message, Fenced) for message in slow.history))
        await slow.take(6)
        assert slow.deliveries[3].epoch > old.epoch
        assert list(await slow.subscription.settle(stale, aside=letters)) == [old.partition]
        await slow.subscription.close()
        last = await joined(kit, two)
        await last.take(3)
        assert sorted(last.values) == [0, 1, 2]
        assert not two.features.aside or not await scanned(two)

    @scenario()
    async def test_key_ordering_uses_owned_partitions_or_is_refused(self, kit: Kit) -> None:
        """A broker that refuses it has only work queues, so it fails the rest of the broker suite."""
        one, two = await shared_broker(kit), await kit.broker()
        try:
            members = [await kit.member(broker) for broker in (one, two)]
        except ConfigError:
            return
        await receive_until(members, lambda: all(member.assigned for member in members))
        assert not any(assigned.shared for member in members for assigned in member.assigned.values())
        assert not set(members[0].assigned) & set(members[1].assigned)

    @scenario()
    async def test_dropping_a_group_removes_its_events_and_records(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        await broker.publish(kit.events(4))
        await member.take(4)
        due = time.time() + DUE_S
        await set_aside(member, [waiting(member.deliveries[0], due), dead(member.deliveries[1])])
        (info,) = await broker.groups(kit.topic)
        assert (info.group, len(info.members)) == (GROUP, 1)
        with pytest.raises(BrokerError):
            await broker.drop_group(kit.topic, GROUP)
        await member.subscription.close()
        await broker.drop_group(kit.topic, GROUP)
        assert not list(await broker.groups(kit.topic))
        again = await joined(kit, broker)
        await again.quiet(for_s=2 * DUE_S)
        assert not broker.features.aside or not await scanned(broker)


class SharedReceiveScenarios:
    """The limits of receive, and what wakes it."""

    @scenario()
    async def test_receive_of_a_shared_partition_returns_at_most_limit_deliveries(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member = await kit.member(broker, ordering="none", start="latest")
        deadline = time.monotonic() + 40.0
        while not member.assigned:
            assert time.monotonic() < deadline, "receive with limit=0 does not return Assigned"
            await member.receive(limit=0)
        await broker.publish(kit.events(25, keys=5))
        for _ in range(3):
            await member.receive(limit=0)
        assert not member.deliveries
        while len(member.deliveries) < 25:
            messages = await member.receive(limit=7)
            assert sum(type(message) is Delivery for message in messages) <= 7

    @scenario()
    async def test_receive_of_a_shared_partition_returns_at_most_max_bytes_but_at_least_one_event(
        self, kit: Kit
    ) -> None:
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        sizes = [10, 10, 10_000, 10_000, 10, 10]
        await broker.publish([Event(new_id(), kit.topic, None, b"x" * size) for size in sizes])
        while len(member.deliveries) < len(sizes):
            messages = await member.receive(max_bytes=100)
            taken = [message.event.size for message in messages if type(message) is Delivery]
            assert len(taken) <= 1 or sum(taken) <= 100

    @scenario()
    async def test_a_waiting_receive_ends_on_an_event_a_retry_or_close(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        async with asyncio.timeout(20):
            blocked = asyncio.create_task(member.receive(wait_s=60.0))
            await asyncio.sleep(0.1)
            await broker.publish(kit.events(1))
            await blocked
            await set_aside(member, [waiting(member.deliveries[0], time.time() + DUE_S)])
            while len(member.deliveries) < 2:
                await member.receive(wait_s=60.0)
            blocked = asyncio.create_task(member.receive(wait_s=60.0))
            await asyncio.sleep(0.1)
            await member.subscription.close()
            await asyncio.wait([blocked])
            blocked.exception()

    @scenario()
    async def test_a_cancelled_receive_of_a_shared_partition_loses_nothing(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        await publish_beside_cancelled_receives(kit, broker, member, 30)
        await member.take(30)
        assert sorted(member.values) == list(range(30)), "a cancelled receive lost or repeated events"

    @scenario()
    async def test_lag_of_a_shared_partition_is_correct_or_unknown(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        await member.subscription.pause(list(member.assigned))
        await member.receive(wait_s=0.0)
        await broker.publish(kit.events(12, keys=6))
        await wait_for_lag(member, 12)
        await member.subscription.resume(list(member.assigned))
        await member.take(12)
        await member.settle()
        await wait_for_lag(member, 0)


class SharedProcessScenarios:
    """Members in their own processes, which are killed."""

    @scenario()
    async def test_a_group_is_not_dropped_while_its_member_is_suspended(self, kit: Kit) -> None:
        broker = await shared_broker(kit, processes=True)
        child = kit.child("hold", ordering="none")
        while (await child.line())["report"] != "Assigned":
            pass
        child.stop()
        with pytest.raises(BrokerError):
            await broker.drop_group(kit.topic, "group")

    @scenario(max_poll_gap_s=3.0)
    async def test_unsettled_events_of_a_killed_member_go_to_another(self, kit: Kit) -> None:
        broker = await shared_broker(kit, processes=True)
        child = kit.child("hold", limit=3, ordering="none")
        while (await child.line())["report"] != "Assigned":
            pass
        await broker.publish(kit.events(10))
        while (await child.line())["report"] != "Delivery":
            pass
        child.kill()
        member = await joined(kit, broker)
        await take_exactly(member, 10)
        assert sorted(member.values) == list(range(10))

    @pytest.mark.slow
    @scenario(max_poll_gap_s=3.0)
    async def test_killed_members_of_a_shared_partition_lose_nothing(self, kit: Kit) -> None:
        """Each turn kills one member while it works and another while it holds unsettled events."""
        broker = await shared_broker(kit, processes=True)
        workers = [kit.child("work", limit=20, ordering="none") for _ in range(3)]
        for turn in range(4):
            holder = kit.child("hold", limit=20, ordering="none")
            while (await holder.line())["report"] != "Assigned":
                pass
            await broker.publish([event(kit.topic, "a", n) for n in range(500 * turn, 500 * (turn + 1))])
            while (await holder.line())["report"] != "Delivery":
                pass
            holder.kill()
            workers.pop(0).kill()
            workers.append(kit.child("work", limit=20, ordering="none"))
        deadline = time.monotonic() + 60.0
        while len(done := set(effects(kit))) < 2_000:
            assert time.monotonic() < deadline, f"{len(done)} of 2,000 were handled in a minute"
            await asyncio.sleep(0.1)


class SharedScenarios(SharingScenarios, SharedReceiveScenarios, SharedRecordScenarios, SharedProcessScenarios):
    """Every promise about shared partitions. The fixture `harness` is a SharedUnderTest."""


async def wait_for_lag(member: Member, count: int) -> None:
    """Wait until the lag is this many undelivered events, or unknown."""
    deadline = time.monotonic() + 20.0
    while True:
        lag = await member.subscription.lag()
        assert set(lag) == set(member.assigned)
        assert all(each.oldest_age_s is None or 0 <= each.oldest_age_s < 60 for each in lag.values())
        known = [each.undelivered for each in lag.values() if each.undelivered is not None]
        if len(known) < len(lag) or sum(known) == count:
            return
        assert time.monotonic() < deadline, f"the lag is {sum(known)}, expected {count}"
        await asyncio.sleep(0.1)
