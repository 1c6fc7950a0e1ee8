"""Delivering and settling: unsettled events are delivered again, settled events are not."""

import asyncio
import time

import pytest

from onward.brokers.base import Progress, Tries
from onward.event import Delivery, Event, new_id
from onward.testing.scenario import OVER_LEASE_S, Kit, event, publish_beside_cancelled_receives, scenario


class DeliveryScenarios:
    @scenario()
    async def test_unsettled_events_are_delivered_again_after_close(self, kit: Kit) -> None:
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
    async def test_unsettled_events_are_delivered_again_after_a_crash(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(10))
        child = kit.child("hold", limit=3)
        while (line := await child.line())["report"] != "Delivery":
            assert line["report"] != "Fenced"
        child.kill()
        member = await kit.member(broker)
        await member.take(10)
        assert member.values == list(range(10))
        assigned = member.assigned[member.deliveries[0].partition]
        assert assigned.unclean, "unclean is False, although the last owner crashed"

    @scenario()
    async def test_a_cancelled_receive_loses_and_repeats_no_event(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await (await kit.member(broker)).hold(4)
        await publish_beside_cancelled_receives(kit, broker, member, 30)
        await member.take(30)
        assert member.values == list(range(30)), "a cancelled receive lost or repeated events"

    @scenario()
    async def test_settled_events_are_not_delivered_again(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(100, keys=10))
        first = await kit.member(broker)
        await first.take(100)
        assert not await first.settle()
        await first.subscription.close()
        second = await (await kit.member(broker)).hold(4)
        await second.quiet()

    @scenario()
    async def test_settling_a_later_event_does_not_lose_an_earlier_one(self, kit: Kit) -> None:
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
    async def test_progress_with_positions_a_million_apart_is_stored(self, kit: Kit) -> None:
        """Positions are sparse: a broker must not count, allocate or truncate by the difference of two positions."""
        broker = await kit.broker()
        if not broker.features.stable_positions:
            pytest.skip("positions are not stable on this broker")
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
    async def test_tries_of_open_events_are_stored(self, kit: Kit) -> None:
        broker = await kit.broker()
        if not broker.features.stable_positions:
            pytest.skip("positions are not stable on this broker: tries travel with the event")
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
    async def test_receive_returns_at_most_limit_deliveries(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(25, keys=5))
        member = await kit.member(broker)
        while len(member.deliveries) < 25:
            messages = await member.receive(limit=7)
            assert sum(type(message) is Delivery for message in messages) <= 7
        assert len(member.deliveries) == 25

    @scenario()
    async def test_receive_returns_at_most_max_bytes_but_at_least_one_event(self, kit: Kit) -> None:
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
    async def test_receive_without_messages_returns_after_wait_s(self, kit: Kit) -> None:
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
    async def test_pausing_one_partition_does_not_stop_the_others(self, kit: Kit) -> None:
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
        assert done, "close did not end a blocked receive"
        blocked.exception()
        await broker.close()
        await broker.close()

    @scenario()
    async def test_lag_counts_the_undelivered_events(self, kit: Kit) -> None:
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
    async def test_a_new_group_gets_every_event_of_the_log(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(50, keys=5))
        member = await kit.member(broker, "late")
        await member.take(50)
        assert not any(assigned.unclean for assigned in member.assigned.values()), (
            "unclean, although there was no earlier owner"
        )
