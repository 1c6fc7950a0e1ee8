"""The aside suite: one scenario for each promise that onward.brokers.base makes about aside records.

It is the same for all brokers. A subclass provides the fixture `harness`, an AsideUnderTest. The suite is skipped for a
broker that cannot browse its records (`features.aside`).
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
import pytest

from onward.brokers.base import AsideRecord, Broker, Count, Failure, Filter, Moved, Progress, State, Tries, record_id
from onward.errors import AsideError, BrokerError
from onward.event import Delivery, Event, new_id
from onward.testing.scenario import BrokerUnderTest, Kit, Member, event, scenario

GROUP = "group"
MANY = 100_000
_PAGE = 1_000
_ROOM = 1 << 24


class AsideUnderTest(BrokerUnderTest, Protocol):
    def refuse_aside(self, larger_than: int = 0) -> AbstractContextManager[None]:
        """Inside this context the store refuses every record of more than `larger_than` bytes."""


class Owner:
    """A member that owns the only partition of its topic, with its deliveries in order."""

    def __init__(self, broker: Broker, member: Member, events: Sequence[Delivery]) -> None:
        self.broker = broker
        self.member = member
        self.deliveries = list(events)
        (self.assigned,) = member.assigned.values()
        self.partition = self.assigned.partition
        self.aside = broker.aside(GROUP)

    @classmethod
    async def of(cls, kit: Kit, count: int, *, keys: int = 1, **options: Any) -> "Owner":
        broker = await kit.broker(partitions=1, **options)
        if not broker.features.aside:
            pytest.skip("this broker cannot browse its records")
        await broker.publish(kit.events(count, keys=keys))
        member = await (await kit.member(broker, GROUP)).hold(1)
        return cls(broker, member, (await member.take(count))[:count])

    def record(self, n: int, state: State = State.DEAD, **fields: Any) -> AsideRecord:
        return make_record(self.deliveries[n], self.assigned.log_id, state, **fields)

    def progress(self, watermark: int) -> Progress:
        done = [each.position for each in self.deliveries[:watermark]]
        end = self.deliveries[watermark - 1].position + 1 if watermark else self.deliveries[0].position
        return Progress(self.partition, self.assigned.epoch, end, (), done)

    async def set_aside(self, records: Sequence[AsideRecord], watermark: int = 0) -> None:
        progress = [self.progress(watermark)] if watermark else []
        assert not await self.member.subscription.settle(progress, aside=records)

    async def gone(self, *ids: str) -> None:
        assert not await self.member.subscription.settle([], gone=ids)

    async def loaded(self, *, after: int | None = None, dead: bool = False) -> list[AsideRecord]:
        return list(await self.aside.load(self.partition, after=after, limit=_PAGE, max_bytes=_ROOM, dead=dead))

    async def moved(self, count: int) -> list[Moved]:
        """Receive until Moved messages name this many records. Returns these messages."""
        await self.member.until(lambda: sum(len(each.ids) for each in self._moved()) >= count)
        return self._moved()

    def _moved(self) -> list[Moved]:
        return [message for message in self.member.history if isinstance(message, Moved)]


def make_record(delivery: Delivery, log_id: str, state: State, **fields: Any) -> AsideRecord:
    n = int(delivery.event.value or b"0")
    failure = Failure("exhausted", "ValueError", f"no stock for {n}", "Traceback", "bill", 5, 1.0, float(n))
    record = AsideRecord(
        id=record_id(GROUP, log_id, delivery.partition, delivery.position),
        group=GROUP,
        partition=delivery.partition,
        position=delivery.position,
        state=state,
        due=50.0 if state is State.WAITING else None,
        event=delivery.event,
        tries=Tries(failed=5),
        failure=failure if state is State.DEAD else None,
        wait_s=40.0 if state is State.WAITING else None,
    )
    return msgspec.structs.replace(record, **fields)


async def scanned(broker: Broker, where: Filter | None = None, *, limit: int = _PAGE) -> list[AsideRecord]:
    aside, after = broker.aside(GROUP), None
    found: list[AsideRecord] = []
    while True:
        page = await aside.scan(where or Filter(), after, limit)
        found += page.records
        after = page.after
        if after is None:
            return found


class RecordScenarios:
    @scenario()
    async def test_a_record_is_stored_unchanged(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 4)
        values = [None, b"", b"\xff\x00", "grün ☂".encode()]
        events = [
            Event(new_id(), kit.topic, key, value, {"a": "ü"}, "Placed", 1.5)
            for key, value in zip([None, "", "k", "ключ"], values, strict=True)
        ]
        states = [State.WAITING, State.HELD, State.DEAD, State.DEAD]
        records = [owner.record(n, state, event=events[n]) for n, state in enumerate(states)]
        await owner.set_aside(records, 4)
        assert await owner.loaded(dead=True) == records
        other = await kit.broker(partitions=1)
        assert await scanned(other) == records, "another broker object reads other records"

    @scenario()
    async def test_a_record_set_aside_again_replaces_the_first(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 3)
        await owner.set_aside([owner.record(n) for n in range(3)], 3)
        again = owner.record(1, State.WAITING, tries=Tries(failed=7), due=99.0)
        await owner.set_aside([again])
        assert await scanned(owner.broker) == [owner.record(0), again, owner.record(2)]

    @scenario()
    async def test_records_are_read_in_the_order_of_their_positions(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 40)
        shuffled = list(range(40))
        random.Random(6).shuffle(shuffled)
        for start in range(0, 40, 8):
            await owner.set_aside([owner.record(n, State.HELD) for n in shuffled[start : start + 8]])
        expected = [delivery.position for delivery in owner.deliveries]
        assert [record.position for record in await owner.loaded()] == expected
        assert [record.position for record in await scanned(owner.broker, limit=7)] == expected

    @scenario()
    async def test_load_reads_in_pages_of_at_least_one_record(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 10)
        states = [State.DEAD if n % 3 == 0 else State.HELD for n in range(10)]
        await owner.set_aside([owner.record(n, state) for n, state in enumerate(states)], 10)
        after: int | None = None
        found: list[AsideRecord] = []
        while page := await owner.aside.load(owner.partition, after=after, limit=2, max_bytes=_ROOM):
            assert len(page) <= 2
            found += page
            after = page[-1].position
        assert found == [owner.record(n, State.HELD) for n in range(10) if n % 3]
        (one,) = await owner.aside.load(owner.partition, after=None, limit=5, max_bytes=1)
        assert one == owner.record(1, State.HELD)
        assert len(await owner.loaded(dead=True)) == 10
        assert not await owner.broker.aside("other").load(owner.partition, after=None, limit=5, max_bytes=_ROOM)

    @scenario()
    async def test_settle_removes_records_and_ignores_unknown_ids(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 3)
        await owner.set_aside([owner.record(n, State.HELD) for n in range(3)], 3)
        unknown = record_id(GROUP, "never", owner.partition, 7)
        await owner.gone(owner.record(0).id, unknown)
        await owner.gone(owner.record(0).id)
        assert await owner.loaded() == [owner.record(n, State.HELD) for n in (1, 2)]

    @scenario()
    async def test_a_former_owner_cannot_change_records(self, kit: Kit) -> None:
        old = await Owner.of(kit, 6)
        await old.set_aside([old.record(0), old.record(1, State.HELD)], 2)
        await old.member.subscription.release([old.partition], drained=False)
        await _check_no_effect(kit, old)

    @scenario()
    async def test_an_owner_that_has_not_received_fenced_cannot_change_records(self, kit: Kit) -> None:
        old = await Owner.of(kit, 6, max_poll_gap_s=3.0)
        await old.set_aside([old.record(0), old.record(1, State.HELD)], 2)
        await _check_no_effect(kit, old)  # it has stopped receiving, so another member takes over

    @scenario()
    async def test_a_settle_whose_records_are_refused_has_no_effect(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 4)
        await owner.set_aside([owner.record(0)], 1)
        harness: Any = kit.harness
        with harness.refuse_aside():
            with pytest.raises(AsideError) as raised:
                await owner.member.subscription.settle(
                    [owner.progress(3)], aside=[owner.record(2)], gone=[owner.record(0).id]
                )
            assert raised.value.partitions == (owner.partition,)
            assert await scanned(owner.broker) == [owner.record(0)]
        await owner.member.subscription.close()
        again = await kit.member(owner.broker, GROUP)
        await again.take(3)
        assert again.values == [1, 2, 3], "the progress was stored without its record"

    @scenario()
    async def test_refused_records_in_one_partition_do_not_stop_the_settle_of_others(self, kit: Kit) -> None:
        broker = await kit.broker(partitions=2)
        if not broker.features.aside:
            pytest.skip("this broker cannot browse its records")
        await broker.publish(kit.events(40, keys=10))
        member = await (await kit.member(broker, GROUP)).hold(2)
        deliveries = list(await member.take(40))
        large, small = (next(d for d in deliveries if d.partition.index == index) for index in (0, 1))
        log_id = member.assigned[large.partition].log_id
        failure = Failure("exhausted", "ValueError", "x" * 500_000, "", "bill", 5, 1.0, 2.0)
        refused = make_record(large, log_id, State.DEAD, failure=failure)
        stored = make_record(small, member.assigned[small.partition].log_id, State.DEAD)
        harness: Any = kit.harness
        with harness.refuse_aside(larger_than=100_000), pytest.raises(AsideError) as raised:
            await member.subscription.settle(member.progress(), aside=[refused, stored])
        assert (raised.value.partitions, raised.value.lost) == ((large.partition,), ())
        assert await scanned(broker) == [stored]
        await member.subscription.close()
        again = await (await kit.member(broker, GROUP)).hold(2)
        count = sum(each.partition == large.partition for each in deliveries)
        await again.take(count)
        await again.quiet()
        assert {each.partition for each in again.deliveries} == {large.partition}
        assert len(again.deliveries) == count, "the refused partition was settled in part"

    @scenario()
    async def test_dropping_a_group_removes_its_records(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 2)
        await owner.set_aside([owner.record(0)], 1)
        await owner.member.subscription.close()
        await owner.broker.drop_group(kit.topic, GROUP)
        assert not await scanned(owner.broker)

    @scenario()
    async def test_a_record_survives_the_removal_of_its_event_from_the_log(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 3, retention_s=0.0)
        await owner.set_aside([owner.record(n) for n in range(3)], 3)
        await owner.broker.publish(kit.events(5))
        await owner.member.take(8)
        await owner.member.settle()
        assert await scanned(owner.broker) == [owner.record(n) for n in range(3)]


class MoveScenarios:
    @scenario()
    async def test_a_move_changes_only_records_in_the_expected_state_and_the_owner_gets_moved(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 4)
        await owner.set_aside([owner.record(n) for n in range(4)], 4)
        ids = [owner.record(n).id for n in range(4)]
        aside = (await kit.broker(partitions=1)).aside(GROUP)
        assert await aside.move(ids[:2], expect=State.WAITING, to=State.DEAD, due=None) == 0
        assert await aside.move([*ids[:2], ids[0]], expect=State.DEAD, to=State.WAITING, due=7.0) == 2
        assert await aside.move(ids[:2], expect=State.DEAD, to=State.WAITING, due=8.0) == 0
        first = await owner.moved(2)
        assert {(each.partition, each.epoch, each.to, each.due) for each in first} == {
            (owner.partition, owner.assigned.epoch, State.WAITING, 7.0)
        }
        assert sorted(name for each in first for name in each.ids) == sorted(ids[:2])
        assert await aside.remove(ids, expect=State.DEAD) == 2
        assert await aside.remove(ids, expect=State.DEAD) == 0
        removed = (await owner.moved(4))[len(first) :]
        assert sorted(name for each in removed for name in each.ids) == sorted(ids[2:])
        assert {each.to for each in removed} == {None}
        assert [record.state for record in await scanned(owner.broker)] == [State.WAITING] * 2

    @scenario()
    async def test_replaying_a_dead_letter_resets_its_tries_and_keeps_its_failure(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 1)
        record = owner.record(0)
        await owner.set_aside([record], 1)
        await owner.aside.move([record.id], expect=State.DEAD, to=State.WAITING, due=7.0)
        expected = msgspec.structs.replace(record, state=State.WAITING, due=7.0, tries=Tries())
        assert await scanned(owner.broker) == [expected]
        assert await owner.loaded() == [expected]

    @scenario()
    async def test_moving_a_waiting_record_changes_its_due_time_and_clears_wait_s(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 1)
        record = owner.record(0, State.WAITING)
        await owner.set_aside([record], 1)
        await owner.aside.move([record.id], expect=State.WAITING, to=State.WAITING, due=7.0)
        assert await owner.loaded() == [msgspec.structs.replace(record, due=7.0, wait_s=None)]

    @scenario()
    async def test_concurrent_moves_of_the_same_records_move_each_once(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 120)
        await owner.set_aside([owner.record(n) for n in range(120)], 120)
        ids = [owner.record(n).id for n in range(120)]
        brokers = [await kit.broker(partitions=1) for _ in range(4)]

        async def mover(broker: Broker, seed: int) -> int:
            mine, moved = ids.copy(), 0
            random.Random(seed).shuffle(mine)
            for start in range(0, 120, 10):
                chunk = mine[start : start + 10]
                moved += await broker.aside(GROUP).move(chunk, expect=State.DEAD, to=State.WAITING, due=float(seed))
            return moved

        moved = await asyncio.gather(*(mover(broker, seed) for seed, broker in enumerate(brokers)))
        assert sum(moved) == 120
        reported = [name for each in await owner.moved(120) for name in each.ids]
        assert sorted(reported) == sorted(ids), "a move was reported to the owner twice or not at all"
        dues = {name: each.due for each in await owner.moved(120) for name in each.ids}
        assert {record.id: record.due for record in await scanned(owner.broker)} == dues

    @scenario()
    async def test_a_removal_by_the_owner_wins_over_a_concurrent_move(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 60)
        await owner.set_aside([owner.record(n, State.WAITING) for n in range(60)], 60)
        ids = [owner.record(n).id for n in range(60)]
        other = (await kit.broker(partitions=1)).aside(GROUP)
        results = await asyncio.gather(
            *(other.move([name], expect=State.WAITING, to=State.DEAD, due=None) for name in ids),
            *(owner.gone(name) for name in reversed(ids)),
        )
        assert not await scanned(owner.broker), "a record exists after its owner removed it"
        moved = sum(answer for answer in results[:60] if answer is not None)
        reported = [name for each in await owner.moved(moved) for name in each.ids] if moved else []
        assert len(reported) == moved

    @scenario()
    async def test_the_next_owner_loads_records_that_were_moved_while_there_was_no_owner(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 3)
        await owner.set_aside([owner.record(n) for n in range(3)], 3)
        await owner.member.subscription.close()
        ids = [owner.record(n).id for n in range(3)]
        assert await owner.aside.move(ids[:2], expect=State.DEAD, to=State.WAITING, due=0.0) == 2
        assert await owner.aside.remove(ids[2:], expect=State.DEAD) == 1
        next_owner = await (await kit.member(await kit.broker(partitions=1), GROUP)).hold(1)
        assert [record.id for record in await owner.loaded(dead=True)] == ids[:2]
        await next_owner.quiet(0.3)
        assert not any(isinstance(each, Moved) for each in next_owner.history), (
            "got Moved for a move before it became the owner"
        )


class ScanScenarios:
    @scenario()
    async def test_a_scan_returns_the_records_that_match_its_filter(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 6, keys=2)
        records = [owner.record(n) for n in range(6)]
        assert records[4].failure is not None
        records[4] = owner.record(4, failure=msgspec.structs.replace(records[4].failure, error="KeyError"))
        records[1] = owner.record(1, State.HELD)
        records[5] = owner.record(5, event=msgspec.structs.replace(records[5].event, value=b"in the value"))
        await owner.set_aside(records, 6)
        dead = [0, 2, 3, 4, 5]

        async def found(**where: Any) -> list[int]:
            return [records.index(record) for record in await scanned(owner.broker, Filter(**where), limit=2)]

        assert await found() == [0, 1, 2, 3, 4, 5]
        assert await found(states=frozenset({State.DEAD})) == dead
        assert await found(topic=kit.topic, key="key-1") == [1, 3, 5]
        assert await found(topic="another") == []
        assert await found(error="KeyError") == [4]
        assert await found(text="stock for 2") == [4, 5]
        assert await found(text="the value") == [5]
        assert await found(since=1.0, until=2.0) == [2, 3]

    @scenario()
    async def test_a_count_agrees_with_a_scan(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 6, keys=2)  # the times of failure are 0, 0, 1, 1, 2, 2
        states = [State.DEAD, State.HELD, State.DEAD, State.WAITING, State.DEAD, State.DEAD]
        await owner.set_aside([owner.record(n, state) for n, state in enumerate(states)], 6)
        dead = frozenset({State.DEAD})
        aside = (await kit.broker(partitions=1)).aside(GROUP)
        assert await aside.count(Filter()) == Count(6, 0.0)
        assert await aside.count(Filter(states=dead, topic=kit.topic)) == Count(4, 0.0)
        assert await aside.count(Filter(states=dead, key="key-0", since=1.0)) == Count(2, 1.0)
        assert await aside.count(Filter(error="ValueError", until=2.0)) == Count(2, 0.0)
        assert await aside.count(Filter(states=frozenset({State.HELD}))) == Count(1, None)
        assert await aside.count(Filter(topic="another")) == Count(0, None)
        assert await owner.broker.aside("other").count(Filter()) == Count(0, None)
        assert await aside.move([owner.record(0).id], expect=State.DEAD, to=State.WAITING, due=7.0) == 1
        await owner.gone(owner.record(2).id)
        assert await aside.count(Filter(states=dead)) == Count(2, 2.0)

    @scenario()
    async def test_records_stored_or_removed_during_a_scan_neither_repeat_nor_hide_others(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 90)
        early = [n for n in range(90) if n % 3]
        late = [n for n in range(90) if not n % 3]
        await owner.set_aside([owner.record(n) for n in early], 90)
        to_remove, to_store = iter(early[::5]), iter(late)
        removed: set[int] = set()
        after: str | None = None
        found: list[int] = []
        while True:
            page = await owner.aside.scan(Filter(), after, 7)
            found += [int(record.event.value or b"") for record in page.records]
            after = page.after
            if after is None:
                break
            for n in (next(to_remove, None), *page.records[-1:]):
                number = int(n.event.value or b"") if isinstance(n, AsideRecord) else n
                if number is not None:
                    removed.add(number)
                    await owner.gone(owner.record(number).id)
            await owner.set_aside([owner.record(n) for n in (next(to_store), next(to_store))])
        assert len(found) == len(set(found)), "a record was returned twice"
        assert set(early) - removed <= set(found), "a record was not returned"

    @scenario()
    async def test_an_invalid_cursor_is_an_error(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 1)
        with pytest.raises(BrokerError, match="cursor"):
            await owner.aside.scan(Filter(), "nonsense", 5)


class AsideSuite(RecordScenarios, MoveScenarios, ScanScenarios):
    """Every promise about aside records: storing, moving, scanning, draining and crashes."""

    @pytest.mark.slow
    @scenario()
    async def test_a_hundred_thousand_records_of_one_key_drain_in_order(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 1)
        for start in range(0, MANY, 5_000):
            batch = [_held(owner, n) for n in range(start, start + 5_000)]
            random.Random(start).shuffle(batch)
            await owner.set_aside(batch)
        after: int | None = None
        drained = 0
        while page := await owner.loaded(after=after):
            assert [record.position for record in page] == list(range(drained, drained + len(page)))
            drained += len(page)
            after = page[-1].position
            await owner.gone(*(record.id for record in page))
        assert drained == MANY
        assert not await scanned(owner.broker)

    @pytest.mark.slow
    @scenario(partitions=1)
    async def test_a_crash_at_any_step_loses_no_event(self, kit: Kit) -> None:
        """A child sets its events aside, then removes their records. It is killed during each kind of step."""
        broker = await kit.broker()
        if not broker.features.aside:
            pytest.skip("this broker cannot browse its records")
        steps = [("setting", 0.0), ("setting", 0.002), ("setting", 0.01), ("set", 0.0)]
        steps += [("removing", 0.0), ("removing", 0.002), ("removing", 0.01), ("removed", 0.0)]
        for number, (step, delay_s) in enumerate(steps):
            group = f"{GROUP}-{number}"
            topic = f"{kit.topic}-{number}"
            await broker.publish([event(topic, "k", n) for n in range(12)])
            reported = await _kill_at(kit, topic, group, step, delay_s)
            await _check_nothing_lost(kit, broker, (topic, group), reported)


async def _check_no_effect(kit: Kit, old: Owner) -> None:
    """Make another member the owner. Then `old` can store no record, remove none and settle nothing."""
    new = await (await kit.member(await kit.broker(partitions=1, max_poll_gap_s=60.0), GROUP)).hold(1)
    settle = old.member.subscription.settle
    await settle([], gone=[old.record(1).id])
    late = [old.record(n, State.HELD) for n in (2, 3)]
    assert list(await settle([old.progress(4)], aside=late, gone=[old.record(0).id])) == [old.partition]
    assert list(await settle([], aside=[old.record(1, State.DEAD)])) == [old.partition]
    assert await scanned(old.broker) == [old.record(0), old.record(1, State.HELD)]
    await new.take(4)
    assert new.values == [2, 3, 4, 5], "a settle of a former owner took effect"


def _held(owner: Owner, n: int) -> AsideRecord:
    record = owner.record(0, State.HELD)
    name = record_id(GROUP, owner.assigned.log_id, owner.partition, n)
    return msgspec.structs.replace(record, id=name, position=n)


async def _kill_at(kit: Kit, topic: str, group: str, step: str, delay_s: float) -> dict[str, list[int]]:
    """Kill a child at this step. Returns what it had reported: by step, the numbers of the events."""
    child = kit.child("aside", group, topic=topic)
    lines = [await child.line()]
    while lines[-1] != {"report": step, "number": 5}:  # halfway
        lines.append(await child.line())
    await asyncio.sleep(delay_s)
    child.kill()
    reported: dict[str, list[int]] = {}
    for line in (*lines, *child.rest()):
        reported.setdefault(line["report"], []).append(line["number"])
    return reported


async def _check_nothing_lost(kit: Kit, broker: Broker, place: tuple[str, str], reported: dict[str, list[int]]) -> None:
    """Each event is open, has a record or was handled, and every step that was reported as finished took effect."""
    topic, group = place
    member = await (await kit.member(broker, group, topic=topic)).hold(1)
    (partition,) = member.assigned
    loaded = await broker.aside(group).load(partition, after=None, limit=_PAGE, max_bytes=_ROOM)
    stored = {int(record.event.value or b"") for record in loaded}
    assert set(reported.get("set", ())) - set(reported.get("removing", ())) <= stored, "a stored record is missing"
    assert not stored & set(reported.get("removed", ())), "a removed record still exists"
    missing = set(range(12)) - stored - set(reported.get("removing", ()))
    await member.until(lambda: missing <= set(member.values))
    assert not set(member.values) & set(reported.get("set", ())), "an event was delivered although it was set aside"
    await member.subscription.close()
