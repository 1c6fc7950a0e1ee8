"""Delivering and settling: nothing unsettled is forgotten, nothing settled comes back."""

import asyncio
import time

import pytest

from onward.brokers.base import Progress, Tries
from onward.event import Delivery, Event, new_id
from onward.testing.scenario import OVER_LEASE_S, Kit, event, publish_beside_cancelled_receives, scenario


class DeliveryScenarios:
    @scenario()
    async def test_unsettled_comes_back_after_close(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(10))
        first = await kit.member(broker)
        await first.take(10)
        await first.settle(first.deliveries[:4])
        await first.subscription.close()
        second = await kit.member(broker)
        await second.take(6)
        await second.quiet()
        assert second.values == list(range(4, 10))

    @scenario()
    async def test_unsettled_comes_back_after_a_crash(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(10))
        child = kit.child("hold", limit=3)
        while (said := await child.line())["said"] != "Delivery":
            assert said["said"] != "Fenced"
        child.kill()
        member = await kit.member(broker)
        await member.take(10)
        assert member.values == list(range(10))
        assigned = member.assigned[member.deliveries[0].partition]
        assert assigned.unclean, "the next owner was not told that the last one crashed"

    @scenario()
    async def test_unsettled_comes_back_after_cancel_in_mid_receive(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        await publish_beside_cancelled_receives(kit, broker, member, 30)
        await member.take(30)
        assert member.values == list(range(30)), "a cancelled receive took events with it, or repeated them"

    @scenario()
    async def test_settled_never_comes_back(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(100, keys=10))
        first = await kit.member(broker)
        await first.take(100)
        assert not await first.settle()
        await first.subscription.close()
        second = await (await kit.member(broker)).hold(4)
        await second.quiet()

    @scenario()
    async def test_settling_the_later_of_two_never_loses_the_earlier(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(2))
        first = await kit.member(broker)
        earlier, later = await first.take(2)
        progress = Progress(
            earlier.partition, earlier.epoch, earlier.position, [(later.position, later.position + 1)], [later.position]
        )
        assert not await first.subscription.settle([progress])
        await first.subscription.close()
        second = await kit.member(broker)
        await second.until(lambda: 0 in second.values)
        stored = second.assigned[earlier.partition].stored
        if broker.features.stable_positions:
            assert stored is not None
            assert stored.watermark == earlier.position
            assert [tuple(span) for span in stored.done_above] == [(later.position, later.position + 1)]

    @scenario()
    async def test_positions_a_million_apart_come_back(self, kit: Kit) -> None:
        """Positions are sparse: nothing may be counted, allocated or cut by their differences."""
        broker = await kit.broker()
        if not broker.features.stable_positions:
            pytest.skip("positions are not stable here")
        await broker.publish(kit.events(1))
        first = await kit.member(broker)
        (only,) = await first.take(1)
        far = [only.position + n * 1_000_000 for n in range(1, 6)]
        progress = Progress(
            only.partition,
            only.epoch,
            only.position,
            [(each, each + 2) for each in far[:4]],
            [position for each in far[:4] for position in (each, each + 1)],
            {only.position: Tries(failed=1), far[4]: Tries(failed=2)},
        )
        assert not await first.subscription.settle([progress])
        await first.subscription.close()
        second = await kit.member(broker)
        await second.take(1)
        stored = second.assigned[only.partition].stored
        assert stored is not None
        assert stored.watermark == only.position
        assert [tuple(span) for span in stored.done_above] == [(each, each + 2) for each in far[:4]]
        assert dict(stored.tries) == dict(progress.tries)

    @scenario()
    async def test_tries_of_open_positions_come_back(self, kit: Kit) -> None:
        broker = await kit.broker()
        if not broker.features.stable_positions:
            pytest.skip("positions are not stable here: tries travel with the event")
        await broker.publish(kit.events(1))
        first = await kit.member(broker)
        (only,) = await first.take(1)
        tries = {only.position: Tries(failed=2, started=3, crashes=1)}
        await first.subscription.settle([Progress(only.partition, only.epoch, only.position, tries=tries)])
        await first.subscription.close()
        second = await kit.member(broker)
        await second.take(1)
        stored = second.assigned[only.partition].stored
        assert stored is not None
        assert dict(stored.tries) == tries

    @scenario()
    async def test_settle_is_idempotent(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(5))
        first = await kit.member(broker)
        await first.take(5)
        for _ in range(3):
            assert not await first.settle()
        await first.subscription.close()
        second = await (await kit.member(broker)).hold(4)
        await second.quiet()

    @scenario()
    async def test_receive_honours_its_limit(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(25, keys=5))
        member = await kit.member(broker)
        while len(member.deliveries) < 25:
            messages = await member.receive(limit=7)
            assert sum(type(message) is Delivery for message in messages) <= 7
        assert len(member.deliveries) == 25

    @scenario()
    async def test_receive_honours_its_bytes_but_gives_one(self, kit: Kit) -> None:
        broker = await kit.broker()
        big = b"x" * 10_000
        await broker.publish([event(kit.topic, "a", n, headers={}) for n in range(5)])
        await broker.publish([Event(new_id(), kit.topic, "a", big) for _ in range(5)])
        member = await kit.member(broker)
        while len(member.deliveries) < 10:
            messages = await member.receive(max_bytes=100)
            sizes = [message.event.size for message in messages if type(message) is Delivery]
            assert len(sizes) <= 1 or sum(sizes) <= 100

    @scenario()
    async def test_receive_honours_its_wait(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        for wait_s in (0.0, 0.3):
            started = time.monotonic()
            await member.receive(wait_s=wait_s)
            assert wait_s - 0.05 <= time.monotonic() - started < wait_s + 10.0

    @scenario()
    async def test_a_publish_wakes_a_waiting_receive(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        waiting = asyncio.create_task(member.receive(wait_s=60.0))
        await asyncio.sleep(0.2)
        await broker.publish(kit.events(1))
        async with asyncio.timeout(20):
            await waiting
            while not member.deliveries:
                await member.receive(wait_s=60.0)

    @scenario()
    async def test_positions_ascend_within_an_epoch(self, kit: Kit) -> None:
        broker = await kit.broker()
        for _ in range(10):
            await broker.publish(kit.events(20, keys=7))
        member = await kit.member(broker)
        await member.take(200)
        seen: dict[object, int] = {}
        for delivery in member.deliveries:
            assert delivery.position > seen.get(delivery.partition, -1)
            seen[delivery.partition] = delivery.position

    @scenario()
    async def test_pause_and_resume_keep_ownership(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        before = dict(member.assigned)
        await member.subscription.pause(list(before))
        await member.receive(wait_s=0.0)
        await broker.publish(kit.events(5))
        await member.quiet(for_s=OVER_LEASE_S)
        assert member.assigned == before
        await member.subscription.resume(list(before))
        await member.take(5)
        assert not await member.settle()
        assert member.values == list(range(5))

    @scenario()
    async def test_pausing_one_partition_leaves_the_others(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        await broker.publish(kit.events(40, keys=20))
        await member.take(40)
        paused = member.deliveries[0].partition
        await member.subscription.pause([paused])
        await member.receive(wait_s=0.0)
        await broker.publish(kit.events(40, keys=20))
        others = sum(delivery.partition != paused for delivery in member.deliveries[:40])
        await member.take(40 + others)
        await member.quiet()
        assert all(delivery.partition != paused for delivery in member.deliveries[40:])

    @scenario()
    async def test_close_is_idempotent_and_ends_a_blocked_receive(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        blocked = asyncio.create_task(member.subscription.receive(10, 1 << 20, 60.0))
        await asyncio.sleep(0.1)
        await member.subscription.close()
        await member.subscription.close()
        done, _ = await asyncio.wait([blocked], timeout=20.0)
        assert done, "a blocked receive outlived close"
        blocked.exception()
        await broker.close()
        await broker.close()

    @scenario()
    async def test_lag_agrees_with_reality(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        await member.subscription.pause(list(member.assigned))
        await member.receive(wait_s=0.0)
        await broker.publish(kit.events(12, keys=6))
        lag = await member.subscription.lag()
        assert set(lag) == set(member.assigned)
        known = [each.undelivered for each in lag.values() if each.undelivered is not None]
        assert sum(known) == 12 or len(known) < len(lag)
        assert all(each.oldest_age_s is None or 0 <= each.oldest_age_s < 60 for each in lag.values())
        await member.subscription.resume(list(member.assigned))
        await member.take(12)
        await member.settle()
        lag = await member.subscription.lag()
        assert all(not each.undelivered for each in lag.values())

    @scenario()
    async def test_a_log_read_by_nobody_is_all_there_for_a_new_group(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(50, keys=5))
        member = await kit.member(broker, "late")
        await member.take(50)
        assert not any(assigned.unclean for assigned in member.assigned.values()), "nobody ended uncleanly"
