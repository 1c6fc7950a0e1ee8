"""Ownership: one owner at a time, handed over in order; a former owner changes nothing."""

import asyncio
import time
from collections.abc import Callable

import pytest

from onward.brokers.base import Fenced, Progress, Revoked
from onward.clock import now
from onward.testing.scenario import OVER_LEASE_S, Kit, Member, effects, event, first_times, scenario


class OwnershipScenarios:
    @scenario()
    async def test_a_stale_epochs_settle_has_no_effect_and_answers_so(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(40, keys=20))
        member = await (await kit.member(broker)).hold(4)
        await member.take(40)
        old, before = member.progress(), dict(member.assigned)
        rival = await kit.member(await kit.broker())
        member.handled = 0  # it gives partitions up without having done anything
        await _together([member, rival], lambda: len(rival.assigned) == 2)
        moved = set(rival.assigned)
        await rival.subscription.close()
        await member.hold(4)
        assert all(member.assigned[each].epoch > before[each].epoch for each in moved)
        stale = [progress for progress in old if progress.partition in moved]
        assert stale
        assert set(await member.subscription.settle(stale)) == {progress.partition for progress in stale}
        again = sum(delivery.partition in moved for delivery in member.deliveries[:40])
        await member.take(40 + again)
        assert len(member.deliveries) == 40 + again, "what a former ownership settled took effect"

    @scenario()
    async def test_a_former_owner_cannot_rewind_or_advance(self, kit: Kit) -> None:
        """Contract 10: a live member that no longer owns a partition settles it; nothing moves."""
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
    async def test_release_hands_over_in_order_and_unclean_tells_the_truth(self, kit: Kit) -> None:
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
    async def test_epochs_and_fences_grow_over_the_fleet(self, kit: Kit) -> None:
        """Contract 17: a fence is the broker's number, so a new process never stands below an old one."""
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
    async def test_what_a_leaving_member_releases_is_not_given_back_to_it(self, kit: Kit) -> None:
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
        assert not any(assigned.unclean for assigned in again.assigned.values()), "it had left cleanly"

    @scenario()
    async def test_the_log_keeps_its_id_over_owners(self, kit: Kit) -> None:
        broker = await kit.broker()
        ids = []
        for _ in range(2):
            member = await (await kit.member(broker)).hold(4)
            ids.append({partition: assigned.log_id for partition, assigned in member.assigned.items()})
            await member.subscription.close()
        assert ids[0] == ids[1]
        assert all(ids[0].values())

    @scenario()
    async def test_a_delivery_names_its_fence_and_its_log(self, kit: Kit) -> None:
        """An inbox in another store tells by them whether a position is done, and who may write it."""
        broker = await kit.broker()
        await broker.publish(kit.events(10))
        member = await (await kit.member(broker)).hold(4)
        await member.take(10)
        for delivery in member.deliveries:
            assigned = member.assigned[delivery.partition]
            assert (delivery.fence, delivery.log_id, delivery.drawn) == (assigned.fence, assigned.log_id, False)

    @scenario()
    async def test_sure_until_has_passed_before_another_is_given_the_partition(self, kit: Kit) -> None:
        one, two = await kit.broker(), await kit.broker(max_poll_gap_s=30.0)
        await one.publish(kit.events(3))
        child = kit.child("hold")
        while (said := await child.line())["said"] != "Delivery":
            pass
        child.stop()
        member = await kit.member(two)
        await member.until(lambda: bool(member.assigned))
        assert now() > said["sure_until"], "taken over while the stopped owner could be sure"
        await member.take(3)
        child.go_on()

    @scenario(revoke_grace_s=2.0)
    async def test_whoever_has_not_heard_of_a_loss_is_sure_of_nothing(self, kit: Kit) -> None:
        """What it lost may be finished by another: until receive has told it so, it must start nothing."""
        one, two = await kit.broker(), await kit.broker()
        slow = await (await kit.member(one, yields=False)).hold(4)
        rival = await kit.member(two)
        await _together([slow, rival], lambda: any(isinstance(message, Revoked) for message in slow.history))
        told = len(slow.history)
        await rival.hold(2)
        assert len(slow.history) == told
        for _ in range(20):  # also while its broker renews the rest
            assert slow.subscription.sure_until() <= now(), "sure of what another owns"
            await asyncio.sleep(0.02)
        await slow.until(lambda: any(isinstance(message, Fenced) for message in slow.history))
        await slow.until(lambda: slow.subscription.sure_until() > now())

    @scenario(max_poll_gap_s=3.0)
    async def test_an_owner_that_does_not_receive_loses_its_partitions(self, kit: Kit) -> None:
        one, two = await kit.broker(), await kit.broker(max_poll_gap_s=60.0)
        stuck = await (await kit.member(one)).hold(4)
        await stuck.until(lambda: stuck.subscription.sure_until() > now())
        member = await (await kit.member(two)).hold(4)
        assert now() > stuck.subscription.sure_until(), "given to another while the stuck owner was sure"
        assert all(assigned.unclean for assigned in member.assigned.values())

    @scenario()
    async def test_ownership_is_kept_without_receiving_for_longer_than_a_lease(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        await asyncio.sleep(OVER_LEASE_S)  # a handler that blocks intake, not the process
        assert member.subscription.sure_until() > now()
        await broker.publish(kit.events(1))
        await member.take(1)
        assert not await member.settle()

    @scenario()
    async def test_members_share_and_rebalance(self, kit: Kit) -> None:
        one, two = await kit.broker(), await kit.broker()
        first = await (await kit.member(one)).hold(4)
        second = await kit.member(two)

        def shared() -> bool:
            return len(first.assigned) == 2 and len(second.assigned) == 2

        await _together([first, second], shared)
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
        await _together([stubborn, second], lambda: len(second.assigned) == 2)
        assert any(isinstance(message, Fenced) for message in stubborn.history)
        assert not set(stubborn.assigned) & set(second.assigned)
        assert all(assigned.unclean for assigned in second.assigned.values())

    @scenario(revoke_grace_s=2.0)
    async def test_a_release_or_pause_of_a_lost_ownership_does_not_hit_the_next_one(self, kit: Kit) -> None:
        one, two = await kit.broker(), await kit.broker()
        slow = await (await kit.member(one, yields=False)).hold(4)
        rival = await kit.member(two)
        await _together([slow, rival], lambda: any(isinstance(message, Revoked) for message in slow.history))
        revoked = [p for message in slow.history if isinstance(message, Revoked) for p in message.partitions]
        await rival.until(lambda: len(rival.assigned) == 2)  # the deadline has passed, and slow has not heard of it
        await rival.subscription.close()
        await asyncio.sleep(0.5)
        await slow.subscription.pause(revoked)
        await slow.subscription.release(revoked, drained=False)
        await slow.hold(4)
        await one.publish(kit.events(40, keys=20))
        await slow.take(40)
        await slow.quiet(for_s=OVER_LEASE_S)
        assert len(slow.assigned) == 4, "a release that came too late took what it has now"

    @scenario(lease_s=1.0)  # so short that some are taken over, by accident too: order holds all the same
    async def test_order_holds_while_members_come_and_go(self, kit: Kit) -> None:
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
        await _done(kit, sent)
        done = effects(kit)
        assert first_times(done) == {f"key-{k}": list(range(total // keys)) for k in range(keys)}

    @scenario()
    async def test_a_stopped_member_that_goes_on_changes_nothing(self, kit: Kit) -> None:
        """Contract 8 and 12: the former owner sits in a receive; what is published next is the new owner's alone."""
        broker = await kit.broker()
        await broker.publish(kit.events(3))
        child = kit.child("hold")
        heard = [await child.line() for _ in range(1)]
        while len([each for each in heard if each["said"] == "Delivery"]) < 3:
            heard.append(await child.line())
        child.stop()
        member = await kit.member(broker)
        await member.take(3)
        await member.settle(member.deliveries[:2])
        await broker.publish([event(kit.topic, "key-0", n) for n in (3, 4)])
        child.go_on()
        while (said := await child.line())["said"] != "Fenced":
            assert said["said"] != "Delivery" or not said["sure"], (
                "a former owner was given an event and felt sure of it"
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
    async def test_a_stopped_member_that_goes_on_is_sure_of_nothing(self, kit: Kit) -> None:
        """Contract 8: not for a moment, though its client has not noticed yet that it slept."""
        broker = await kit.broker()
        await broker.publish(kit.events(3))
        child = kit.child("watch", count=3)
        await child.line()
        child.stop()
        stopped = now()
        await (await kit.member(broker)).take(3)
        stopped_s = now() - stopped
        child.go_on()
        while (said := await child.line())["slept_s"] < stopped_s * 0.9:
            pass  # it was starved, not stopped
        assert not said["sure"], "a former owner felt sure of what another one has"

    @scenario()
    async def test_a_step_of_the_wall_clock_moves_no_ownership(self, kit: Kit) -> None:
        """Contract 24: leases are on a clock that nobody sets."""
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
                assert not rival.assigned, "a clock step made a lease look over"
                await rival.subscription.close()
        finally:
            time.time = real
        assert member.assigned == before
        assert member.subscription.sure_until() > now()

    @pytest.mark.slow
    @scenario(lease_s=1.0)
    async def test_killed_members_lose_and_invert_nothing(self, kit: Kit) -> None:
        broker = await kit.broker()
        total, keys = 6000, 50
        children = [kit.child("work", limit=20) for _ in range(3)]
        for start in range(0, total, 500):
            await broker.publish([event(kit.topic, f"key-{n % keys}", n // keys) for n in range(start, start + 500)])
            await asyncio.sleep(0.25)
            children.pop(0).kill()
            children.append(kit.child("work", limit=20))
        await _done(kit, total)
        assert first_times(effects(kit)) == {f"key-{k}": list(range(total // keys)) for k in range(keys)}


async def _together(members: list[Member], condition: Callable[[], bool], within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, [list(member.assigned) for member in members]
        await asyncio.gather(*(member.receive(wait_s=0.1) for member in members))


async def _done(kit: Kit, count: int, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while len(set(effects(kit))) < count:
        assert time.monotonic() < deadline, f"{len(set(effects(kit)))} of {count} were done in {within_s} s"
        await asyncio.sleep(0.1)
