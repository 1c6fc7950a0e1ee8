"""Shared partitions: with ordering="none" several members hold a partition at once, and each event goes to one of them.

For brokers with `features.shared`. A shared partition may have no history, so every scenario subscribes before it
publishes. Deliveries are at least once, but nothing here gives a broker a reason to deliver twice.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import pytest

from onward.brokers.base import AsideRecord, Broker, Fenced, Filter, Moved, Progress, Revoked, State, Tries
from onward.clock import now
from onward.errors import BrokerError, ConfigError
from onward.event import Delivery, Event, Partition, new_id
from onward.testing.aside import GROUP, make_record, scanned
from onward.testing.harness import BrokerUnderTest, Kit, Member, effects, event, scenario

DUE_S = 0.8  # how long a retry waits
EARLY_S = 0.05  # two clocks may differ by so much
TRIES = Tries(failed=2, started=2, crashes=1)


class SharedUnderTest(BrokerUnderTest, Protocol):
    in_process: bool  # the broker is in the memory of this process, so no child can open its URL


class SharingScenarios:
    """Who is given what, and what settle does."""

    @scenario()
    async def test_every_member_holds_a_shared_partition_at_once(self, kit: Kit) -> None:
        one, two = await _shared_broker(kit), await kit.broker()
        members = [await _joined(kit, broker) for broker in (one, one, two)]
        await asyncio.gather(*(member.quiet() for member in members))
        assert len({frozenset(member.assigned) for member in members}) == 1, "they hold different partitions"
        assert Partition(kit.topic, 0) in members[0].assigned
        for assigned in (each for member in members for each in member.assigned.values()):
            assert (assigned.shared, assigned.stored, assigned.fence, assigned.unclean) == (True, None, None, False)
            assert assigned.log_id
        history = [message for member in members for message in member.history]
        assert not any(isinstance(message, Revoked | Fenced) for message in history), "lost because another one came"

    @scenario()
    async def test_each_event_goes_to_one_member(self, kit: Kit) -> None:
        one, two = await _shared_broker(kit), await kit.broker()
        members = [await _joined(kit, broker) for broker in (one, one, two)]
        events = kit.events(300, keys=30)
        await one.publish(events)
        await _received(members, 300)
        await asyncio.gather(*(member.quiet() for member in members))
        given = [delivery.event.id for member in members for delivery in member.deliveries]
        assert sorted(given) == sorted(event.id for event in events)

    @scenario()
    async def test_every_member_gets_a_share(self, kit: Kit) -> None:
        one, two = await _shared_broker(kit), await kit.broker()
        members = [await _joined(kit, broker) for broker in (one, one, two)]
        await one.publish(kit.events(300, keys=1))  # one key: without order it does not belong to a member
        await _received(members, 300)
        assert all(member.deliveries for member in members)

    @scenario()
    async def test_a_delivery_names_its_epoch_and_its_log_and_was_never_tried(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
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
    async def test_what_a_closed_member_did_not_settle_goes_to_another(self, kit: Kit) -> None:
        one, two = await _shared_broker(kit), await kit.broker()
        first = await _joined(kit, one)
        await one.publish(kit.events(10))
        await first.take(10)
        await first.settle(_of(first, range(4)))
        second = await _joined(kit, two)
        await second.quiet()
        await first.subscription.close()
        await second.take(6)
        await second.quiet()
        assert sorted(second.values) == list(range(4, 10))
        third = await _joined(kit, one)
        assert not any(assigned.unclean for assigned in third.assigned.values())

    @scenario(max_poll_gap_s=3.0)
    async def test_what_a_member_has_that_stopped_receiving_goes_to_another(self, kit: Kit) -> None:
        one, two = await _shared_broker(kit), await kit.broker(max_poll_gap_s=60.0)
        stuck = await _joined(kit, one)
        await one.publish(kit.events(5))
        await stuck.take(5)
        await stuck.settle(_of(stuck, [0]))
        assert stuck.subscription.sure_until() > now()
        member = await _joined(kit, two)
        await member.take(4)
        assert now() > stuck.subscription.sure_until(), "given to another while the stuck member was sure"
        assert sorted(member.values) == [1, 2, 3, 4]

    @scenario()
    async def test_settled_events_never_come_back(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        first = await _joined(kit, broker)
        await broker.publish(kit.events(50, keys=5))
        await first.take(50)
        for _ in range(3):
            assert not await first.settle()
        await first.subscription.close()
        await (await _joined(kit, broker)).quiet()

    @scenario()
    async def test_only_fresh_counts_in_a_settle(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        first = await _joined(kit, broker)
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
        second = await _joined(kit, broker)
        await second.take(4)
        await second.quiet()
        assert sorted(second.values) == [0, 2, 4, 5]

    @scenario()
    async def test_two_groups_each_get_every_event(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        groups = [await _joined(kit, broker, group) for group in ("one", "two")]
        await broker.publish(kit.events(60, keys=6))
        for member in groups:
            await member.take(60)
            await member.settle()
            await member.quiet()
        assert len({tuple(sorted(each.event.id for each in member.deliveries)) for member in groups}) == 1

    @scenario()
    async def test_a_paused_member_leaves_the_events_to_the_others(self, kit: Kit) -> None:
        one, two = await _shared_broker(kit), await kit.broker()
        first = await _joined(kit, one)
        await one.publish(kit.events(1))
        await first.take(1)
        await first.subscription.pause(list(first.assigned))
        await first.receive(wait_s=0.0)
        second = await _joined(kit, two)
        await one.publish([event(kit.topic, None, n) for n in range(1, 20)])
        await _together([first, second], lambda: len(second.deliveries) == 19)
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
    async def test_a_release_gives_back_what_is_not_settled(self, kit: Kit) -> None:
        one, two = await _shared_broker(kit), await kit.broker()
        first = await _joined(kit, one)
        await one.publish(kit.events(6))
        await first.take(6)
        await first.settle(_of(first, [0, 1]))
        late = first.progress(_of(first, [2]))
        second = await _joined(kit, two)
        await first.release(list(first.assigned), drained=False)
        await second.take(4)
        assert sorted(second.values) == [2, 3, 4, 5]
        assert list(await first.subscription.settle(late)) == [late[0].partition], "it was given up"
        await first.quiet()
        assert not first.assigned, "assigned to a member that is about to leave"

    @scenario()
    async def test_epochs_grow_with_every_ownership(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        highest = -1
        for _ in range(3):
            member = await _joined(kit, broker)
            epochs = [assigned.epoch for assigned in member.assigned.values()]
            assert min(epochs) > highest
            highest = max(epochs)
            await member.subscription.close()

    @scenario(max_poll_gap_s=3.0)
    async def test_a_settle_of_an_old_epoch_has_no_effect(self, kit: Kit) -> None:
        """A member that lost its ownership gets it back under a new epoch. Positions may begin again."""
        one, two = await _shared_broker(kit), await kit.broker(max_poll_gap_s=60.0)
        slow = await _joined(kit, one)
        await one.publish(kit.events(3))
        await slow.take(3)
        old, stale = slow.deliveries[0], slow.progress()
        dead = [make_record(each, old.log_id, State.DEAD) for each in slow.deliveries]
        rival = await _joined(kit, two)
        await rival.take(3)
        assert list(await slow.subscription.settle(stale)) == [old.partition], "it has lost what it settles"
        await rival.subscription.close()
        await slow.until(lambda: any(isinstance(message, Fenced) for message in slow.history))
        await slow.take(6)
        assert slow.deliveries[3].epoch > old.epoch
        assert list(await slow.subscription.settle(stale, aside=dead)) == [old.partition]
        await slow.subscription.close()
        last = await _joined(kit, two)
        await last.take(3)
        assert sorted(last.values) == [0, 1, 2]
        assert not two.features.aside or not await scanned(two)

    @scenario()
    async def test_key_order_has_owned_partitions_or_is_refused(self, kit: Kit) -> None:
        """A broker that refuses it has work queues and nothing else, and fails the rest of the broker suite."""
        one, two = await _shared_broker(kit), await kit.broker()
        try:
            members = [await kit.member(broker) for broker in (one, two)]
        except ConfigError:
            return
        await _together(members, lambda: all(member.assigned for member in members))
        assert not any(assigned.shared for member in members for assigned in member.assigned.values())
        assert not set(members[0].assigned) & set(members[1].assigned)

    @scenario()
    async def test_a_dropped_group_is_forgotten_with_its_events(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
        await broker.publish(kit.events(4))
        await member.take(4)
        due = time.time() + DUE_S
        await _set_aside(member, [_waiting(member.deliveries[0], due), _dead(member.deliveries[1])])
        (info,) = await broker.groups(kit.topic)
        assert (info.group, len(info.members)) == (GROUP, 1)
        with pytest.raises(BrokerError):
            await broker.drop_group(kit.topic, GROUP)
        await member.subscription.close()
        await broker.drop_group(kit.topic, GROUP)
        assert not list(await broker.groups(kit.topic))
        again = await _joined(kit, broker)
        await again.quiet(for_s=2 * DUE_S)
        assert not broker.features.aside or not await scanned(broker)


class SharedReceiveScenarios:
    """The limits of receive, and what wakes it."""

    @scenario()
    async def test_receive_of_a_shared_partition_honours_its_limit(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await kit.member(broker, ordering="none", start="latest")
        deadline = time.monotonic() + 40.0
        while not member.assigned:
            assert time.monotonic() < deadline, "a receive of no deliveries does not report Assigned"
            await member.receive(limit=0)
        await broker.publish(kit.events(25, keys=5))
        for _ in range(3):
            await member.receive(limit=0)
        assert not member.deliveries
        while len(member.deliveries) < 25:
            messages = await member.receive(limit=7)
            assert sum(type(message) is Delivery for message in messages) <= 7

    @scenario()
    async def test_receive_of_a_shared_partition_honours_its_bytes_but_gives_one(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
        sizes = [10, 10, 10_000, 10_000, 10, 10]
        await broker.publish([Event(new_id(), kit.topic, None, b"x" * size) for size in sizes])
        while len(member.deliveries) < len(sizes):
            messages = await member.receive(max_bytes=100)
            given = [message.event.size for message in messages if type(message) is Delivery]
            assert len(given) <= 1 or sum(given) <= 100

    @scenario()
    async def test_an_event_and_a_retry_wake_a_waiting_receive(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
        async with asyncio.timeout(20):
            waiting = asyncio.create_task(member.receive(wait_s=60.0))
            await asyncio.sleep(0.1)
            await broker.publish(kit.events(1))
            await waiting
            await _set_aside(member, [_waiting(member.deliveries[0], time.time() + DUE_S)])
            while len(member.deliveries) < 2:
                await member.receive(wait_s=60.0)

    @scenario()
    async def test_a_cancelled_receive_of_a_shared_partition_loses_nothing(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
        for n in range(30):
            receiving = asyncio.create_task(member.receive(wait_s=5.0))
            await asyncio.sleep(0.001 * (n % 4))
            publishing = asyncio.create_task(broker.publish([event(kit.topic, "a", n)]))
            await asyncio.sleep(0.001 * (n % 5))
            receiving.cancel()
            await asyncio.wait([receiving])
            await publishing
        await member.take(30)
        assert sorted(member.values) == list(range(30)), "a cancelled receive took events with it, or repeated them"

    @scenario()
    async def test_lag_of_a_shared_partition_is_true_or_unknown(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
        await member.subscription.pause(list(member.assigned))
        await member.receive(wait_s=0.0)
        await broker.publish(kit.events(12, keys=6))
        await _lags(member, 12)
        await member.subscription.resume(list(member.assigned))
        await member.take(12)
        await member.settle()
        await _lags(member, 0)


class SharedRecordScenarios:
    """A retry comes back as a delivery; a dead letter can be browsed, replayed and removed."""

    @scenario()
    async def test_a_retry_comes_back_with_its_tries_when_it_is_due(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
        odd = Event(new_id(), kit.topic, "ключ", b"7", {"a": "ü"}, "Placed", 1.5)
        await broker.publish([odd])
        await member.take(1)
        due = time.time() + DUE_S
        await _set_aside(member, [_waiting(member.deliveries[0], due)])
        again = (await member.take(2))[1]
        assert time.time() >= due - EARLY_S, "delivered before it was due"
        assert again.event.whole() == odd
        assert again.tries is not None
        assert (again.tries.failed, again.tries.crashes) == (TRIES.failed, TRIES.crashes)
        assert again.position != member.deliveries[0].position

    @scenario()
    async def test_a_retry_goes_to_any_member(self, kit: Kit) -> None:
        """It outlives the member that stored it, and the time without any member."""
        one, two = await _shared_broker(kit), await kit.broker()
        first = await _joined(kit, one)
        await one.publish(kit.events(2))
        await first.take(2)
        second = await _joined(kit, two)
        dues = [time.time() + DUE_S, time.time() + 2 * DUE_S]
        await _set_aside(first, [_waiting(each, due) for each, due in zip(first.deliveries, dues, strict=True)])
        await first.subscription.close()
        await second.take(1)
        await second.settle()
        await second.subscription.close()
        third = await _joined(kit, one)
        await third.take(1)
        assert time.time() >= dues[1] - EARLY_S, "delivered before it was due"
        assert (second.values, third.values) == ([0], [1])

    @scenario()
    async def test_a_retry_that_fails_again_comes_back_again_until_it_is_settled(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
        await broker.publish(kit.events(1))
        for failed in range(1, 4):
            last = (await member.take(failed))[-1]
            assert (last.tries or Tries()).failed == failed - 1
            record = _waiting(last, time.time() + 0.2, tries=Tries(failed=failed))
            await _set_aside(member, [record])
        await member.take(4)
        assert not await member.settle(member.deliveries[-1:])
        await member.quiet()
        if broker.features.aside:
            assert not await scanned(broker), "the record of an event that is done"
        await member.subscription.close()
        await (await _joined(kit, broker)).quiet()

    @scenario()
    async def test_a_retry_that_is_stored_twice_comes_back_once(self, kit: Kit) -> None:
        """The plane repeats a settle whose answer was lost."""
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
        await broker.publish(kit.events(1))
        (only,) = (await member.take(1)).copy()
        record = _waiting(only, time.time() + 0.2)
        for _ in range(3):
            await _set_aside(member, [record])
        await member.take(2)
        await member.quiet()

    @scenario()
    async def test_a_retry_waits_no_longer_than_it_says_whatever_the_clocks_say(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member = await _joined(kit, broker)
        await broker.publish(kit.events(1))
        (only,) = await member.take(1)
        await _set_aside(member, [_waiting(only, time.time() + 86_400.0, wait_s=0.2)])
        await member.take(2)

    @scenario()
    async def test_dead_letters_of_a_shared_partition_are_browsed_and_removed(self, kit: Kit) -> None:
        broker, other = await _with_aside(kit)
        member = await _joined(kit, broker)
        await broker.publish(kit.events(3))
        await member.take(3)
        dead = [_dead(delivery) for delivery in member.deliveries]
        await _set_aside(member, dead)
        assert _by_id(await scanned(other)) == _by_id(dead)
        aside, where = other.aside(GROUP), Filter(states=frozenset({State.DEAD}), topic=kit.topic)
        assert (await aside.count(where)).records == 3
        assert await aside.remove([dead[0].id], expect=State.WAITING) == 0
        assert await aside.remove([dead[0].id], expect=State.DEAD) == 1
        assert await aside.remove([dead[0].id], expect=State.DEAD) == 0
        assert _by_id(await scanned(broker)) == _by_id(dead[1:])
        assert not await scanned(broker, Filter(key="another"))
        await member.quiet()
        assert not any(isinstance(message, Moved) for message in member.history), "no member owns its records"

    @scenario()
    async def test_a_replay_comes_back_with_its_tries_reset(self, kit: Kit) -> None:
        broker, other = await _with_aside(kit)
        member = await _joined(kit, broker)
        await broker.publish(kit.events(2))
        await member.take(2)
        dead = [_dead(delivery) for delivery in member.deliveries]
        await _set_aside(member, dead)
        aside, due = other.aside(GROUP), time.time() + DUE_S
        assert await aside.move([dead[0].id], expect=State.WAITING, to=State.WAITING, due=due) == 0
        assert await aside.move([dead[0].id], expect=State.DEAD, to=State.WAITING, due=due) == 1
        assert await aside.move([dead[0].id], expect=State.DEAD, to=State.WAITING, due=due) == 0
        again = (await member.take(3))[2]
        assert time.time() >= due - EARLY_S, "delivered before it was due"
        assert again.event.whole() == dead[0].event
        assert (again.tries or Tries()) == Tries()
        await member.settle([again])
        await member.quiet()
        assert [record.id for record in await scanned(broker)] == [dead[1].id]
        assert not any(isinstance(message, Moved) for message in member.history), "no member owns its records"

    @scenario()
    async def test_a_replay_while_no_member_is_there_waits_for_the_next(self, kit: Kit) -> None:
        broker, other = await _with_aside(kit)
        member = await _joined(kit, broker)
        await broker.publish(kit.events(1))
        (only,) = await member.take(1)
        await _set_aside(member, [_dead(only)])
        await member.subscription.close()
        due = time.time()
        assert await other.aside(GROUP).move([_dead(only).id], expect=State.DEAD, to=State.WAITING, due=due) == 1
        following = await _joined(kit, other)
        await following.take(1)
        await _set_aside(following, [_dead(following.deliveries[0])])
        (record,) = await scanned(broker)
        assert (record.state, record.event.id) == (State.DEAD, only.event.id), "it died twice and is one letter"

    @scenario()
    async def test_other_groups_see_nothing_of_a_retry_or_a_replay(self, kit: Kit) -> None:
        broker = await _shared_broker(kit)
        member, bystander = await _joined(kit, broker), await _joined(kit, broker, "other")
        await broker.publish(kit.events(2))
        await member.take(2)
        await bystander.take(2)
        retried, died = member.deliveries
        await _set_aside(member, [_waiting(retried, time.time() + 0.2), _dead(died)])
        count = 3
        if broker.features.aside:
            due = time.time()
            await broker.aside(GROUP).move([_dead(died).id], expect=State.DEAD, to=State.WAITING, due=due)
            count = 4
            assert not (await broker.aside("other").scan(Filter(), None, 10)).records
        await member.take(count)
        await bystander.quiet()


class SharedProcessScenarios:
    """Members in processes of their own, to be killed."""

    @scenario(max_poll_gap_s=5.0)
    async def test_what_a_killed_member_had_goes_to_another(self, kit: Kit) -> None:
        broker = await _shared_broker(kit, processes=True)
        await (await _joined(kit, broker)).subscription.close()  # there is a group to publish for
        await broker.publish(kit.events(10))
        child = kit.child("hold", limit=3, ordering="none")
        while (await child.line())["said"] != "Delivery":
            pass
        child.kill()
        member = await _joined(kit, broker)
        await member.take(10)
        assert sorted(member.values) == list(range(10))

    @pytest.mark.slow
    @scenario(max_poll_gap_s=5.0)
    async def test_killed_members_of_a_shared_partition_lose_nothing(self, kit: Kit) -> None:
        broker = await _shared_broker(kit, processes=True)
        await (await _joined(kit, broker)).subscription.close()
        children = [kit.child("work", limit=20, ordering="none") for _ in range(3)]
        for start in range(0, 2_000, 500):
            await broker.publish([event(kit.topic, "a", n) for n in range(start, start + 500)])
            await asyncio.sleep(0.25)
            children.pop(0).kill()
            children.append(kit.child("work", limit=20, ordering="none"))
        deadline = time.monotonic() + 60.0
        while len(set(effects(kit))) < 2_000:
            assert time.monotonic() < deadline, f"{len(set(effects(kit)))} of 2,000 were handled in a minute"
            await asyncio.sleep(0.1)


class SharedScenarios(SharingScenarios, SharedReceiveScenarios, SharedRecordScenarios, SharedProcessScenarios):
    pass


async def _shared_broker(kit: Kit, *, processes: bool = False) -> Broker:
    broker = await kit.broker()
    if not broker.features.shared:
        pytest.skip("this broker has no shared partitions")
    harness: Any = kit.harness
    if processes and harness.in_process:
        pytest.skip("this broker is in the memory of one process")
    return broker


async def _with_aside(kit: Kit) -> tuple[Broker, Broker]:
    broker = await _shared_broker(kit)
    if not broker.features.aside:
        pytest.skip("this broker does not browse its records")
    return broker, await kit.broker()


async def _joined(kit: Kit, broker: Broker, group: str = GROUP) -> Member:
    """A member that holds the shared partition."""
    member = await kit.member(broker, group, ordering="none", start="latest")
    await member.until(lambda: bool(member.assigned))
    return member


async def _together(members: Sequence[Member], condition: Callable[[], bool], limit: int = 1_000) -> None:
    deadline = time.monotonic() + 40.0
    while not condition():
        assert time.monotonic() < deadline, [len(member.deliveries) for member in members]
        await asyncio.gather(*(member.receive(limit=limit, wait_s=0.1) for member in members))


async def _received(members: Sequence[Member], count: int) -> None:
    """Until they were given so many events in all, a few at a time."""
    await _together(members, lambda: sum(len(member.deliveries) for member in members) >= count, limit=10)


def _of(member: Member, numbers: Iterable[int]) -> list[Delivery]:
    """Its deliveries with these values: without order they come in any."""
    wanted = set(numbers)
    return [each for each in member.deliveries if int(each.event.value or b"") in wanted]


def _waiting(delivery: Delivery, due: float, **fields: Any) -> AsideRecord:
    usual = {"due": due, "wait_s": due - time.time(), "tries": TRIES}
    return make_record(delivery, delivery.log_id, State.WAITING, **(usual | fields))


def _dead(delivery: Delivery) -> AsideRecord:
    return make_record(delivery, delivery.log_id, State.DEAD)


async def _set_aside(member: Member, records: Sequence[AsideRecord]) -> None:
    """Store the records; with that their deliveries are done."""
    places = {(record.partition, record.position) for record in records}
    done = [each for each in member.deliveries if (each.partition, each.position) in places]
    assert not await member.subscription.settle(member.progress(done), aside=records)


def _by_id(records: Iterable[AsideRecord]) -> dict[str, AsideRecord]:
    return {record.id: record for record in records}


async def _lags(member: Member, count: int) -> None:
    """Soon it reports so many undelivered events, or that it does not know."""
    deadline = time.monotonic() + 20.0
    while True:
        lag = await member.subscription.lag()
        assert set(lag) == set(member.assigned)
        assert all(each.oldest_age_s is None or 0 <= each.oldest_age_s < 60 for each in lag.values())
        known = [each.undelivered for each in lag.values() if each.undelivered is not None]
        if len(known) < len(lag) or sum(known) == count:
            return
        assert time.monotonic() < deadline, f"{sum(known)} are reported, {count} are there"
        await asyncio.sleep(0.1)
