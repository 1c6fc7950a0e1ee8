"""Succession: a supervised process dies, and the next one in its slot takes over."""

import asyncio
import time
from collections.abc import Sequence

from onward.brokers.base import Revoked, Supervised
from onward.clock import now
from onward.testing.scenario import Kit, Member, scenario

_LEASE_S = 25.0  # longer than a member takes to start, even on a busy machine
_LONG_WAITS = {"lease_s": _LEASE_S, "takeover_grace_s": _LEASE_S}


class SuccessionScenarios:
    @scenario(**_LONG_WAITS)
    async def test_a_successor_gets_the_partitions_of_a_gone_member_at_once(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(40, keys=20))
        await _kill_an_owner(kit, "slot-1", "first")
        killed_at = now()
        successor = await kit.member(broker, supervised=Supervised("slot-1", "second", frozenset({"first"})))
        await successor.take(40)
        assert now() - killed_at < _LEASE_S, "the successor waited for the lease or the grace"
        assert all(assigned.unclean for assigned in successor.assigned.values()), (
            "unclean is False, although the events may have run"
        )
        assert not await successor.settle()

    @scenario(**_LONG_WAITS)
    async def test_a_successor_gets_the_partitions_of_every_gone_member(self, kit: Kit) -> None:
        """The second member was killed before it joined, so the first one still owned the partitions."""
        broker = await kit.broker()
        await broker.publish(kit.events(8))
        await _kill_an_owner(kit, "slot-1", "first")
        killed_at = now()
        third = Supervised("slot-1", "third", frozenset({"first", "second"}))
        await (await kit.member(broker, supervised=third)).take(8)
        assert now() - killed_at < _LEASE_S

    @scenario(lease_s=6.0, takeover_grace_s=6.0)
    async def test_a_successor_waits_for_a_member_that_is_not_reported_as_gone(self, kit: Kit) -> None:
        """The same slot alone proves nothing: a process that the dead member started may still run."""
        broker = await kit.broker()
        await broker.publish(kit.events(8))
        await _kill_an_owner(kit, "slot-1", "first")
        killed_at = now()
        successor = await kit.member(broker, supervised=Supervised("slot-1", "second"))
        await successor.take(8)
        assert now() - killed_at > 6.0
        assert successor.deliveries[0].partition in successor.assigned

    @scenario(lease_s=6.0, takeover_grace_s=6.0)
    async def test_a_successor_waits_for_the_owner_that_its_gone_member_waited_for(self, kit: Kit) -> None:
        """The first owner is only suspended. The second member was killed while it waited for the first."""
        broker = await kit.broker()
        await broker.publish(kit.events(8))
        first = kit.child("hold")
        while (await first.line())["report"] != "Delivery":
            pass
        first.stop()
        waiting = kit.child("hold", slot="slot-1", member="second")
        while not {each.name for each in await broker.owners(kit.topic, "group")} & {"slot-1", "second"}:
            await asyncio.to_thread(time.sleep, 0.05)
        waiting.kill()
        killed_at = now()
        third = Supervised("slot-1", "third", frozenset({"second"}))
        await (await kit.member(broker, supervised=third)).take(8)
        assert now() - killed_at > 5.9, "the third member did not wait for the first owner"

    @scenario(**_LONG_WAITS)
    async def test_other_members_keep_their_partitions_while_a_successor_joins(self, kit: Kit) -> None:
        broker, others = await kit.broker(), await kit.broker()
        other = await (await kit.member(others, supervised=Supervised("slot-2", "other"))).hold(4)
        child = kit.child("hold", slot="slot-1", member="first")
        await other.until(lambda: len(other.assigned) == 2)
        for _ in range(2):  # a partition that the child did not own yet would be free for all
            while (await child.line())["report"] != "Assigned":
                pass
        child.kill()
        killed_at, before = now(), list(other.history)
        successor = await kit.member(broker, supervised=Supervised("slot-1", "second", frozenset({"first"})))
        await _receive_until_each_owns([other, successor], 2)
        assert now() - killed_at < _LEASE_S
        assert not [each for each in other.history[len(before) :] if isinstance(each, Revoked)]

    @scenario(lease_s=_LEASE_S, takeover_grace_s=1.0)
    async def test_partitions_of_a_gone_member_are_free_for_all_once_its_successor_joins(self, kit: Kit) -> None:
        """The successor gets only its share. The other partitions do not wait for the lease either."""
        broker, others = await kit.broker(), await kit.broker()
        await broker.publish(kit.events(40, keys=20))
        await _kill_an_owner(kit, "slot-1", "first")
        killed_at = now()
        other = await kit.member(others, supervised=Supervised("slot-2", "other"))
        successor = await kit.member(broker, supervised=Supervised("slot-1", "second", frozenset({"first"})))
        await _receive_events([other, successor], 40)
        assert now() - killed_at < _LEASE_S * 0.6, "some partitions waited for the lease"

    @scenario(**_LONG_WAITS)
    async def test_a_supervised_member_that_leaves_gives_up_its_partitions_at_once(self, kit: Kit) -> None:
        broker, others = await kit.broker(), await kit.broker()
        member = await (await kit.member(broker, supervised=Supervised("slot-1", "first"))).hold(4)
        other = await kit.member(others, supervised=Supervised("slot-2", "other"))
        await _receive_until_each_owns([member, other], 2)
        left_at = now()
        await member.release(list(member.assigned))
        closing = asyncio.create_task(member.subscription.close())
        await other.hold(4)
        await closing
        assert now() - left_at < _LEASE_S
        assert not any(assigned.unclean for assigned in other.assigned.values())


async def _kill_an_owner(kit: Kit, slot: str, name: str) -> None:
    """When it owns all four partitions and was given events."""
    child = kit.child("hold", slot=slot, member=name)
    seen: list[str] = []
    while seen.count("Assigned") < 4 or "Delivery" not in seen:
        seen.append((await child.line())["report"])
    child.kill()


async def _receive_events(members: Sequence[Member], count: int) -> None:
    """Receive until the members together have got this many different events."""

    def seen() -> set[str]:
        return {delivery.event.id for member in members for delivery in member.deliveries}

    async def receive(member: Member) -> None:
        while len(seen()) < count:
            await member.receive()

    await asyncio.gather(*map(receive, members))


async def _receive_until_each_owns(members: Sequence[Member], count: int) -> None:
    async def receive(member: Member) -> None:
        while not all(len(each.assigned) == count for each in members):
            await member.receive()

    await asyncio.gather(*map(receive, members))
