"""Ownership: a partition has one owner at a time, and a former owner can change nothing."""

import asyncio
import time
from collections.abc import Callable

import pytest

from onward.brokers.base import Fenced, Progress, Revoked
from onward.clock import now
from onward.testing.scenario import OVER_LEASE_S, Kit, Member, effects, event, first_times, scenario


class OwnershipScenarios:
    @scenario()
    async def test_a_settle_under_an_old_epoch_has_no_effect_and_returns_the_partition(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(40, keys=20))
        member = await (await kit.member(broker)).hold(4)
        await member.take(40)
        old, before = member.progress(), dict(member.assigned)
        rival = await kit.member(await kit.broker())
        member.handled = 0  # it settles nothing before it releases
        await _receive_until([member, rival], lambda: len(rival.assigned) == 2)
        moved = set(rival.assigned)
        await rival.subscription.close()
        await member.hold(4)
        assert all(member.assigned[each].epoch > before[each].epoch for each in moved)
        stale = [progress for progress in old if progress.partition in moved]
        assert stale
        assert set(await member.subscription.settle(stale)) == {progress.partition for progress in stale}
        again = sum(delivery.partition in moved for delivery in member.deliveries[:40])
        await member.take(40 + again)
        assert len(member.deliveries) == 40 + again, "a settle under an old epoch took effect"

    @scenario()
    async def test_a_former_owner_cannot_change_the_stored_progress(self, kit: Kit) -> None:
        """A live member settles a partition that it has released. The progress moves neither back nor forward."""
        one, two = await kit.broker(), await kit.broker()
        await one.publish(kit.events(8))
        old = await (await kit.member(one)).hold(4)
        deliveries = list(await old.take(8))
        partition = deliveries[0].partition
        stale = [
            Progress(partition, deliveries[0].epoch, deliveries[at].position, (), [deliveries[at].position])
            for at in (3, 7)
        ]
        await old.subscription.release(list(old.assigned), drained=False)
        await old.subscription.pause([])
        new = await kit.member(two)
        await new.until(lambda: len(new.deliveries) >= 5)
        await new.settle(new.deliveries[:5])
        for progress in stale:
            assert list(await old.subscription.settle([progress])) == [partition]
        await old.subscription.close()
        await new.subscription.close()
        last = await kit.member(two)
        await last.take(3)
        assert last.values == [5, 6, 7]

    @scenario()
    async def test_the_next_owner_learns_whether_the_release_was_drained(self, kit: Kit) -> None:
        """The next owner goes on after the last settled event. `unclean` is False only after a drained release."""
        one, two = await kit.broker(), await kit.broker()
        await one.publish(kit.events(10))
        first = await (await kit.member(one)).hold(4)
        await first.take(10)
        await first.settle(first.deliveries[:6])
        partition = first.deliveries[0].partition
        others = [each for each in first.assigned if each != partition]
        await first.release([partition], drained=True)
        await first.release(others, drained=False)
        await first.subscription.close()
        second = await (await kit.member(two)).hold(4)
        await second.take(4)
        assert second.values == [6, 7, 8, 9]
        assert not second.assigned[partition].unclean
        assert all(second.assigned[each].unclean for each in others)

    @scenario()
    async def test_fences_grow_over_the_fleet_and_epochs_within_a_process(self, kit: Kit) -> None:
        """The broker issues the fences, so a new process never gets a lower one than an earlier process had."""
        fences: dict[object, int] = {}
        for _ in range(3):
            broker = await kit.broker()
            member = await (await kit.member(broker)).hold(4)
            for partition, assigned in member.assigned.items():
                if broker.features.fence:
                    assert assigned.fence is not None
                    assert assigned.fence > fences.get(partition, -1)
                    fences[partition] = assigned.fence
            epochs = {assigned.epoch for assigned in member.assigned.values()}
            await member.subscription.close()
            member = await (await kit.member(broker)).hold(4)
            assert min(assigned.epoch for assigned in member.assigned.values()) > max(epochs)
            fences |= {p: a.fence for p, a in member.assigned.items() if a.fence is not None}
            await member.release(list(member.assigned))
            await member.subscription.close()

    @scenario()
    async def test_a_leaving_member_does_not_get_its_released_partitions_back(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(3))
        member = await (await kit.member(broker)).hold(4)
        await member.take(3)
        await member.settle()
        await member.release(list(member.assigned))
        await member.quiet(for_s=OVER_LEASE_S)
        assert not member.assigned
        await member.subscription.close()
        again = await (await kit.member(broker)).hold(4)
        assert not any(assigned.unclean for assigned in again.assigned.values()), (
            "unclean, although the last owner had drained"
        )

    @scenario()
    async def test_a_log_has_the_same_id_under_every_owner(self, kit: Kit) -> None:
        broker = await kit.broker()
        ids = []
        for _ in range(2):
            member = await (await kit.member(broker)).hold(4)
            ids.append({partition: assigned.log_id for partition, assigned in member.assigned.items()})
            await member.subscription.close()
        assert ids[0] == ids[1]
        assert all(ids[0].values())

    @scenario()
    async def test_a_delivery_carries_its_fence_and_its_log_id(self, kit: Kit) -> None:
        """An inbox in another store uses them to decide whether a position is done and which owner may write it."""
        broker = await kit.broker()
        await broker.publish(kit.events(10))
        member = await (await kit.member(broker)).hold(4)
        await member.take(10)
        for delivery in member.deliveries:
            assigned = member.assigned[delivery.partition]
            assert (delivery.fence, delivery.log_id, delivery.drawn) == (assigned.fence, assigned.log_id, False)

    @scenario()
    async def test_no_other_member_is_assigned_before_the_owners_sure_until(self, kit: Kit) -> None:
        one, two = await kit.broker(), await kit.broker(max_poll_gap_s=30.0)
        await one.publish(kit.events(3))
        child = kit.child("hold")
        while (line := await child.line())["report"] != "Delivery":
            pass
        child.stop()
        member = await kit.member(two)
        await member.until(lambda: bool(member.assigned))
        assert now() > line["sure_until"], "taken over before the sure_until of the stopped owner"
        await member.take(3)
        child.go_on()

    @scenario(revoke_grace_s=2.0)
    async def test_sure_until_is_in_the_past_while_a_fenced_message_is_undelivered(self, kit: Kit) -> None:
        """Another member may already handle these events, so the former owner must start nothing."""
        one, two = await kit.broker(), await kit.broker()
        slow = await (await kit.member(one, yields=False)).hold(4)
        rival = await kit.member(two)
        await _receive_until([slow, rival], lambda: any(isinstance(message, Revoked) for message in slow.history))
        received = len(slow.history)
        await rival.hold(2)
        assert len(slow.history) == received
        for _ in range(20):  # also while the broker renews its other partitions
            assert slow.subscription.sure_until() <= now(), "sure_until is in the future, although a partition was lost"
            await asyncio.sleep(0.02)
        await slow.until(lambda: any(isinstance(message, Fenced) for message in slow.history))
        await slow.until(lambda: slow.subscription.sure_until() > now())

    @scenario(max_poll_gap_s=3.0)
    async def test_an_owner_that_does_not_receive_for_max_poll_gap_s_loses_its_partitions(self, kit: Kit) -> None:
        one, two = await kit.broker(), await kit.broker(max_poll_gap_s=60.0)
        stuck = await (await kit.member(one)).hold(4)
        await stuck.until(lambda: stuck.subscription.sure_until() > now())
        member = await (await kit.member(two)).hold(4)
        assert now() > stuck.subscription.sure_until(), "taken over before the sure_until of the stuck owner"
        assert all(assigned.unclean for assigned in member.assigned.values())

    @scenario()
    async def test_an_owner_that_does_not_receive_for_a_lease_keeps_its_partitions(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        await asyncio.sleep(OVER_LEASE_S)  # the process is alive, and max_poll_gap_s is not over
        assert member.subscription.sure_until() > now()
        await broker.publish(kit.events(1))
        await member.take(1)
        assert not await member.settle()

    @scenario()
    async def test_members_share_partitions_and_rebalance_when_one_leaves(self, kit: Kit) -> None:
        one, two = await kit.broker(), await kit.broker()
        first = await (await kit.member(one)).hold(4)
        second = await kit.member(two)

        def shared() -> bool:
            return len(first.assigned) == 2 and len(second.assigned) == 2

        await _receive_until([first, second], shared)
        assert not set(first.assigned) & set(second.assigned)
        assert not any(assigned.unclean for assigned in second.assigned.values())
        await second.release(list(second.assigned))
        await second.subscription.close()
        await first.hold(4)

    @scenario()
    async def test_a_revoked_member_that_does_not_release_is_fenced(self, kit: Kit) -> None:
        kit.options["revoke_grace_s"] = 1.0
        one, two = await kit.broker(), await kit.broker()
        stubborn = await (await kit.member(one, yields=False)).hold(4)
        second = await kit.member(two)
        await _receive_until([stubborn, second], lambda: len(second.assigned) == 2)
        assert any(isinstance(message, Fenced) for message in stubborn.history)
        assert not set(stubborn.assigned) & set(second.assigned)
        assert all(assigned.unclean for assigned in second.assigned.values())

    @scenario(revoke_grace_s=2.0)
    async def test_a_late_release_or_pause_does_not_affect_the_next_ownership(self, kit: Kit) -> None:
        one, two = await kit.broker(), await kit.broker()
        slow = await (await kit.member(one, yields=False)).hold(4)
        rival = await kit.member(two)
        await _receive_until([slow, rival], lambda: any(isinstance(message, Revoked) for message in slow.history))
        revoked = [p for message in slow.history if isinstance(message, Revoked) for p in message.partitions]
        await rival.until(lambda: len(rival.assigned) == 2)  # the deadline has passed, and slow has not received Fenced
        await rival.subscription.close()
        await asyncio.sleep(0.5)
        await slow.subscription.pause(revoked)
        await slow.subscription.release(revoked, drained=False)
        await slow.hold(4)
        await one.publish(kit.events(40, keys=20))
        await slow.take(40)
        await slow.quiet(for_s=OVER_LEASE_S)
        assert len(slow.assigned) == 4, "a late release ended a new ownership"

    @scenario(lease_s=1.0)  # so short that a busy machine causes takeovers too
    async def test_key_order_holds_while_members_join_and_are_killed(self, kit: Kit) -> None:
        broker = await kit.broker()
        total, keys = 3000, 40
        children = [kit.child("work")]
        sent = 0
        for turn in range(6):
            await broker.publish(
                [event(kit.topic, f"key-{n % keys}", n // keys) for n in range(sent, sent + total // 6)]
            )
            sent += total // 6
            children.append(kit.child("work"))
            await children[-1].line()
            await asyncio.sleep(0.3)
            if turn % 2:
                children.pop(0).kill()
        await _wait_for_effects(kit, sent)
        done = effects(kit)
        assert first_times(done) == {f"key-{k}": list(range(total // keys)) for k in range(keys)}

    @scenario()
    async def test_a_suspended_owner_that_resumes_changes_nothing(self, kit: Kit) -> None:
        """It is suspended while it waits in receive. Events that are published later belong to the new owner alone."""
        broker = await kit.broker()
        await broker.publish(kit.events(3))
        child = kit.child("hold")
        lines = [await child.line() for _ in range(1)]
        while len([line for line in lines if line["report"] == "Delivery"]) < 3:
            lines.append(await child.line())
        child.stop()
        member = await kit.member(broker)
        await member.take(3)
        await member.settle(member.deliveries[:2])
        await broker.publish([event(kit.topic, "key-0", n) for n in (3, 4)])
        child.go_on()
        while (line := await child.line())["report"] != "Fenced":
            assert line["report"] != "Delivery" or not line["sure"], (
                "a former owner got an event while its sure_until was in the future"
            )
        await member.take(5)
        assert member.values == [0, 1, 2, 3, 4]
        child.kill()
        partition = member.deliveries[0].partition
        assert member.assigned[partition].unclean
        await member.settle()
        await member.subscription.close()
        last = await (await kit.member(broker)).hold(4)
        await last.quiet()

    @scenario()
    async def test_sure_until_of_a_suspended_owner_that_resumes_is_in_the_past(self, kit: Kit) -> None:
        """This holds from the first moment, although its client has not yet noticed the suspension."""
        broker = await kit.broker()
        await broker.publish(kit.events(3))
        child = kit.child("watch", count=3)
        await child.line()
        child.stop()
        stopped = now()
        await (await kit.member(broker)).take(3)
        stopped_s = now() - stopped
        child.go_on()
        while (line := await child.line())["slept_s"] < stopped_s * 0.9:
            pass  # a busy machine delayed the child; this is not our stop
        assert not line["sure"], "sure_until of a former owner was in the future"

    @scenario()
    async def test_a_step_of_the_wall_clock_moves_no_ownership(self, kit: Kit) -> None:
        """Leases are measured on a clock that cannot be set."""
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        before = dict(member.assigned)
        real = time.time
        try:
            for step_s in (86_400.0, -86_400.0):
                time.time = lambda step_s=step_s: real() + step_s  # type: ignore[misc]
                rival = await kit.member(await kit.broker(), yields=False)
                deadline = time.monotonic() + OVER_LEASE_S
                while time.monotonic() < deadline:
                    await member.subscription.receive(0, 1, 0.1)
                    await rival.receive(wait_s=0.1)
                assert not rival.assigned, "a clock step ended a lease"
                await rival.subscription.close()
        finally:
            time.time = real
        assert member.assigned == before
        assert member.subscription.sure_until() > now()

    @pytest.mark.slow
    @scenario(lease_s=1.0)
    async def test_killed_members_lose_no_event_and_keep_key_order(self, kit: Kit) -> None:
        broker = await kit.broker()
        total, keys = 6000, 50
        children = [kit.child("work", limit=20) for _ in range(3)]
        for start in range(0, total, 500):
            await broker.publish([event(kit.topic, f"key-{n % keys}", n // keys) for n in range(start, start + 500)])
            await asyncio.sleep(0.25)
            children.pop(0).kill()
            children.append(kit.child("work", limit=20))
        await _wait_for_effects(kit, total)
        assert first_times(effects(kit)) == {f"key-{k}": list(range(total // keys)) for k in range(keys)}


async def _receive_until(members: list[Member], condition: Callable[[], bool], within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, [list(member.assigned) for member in members]
        await asyncio.gather(*(member.receive(wait_s=0.1) for member in members))


async def _wait_for_effects(kit: Kit, count: int, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while len(set(effects(kit))) < count:
        assert time.monotonic() < deadline, f"{len(set(effects(kit)))} of {count} events were handled in {within_s} s"
        await asyncio.sleep(0.1)
