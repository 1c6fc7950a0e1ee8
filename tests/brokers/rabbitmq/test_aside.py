"""The aside of the contract on RabbitMQ: memory, foreign entries, rewriting under an application, lost connections.

The aside suite runs in test_aside_suite.py."""

import asyncio
import tracemalloc
from typing import Any, cast

import msgspec
import pytest

from onward.brokers.base import PASSING, Aside, AsideRecord, Failure, Filter, Moved, State, Tries, record_id
from onward.brokers.rabbitmq.aside import aside_bodies, aside_fold, aside_log
from onward.brokers.rabbitmq.aside.aside import AsidePlace, RabbitAside
from onward.brokers.rabbitmq.aside.aside_log import AsideStream
from onward.brokers.rabbitmq.aside.aside_writing import EntryWriter
from onward.errors import AsideError, BrokerError
from onward.event import Event
from onward.failure.dead import DeadLetters
from onward.testing.aside import GROUP, Owner, scanned
from onward.testing.scenario import Kit, scenario
from tests.brokers.rabbitmq.harness import RabbitHarness, harness

__all__ = ["harness"]

BUDGET = 4 << 20
LARGE = 50_000
MANY = 1_000
_PAGE = 50


def large(owner: Owner, n: int, state: State) -> AsideRecord:
    value = n.to_bytes(4) * (LARGE // 4)
    name = record_id(GROUP, owner.assigned.log_id, owner.partition, n)
    event = Event(f"event-{n}", owner.partition.topic, f"key-{n % 10}", value)
    return msgspec.structs.replace(owner.record(0, state), id=name, position=n, event=event)


async def drained(owner: Owner, **options: Any) -> list[tuple[int, str]]:
    """Position and event id of every record, read page by page. The records themselves are not stored."""
    found: list[tuple[int, str]] = []
    after = None
    while page := await owner.aside.load(owner.partition, after=after, limit=_PAGE, max_bytes=BUDGET, **options):
        assert sum(record.event.size for record in page) <= BUDGET
        assert all(record.event.value == record.position.to_bytes(4) * (LARGE // 4) for record in page)
        found += [(record.position, record.event.id) for record in page]
        after = page[-1].position
    return found


class TestMemory:
    @pytest.mark.slow
    @scenario(max_in_flight_bytes=BUDGET)
    async def test_many_large_records_do_not_stay_in_memory(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 1)
        states = [State.DEAD, State.HELD]
        tracemalloc.start()
        try:
            for start in range(0, MANY, _PAGE):
                await owner.set_aside([large(owner, n, states[n % 2]) for n in range(start, start + _PAGE)])
            expected = [(n, f"event-{n}") for n in range(MANY)]
            assert await drained(owner, dead=True) == expected
            assert await drained(owner) == expected[1::2]
            shown = 0
            after = None
            while True:
                page = await owner.aside.scan(Filter(text="no stock"), after, 1_000)
                shown += len(page.records)
                after = page.after
                if after is None:
                    break
            assert shown == MANY // 2
            del page
            used, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert used < BUDGET + 4 * 1_000 * MANY, f"{used:,} bytes of {MANY * LARGE:,} are in memory"
        assert peak < 64 << 20, f"{peak:,} bytes at most"

    @scenario(max_in_flight_bytes=1)
    async def test_dead_letters_are_counted_without_reading_them(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 4)
        await owner.set_aside([owner.record(n) for n in range(4)], 4)
        letters = DeadLetters(owner.broker, [(kit.topic, GROUP)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(aside_bodies, "_read", _unread)
            assert (await letters.tally(kit.topic, GROUP)).depth == 4
            assert await letters.count(key="key-0") == 4
            with pytest.raises(AssertionError, match="was read"):
                await letters.count(text="stock")


async def _unread(*_: object) -> None:
    raise AssertionError("a body was read")


class TestRefused:
    @scenario(max_in_flight_bytes=1)
    async def test_records_stored_with_a_refused_one_of_their_partition_are_undone(self, kit: Kit) -> None:
        """One record is new and is removed again. One replaced an older record, which is restored."""
        owner = await Owner.of(kit, 4)
        older = owner.record(0, State.WAITING)
        await owner.set_aside([older], 1)
        failure = msgspec.structs.replace(cast("Failure", owner.record(2).failure), message="x" * 500_000)
        refused = msgspec.structs.replace(owner.record(2), failure=failure)
        records = [owner.record(0), owner.record(1), refused]
        harness = cast("RabbitHarness", kit.harness)
        with harness.refuse_aside(larger_than=100_000), pytest.raises(AsideError) as raised:
            await owner.member.subscription.settle([owner.progress(3)], aside=records, gone=[older.id])
        assert raised.value.partitions == (owner.partition,)
        assert await scanned(owner.broker) == [older]
        await owner.set_aside(records[1:2], 2)
        assert await scanned(owner.broker) == [older, records[1]]


class TestGenerations:
    @pytest.fixture(autouse=True)
    def _early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rewrite early, and without pauses."""
        monkeypatch.setattr(aside_fold, "_LONG_ENTRIES", 20)
        monkeypatch.setattr(aside_log, "DECLARED_S", 0.3)
        monkeypatch.setattr(aside_log, "DELETE_S", 0.3)

    @scenario(lease_s=1.0, max_in_flight_bytes=1)
    async def test_an_owner_rewrites_its_aside_while_an_operator_works_with_it(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 30)
        other = (await kit.broker(partitions=1)).aside(GROUP)
        moved, n = 0, 0
        while _generation(owner.aside, owner) < 2:
            await owner.set_aside([owner.record(n % 30)])
            moved += await other.move([owner.record(n % 30).id], expect=State.DEAD, to=State.WAITING, due=float(n))
            await owner.member.receive(wait_s=0.0)
            n += 1
        assert moved == n
        await owner.member.until(lambda: len(_moved(owner)) == n)
        assert [each.due for each in _moved(owner)] == [float(each) for each in range(n)]
        expected = sorted(owner.record(each).id for each in range(min(n, 30)))
        for broker in (owner.broker, await kit.broker(partitions=1)):
            found = await scanned(broker)
            assert sorted(record.id for record in found) == expected
            assert {record.state for record in found} == {State.WAITING}


def _moved(owner: Owner) -> list[Moved]:
    return [message for message in owner.member.history if isinstance(message, Moved)]


def _generation(aside: Aside, owner: Owner) -> int:
    """Which one the owner reads now."""
    asides = cast("RabbitAside", aside)._asides
    mine = asides.owned_by_us(AsidePlace(owner.partition.topic, GROUP, owner.partition.index))
    return cast("AsideStream", mine)._reader.fold.generation


class TestOperators:
    @scenario(partitions=1)
    async def test_a_move_whose_connection_is_lost_is_counted_once(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 4)
        await owner.set_aside([owner.record(n) for n in range(4)], 4)
        broker = await kit.broker()
        aside = cast("RabbitAside", broker.aside(GROUP))
        assert len(await scanned(broker)) == 4
        ids = [owner.record(n).id for n in range(2)]
        publish, cut = EntryWriter._published, list[bool]()

        async def cutting(writer: EntryWriter, generation: int, sent: Any) -> Any:
            """The connection ends after the first request was stored, and before its answer is known."""
            answers = await publish(writer, generation, sent)
            if not cut:
                cut.append(True)
                for each in sent.values():
                    each.answer = None
                await writer._reader.source.connection.close()
                raise BrokerError("the connection was cut")
            return answers

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EntryWriter, "_published", cutting)
            assert await aside.move(ids, expect=State.DEAD, to=State.WAITING, due=7.0) == 2
        assert cut
        assert [record.state for record in await scanned(broker)] == [State.WAITING] * 2 + [State.DEAD] * 2
        assert len(await owner.moved(2)) == 1

    @scenario(partitions=2)
    async def test_an_unknown_group_has_no_records(self, kit: Kit) -> None:
        broker = await kit.broker()
        aside = broker.aside("never")
        assert (await aside.scan(Filter(), None, 5)).records == []
        assert (await aside.count(Filter())).records == 0
        assert await aside.move(["never:log:0:1"], expect=State.DEAD, to=State.WAITING, due=None) == 0

    @scenario(partitions=1)
    async def test_records_of_a_temporary_group_are_in_memory_only(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(3))
        group = f"{PASSING}tail"
        member = await (await kit.member(broker, group)).hold(1)
        await member.take(3)
        (assigned,) = member.assigned.values()
        name = record_id(group, assigned.log_id, assigned.partition, member.deliveries[0].position)
        record = AsideRecord(
            *(name, group, assigned.partition, member.deliveries[0].position, State.DEAD, None),
            *(member.deliveries[0].event.whole(), Tries(failed=5), None),
        )
        assert not await member.subscription.settle([], aside=[record])
        aside = broker.aside(group)
        assert list((await aside.scan(Filter(), None, 5)).records) == [record]
        assert await aside.remove([record.id], expect=State.DEAD) == 1
        harness = cast("RabbitHarness", kit.harness)
        assert not [each for each in harness.server.queues(harness.vhost) if ".aside." in each]

    @scenario(partitions=1)
    async def test_a_closed_broker_raises_instead_of_hanging(self, kit: Kit) -> None:
        broker = await kit.broker()
        aside = broker.aside(GROUP)
        await broker.close()
        with pytest.raises(BrokerError):
            await aside.count(Filter())

    @scenario(partitions=1)
    async def test_calls_at_the_same_time_share_one_reader(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 4)
        await owner.set_aside([owner.record(n) for n in range(4)], 4)
        aside = (await kit.broker()).aside(GROUP)
        counts = await asyncio.gather(*(aside.count(Filter()) for _ in range(10)))
        assert {each.records for each in counts} == {4}
