"""Records of shared partitions: retries are delivered when due; dead letters are browsed, replayed and removed."""

import time
from collections.abc import Iterable

from onward.brokers.base import AsideRecord, Filter, Moved, State, Tries
from onward.event import Event, new_id
from onward.testing.aside import GROUP, scanned
from onward.testing.scenario import Kit, scenario
from onward.testing.shared_members import (
    DUE_S,
    TRIES,
    dead,
    joined,
    set_aside,
    shared_broker,
    take_exactly,
    waiting,
    with_aside,
)

EARLY_S = 0.05  # how much two clocks may differ


class SharedRecordScenarios:
    @scenario()
    async def test_a_retry_is_delivered_with_its_tries_when_it_is_due(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        published = Event(new_id(), kit.topic, "ключ", b"7", {"a": "ü"}, "Placed", 1.5)
        await broker.publish([published])
        await member.take(1)
        due = time.time() + DUE_S
        await set_aside(member, [waiting(member.deliveries[0], due)])
        again = (await member.take(2))[1]
        assert time.time() >= due - EARLY_S, "delivered before it was due"
        assert again.event.whole() == published
        assert again.tries is not None
        assert (again.tries.failed, again.tries.crashes) == (TRIES.failed, TRIES.crashes)
        assert again.position != member.deliveries[0].position

    @scenario()
    async def test_a_retry_goes_to_any_member(self, kit: Kit) -> None:
        """It goes to another member, or after a time without members to the next one that joins."""
        one, two = await shared_broker(kit), await kit.broker()
        first, second = await joined(kit, one), await joined(kit, two)
        await second.subscription.pause(list(second.assigned))
        await second.receive(wait_s=0.0)
        await one.publish(kit.events(1))
        await first.take(1)
        await second.subscription.resume(list(second.assigned))
        await set_aside(first, [waiting(first.deliveries[0], time.time() + DUE_S)])
        await first.subscription.close()
        await second.take(1)
        due = time.time() + DUE_S
        await set_aside(second, [waiting(second.deliveries[0], due)])
        await second.subscription.close()
        third = await joined(kit, one)
        await third.take(1)
        assert time.time() >= due - EARLY_S, "delivered before it was due"
        await take_exactly(third, 1)

    @scenario()
    async def test_a_retry_that_fails_again_is_delivered_again_until_it_is_settled(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        await broker.publish(kit.events(1))
        for failed in range(1, 4):
            last = (await member.take(failed))[-1]
            assert (last.tries or Tries()).failed == failed - 1
            record = waiting(last, time.time() + 0.2, tries=Tries(failed=failed))
            await set_aside(member, [record])
        await take_exactly(member, 4)
        assert not await member.settle(member.deliveries[-1:])
        if broker.features.aside:
            assert not await scanned(broker), "an event that is done still has a record"
        await member.subscription.close()
        await (await joined(kit, broker)).quiet()

    @scenario()
    async def test_a_retry_that_is_stored_twice_is_delivered_once(self, kit: Kit) -> None:
        """The plane repeats a settle whose answer was lost."""
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        await broker.publish(kit.events(1))
        await member.take(1)
        record = waiting(member.deliveries[0], time.time() + 0.2)
        for _ in range(3):
            await set_aside(member, [record])
        await take_exactly(member, 2)

    @scenario()
    async def test_a_retry_waits_no_longer_than_wait_s_whatever_the_clocks_say(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member = await joined(kit, broker)
        await broker.publish(kit.events(1))
        (only,) = await member.take(1)
        await set_aside(member, [waiting(only, time.time() + 86_400.0, wait_s=0.2)])
        await member.take(2)

    @scenario()
    async def test_dead_letters_of_a_shared_partition_are_browsed_and_removed(self, kit: Kit) -> None:
        broker, other = await with_aside(kit)
        member = await joined(kit, broker)
        await broker.publish(kit.events(3))
        await member.take(3)
        letters = [dead(delivery) for delivery in member.deliveries]
        await set_aside(member, letters)
        assert by_id(await scanned(other)) == by_id(letters)
        aside, where = other.aside(GROUP), Filter(states=frozenset({State.DEAD}), topic=kit.topic)
        assert (await aside.count(where)).records == 3
        assert await aside.remove([letters[0].id], expect=State.WAITING) == 0
        assert await aside.remove([letters[0].id], expect=State.DEAD) == 1
        assert await aside.remove([letters[0].id], expect=State.DEAD) == 0
        assert by_id(await scanned(broker)) == by_id(letters[1:])
        assert not await scanned(broker, Filter(key="another"))
        await member.quiet()
        assert not any(isinstance(message, Moved) for message in member.history), (
            "got Moved, although no member owns a record of a shared partition"
        )

    @scenario()
    async def test_a_replayed_dead_letter_is_delivered_with_its_tries_reset(self, kit: Kit) -> None:
        broker, other = await with_aside(kit)
        member = await joined(kit, broker)
        await broker.publish(kit.events(2))
        await member.take(2)
        letters = [dead(delivery) for delivery in member.deliveries]
        await set_aside(member, letters)
        aside, due = other.aside(GROUP), time.time() + DUE_S
        assert await aside.move([letters[0].id], expect=State.WAITING, to=State.WAITING, due=due) == 0
        assert await aside.move([letters[0].id], expect=State.DEAD, to=State.WAITING, due=due) == 1
        assert await aside.move([letters[0].id], expect=State.DEAD, to=State.WAITING, due=due) == 0
        again = (await member.take(3))[2]
        assert time.time() >= due - EARLY_S, "delivered before it was due"
        assert again.event.whole() == letters[0].event
        assert (again.tries or Tries()) == Tries()
        await member.settle([again])
        await take_exactly(member, 3)
        assert [record.id for record in await scanned(broker)] == [letters[1].id]
        assert not any(isinstance(message, Moved) for message in member.history), (
            "got Moved, although no member owns a record of a shared partition"
        )

    @scenario()
    async def test_a_replay_without_members_waits_for_the_next_member(self, kit: Kit) -> None:
        broker, other = await with_aside(kit)
        member = await joined(kit, broker)
        await broker.publish(kit.events(1))
        (only,) = await member.take(1)
        await set_aside(member, [dead(only)])
        await member.subscription.close()
        due = time.time()
        assert await other.aside(GROUP).move([dead(only).id], expect=State.DEAD, to=State.WAITING, due=due) == 1
        following = await joined(kit, other)
        await following.take(1)
        await set_aside(following, [dead(following.deliveries[0])])
        found = [(record.state, record.event.id) for record in await scanned(broker)]
        assert found == [(State.DEAD, only.event.id)], "an event that died twice must be one dead letter"

    @scenario()
    async def test_other_groups_get_nothing_of_a_retry_or_a_replay(self, kit: Kit) -> None:
        broker = await shared_broker(kit)
        member, bystander = await joined(kit, broker), await joined(kit, broker, "other")
        await broker.publish(kit.events(2))
        await member.take(2)
        await take_exactly(bystander, 2)
        retried, died = member.deliveries
        await set_aside(member, [waiting(retried, time.time() + 0.2), dead(died)])
        count = 3
        if broker.features.aside:
            due = time.time()
            await broker.aside(GROUP).move([dead(died).id], expect=State.DEAD, to=State.WAITING, due=due)
            count = 4
            assert not (await broker.aside("other").scan(Filter(), None, 10)).records
        await take_exactly(member, count)
        await take_exactly(bystander, 2)


def by_id(records: Iterable[AsideRecord]) -> dict[str, AsideRecord]:
    return {record.id: record for record in records}
