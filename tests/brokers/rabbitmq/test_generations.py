"""Generations of an aside: rewriting while others write, killed at each step, and what readers see."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from onward.brokers.base import State
from onward.brokers.core.folded_aside import BodyRoom, MoveRequest
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import Channel, Received
from onward.brokers.rabbitmq.aside import aside_fold, aside_log
from onward.brokers.rabbitmq.aside.aside_entries import (
    OPEN,
    AsideEntry,
    fence_entry,
    move_entry,
    next_entry,
    owned_entry,
    record_entry,
)
from onward.brokers.rabbitmq.aside.aside_fold import AsideFold
from onward.brokers.rabbitmq.aside.aside_log import AsideLost, AsideStream
from onward.brokers.rabbitmq.aside.aside_reader import AsideSource
from onward.brokers.rabbitmq.aside.aside_writing import EntryWriter
from onward.brokers.rabbitmq.stream_reader import end_of
from tests.brokers.rabbitmq.aside_stage import PLACE, AsideStage, KnownGenerations, all_records, staged
from tests.brokers.rabbitmq.aside_world import (
    Deleted,
    OperatorActor,
    OwnerActor,
    Reader,
    Steps,
    World,
    record,
)
from tests.brokers.rabbitmq.stage import played, until
from tests.servers.rabbitmq import RabbitMQServer


def check(world: World, readers: list[Reader]) -> None:
    """All readers know the truth, whatever the generation that they began with."""
    judge = world.judge
    for reader in [*readers, Reader(world)]:
        while True:
            with contextlib.suppress(Deleted):
                reader.catch_up()
                break
        assert reader.records() == judge.records
        assert reader.fold.table.fence == judge.fence
        assert reader.fold.facts.witnessed == judge.witnessed
        assert reader.fold.facts.outcomes == judge.outcomes
        assert not reader.fold.faults


class TestInterleavings:
    @pytest.mark.parametrize("seed", range(150))
    def test_no_record_no_move_and_no_removal_is_lost(self, seed: int) -> None:
        """Owners die and are followed by others at any step. A former owner may go on as if nothing had happened."""
        rng = random.Random(seed)
        world, fence = World(), 0
        readers = [Reader(world) for _ in range(2)]
        operators = [OperatorActor(world, f"operator-{n}", rng) for n in range(2)]
        owners: list[Steps] = []
        asking = [operator.run() for operator in operators]
        for _ in range(300):
            if not owners or rng.random() < 0.02:
                fence += 1
                owners = [*owners, OwnerActor(world, fence, rng).run()] if rng.random() < 0.7 else []
            step = rng.choice([*owners, *asking, None])
            if step is not None and next(step, "ended") == "ended":
                owners.remove(step)
            reader = rng.choice(readers)
            with contextlib.suppress(Deleted):
                reader.catch_up(rng.randrange(4))
        last = OwnerActor(world, fence + 1, rng).run()
        for _ in range(100):
            next(last, None)
        check(world, readers)
        for operator in operators:
            assert operator.answers, "the operator never got an answer"
            assert operator.answers == {key: world.judge.outcomes[key] for key in operator.answers}

    @pytest.mark.parametrize("step", range(14))
    def test_a_rewriting_that_ends_at_any_step_is_completed_by_the_next_owner(self, step: int) -> None:
        world, rng = World(), random.Random(3)
        world.append(0, "first", [record_entry(record(n), 0) for n in range(5)])
        owner, reader, operator = OwnerActor(world, 1, rng), Reader(world), OperatorActor(world, "operator", rng)
        for _ in owner.write([fence_entry(1)]):
            pass
        rewriting = owner.rewrite()
        for _ in range(step):
            next(rewriting, None)
        request = move_entry("late", MoveRequest([record(2).id], State.DEAD, State.WAITING, 1.0))
        for _ in operator.ask(request):
            pass
        assert operator.fold.facts.outcomes[request.key] == 1
        following = OwnerActor(world, 2, rng)
        for _ in following.write([fence_entry(2)]):
            pass
        for _ in following.complete():
            pass
        for _ in rewriting:  # the former owner goes on
            pass
        check(world, [reader, owner, following])
        assert following.fold.is_open
        assert min(world.streams) == world.registered, "an old generation was left"


class TestFold:
    def fold(self, *messages: list[AsideEntry]) -> AsideFold:
        fold = AsideFold(BodyRoom(1 << 20), 0)
        for offset, entries in enumerate(messages):
            fold.apply(entries, offset)
        return fold

    def test_entries_before_open_take_effect_after_the_copied_ones(self) -> None:
        copy = AsideEntry(record(1).id, record_entry(record(1), 0).value, 0, copied=True)
        request = move_entry("a", MoveRequest([record(1).id], State.DEAD, State.WAITING, 1.0))
        fold = self.fold([fence_entry(3)], [request], [copy], [AsideEntry(OPEN)])
        assert fold.facts.outcomes == {request.key: 1}
        assert fold.table.rows[record(1).id].state is State.WAITING
        assert fold.table.fence == 3

    def test_a_copy_after_open_has_no_effect(self) -> None:
        copy = AsideEntry(record(1).id, record_entry(record(1), 0).value, 0, copied=True)
        assert not self.fold([AsideEntry(OPEN)], [copy]).table.rows

    def test_a_former_owner_cannot_close_a_generation(self) -> None:
        fold = self.fold([AsideEntry(OPEN)], [fence_entry(2)])
        assert not fold.apply([next_entry(1, 1)], 2)
        assert fold.generation == 0

    def test_a_generation_that_is_not_open_cannot_be_closed(self) -> None:
        fold = self.fold([AsideEntry(OPEN)], [next_entry(1, 0)])
        assert not fold.apply([next_entry(2, 0)], 0)
        assert fold.generation == 1

    def test_what_follows_next_in_its_message_has_no_effect(self) -> None:
        fold = self.fold([AsideEntry(OPEN)], [next_entry(1, 0), record_entry(record(1), 0)])
        assert (fold.generation, fold.read, fold.table.rows) == (1, 0, {})

    def test_a_request_that_is_written_twice_counts_once(self) -> None:
        there = move_entry("a", MoveRequest([record(1).id], State.DEAD, State.WAITING, 1.0))
        back = move_entry("b", MoveRequest([record(1).id], State.WAITING, State.DEAD, None))
        fold = self.fold([AsideEntry(OPEN)], [record_entry(record(1), 0)], [there], [back], [there])
        assert fold.table.rows[record(1).id].state is State.DEAD
        assert fold.facts.outcomes == {there.key: 1, back.key: 1}

    def test_entries_that_are_not_valid_are_skipped_one_by_one(self) -> None:
        junk = [AsideEntry("x", b"junk"), AsideEntry("!later:1", b""), AsideEntry("!next:x"), AsideEntry("!move:x")]
        fold = self.fold([AsideEntry(OPEN)], [junk[0], record_entry(record(1), 0), *junk[1:]])
        assert [offset for offset, _ in fold.faults] == [1, 1, 1, 1]
        assert list(fold.table.rows) == [record(1).id]

    @pytest.mark.parametrize("fence", [1 << 62, 1 << 63, (1 << 64) - 1])
    def test_a_fence_that_no_owner_can_have_has_no_effect(self, fence: int) -> None:
        """The owner that follows could not write a higher one."""
        fold = self.fold([fence_entry(fence), fence_entry(3)], [AsideEntry(OPEN)])
        assert not fold.apply([fence_entry(fence)], 2)
        assert not fold.apply([owned_entry(b"", fence)], 3)
        assert (fold.table.fence, fold.facts.witnessed) == (3, None)
        assert [offset for offset, _ in fold.faults] == [0, 2, 3]
        assert fold.apply([fence_entry(4)], 4)

    def test_after_the_largest_fence_each_next_owner_is_still_one_higher(self) -> None:
        fold = self.fold([AsideEntry(OPEN)], [fence_entry((1 << 62) - 1)])
        assert fold.apply([fence_entry(1 << 62)], 2)
        assert fold.apply([fence_entry((1 << 62) + 1)], 3)
        assert not fold.apply([fence_entry((1 << 62) + 3)], 4)
        assert fold.table.fence == (1 << 62) + 1

    def test_a_short_generation_is_not_rewritten(self) -> None:
        fold = self.fold([AsideEntry(OPEN)])
        for n in range(9_998):
            fold.apply([record_entry(record(n % 10), 0)], n + 1)
        assert not fold.is_long
        fold.apply([record_entry(record(1), 0)], 9_999)
        assert fold.is_long

    def test_a_generation_full_of_records_is_not_rewritten(self) -> None:
        fold = self.fold([AsideEntry(OPEN)])
        for n in range(12_000):
            fold.apply([record_entry(record(n), 0)], n + 1)
        assert not fold.is_long


class Killed(Exception):
    """The owner ends here."""


def killer(*_: object) -> None:
    raise Killed


# The step that is not done, and the one after which it ends.
STEPS: dict[str, tuple[type, str]] = {
    "declared": (EntryWriter, "send"),
    "closed": (AsideStream, "_copy"),
    "partly copied": (EntryWriter, "copy"),
    "opened": (KnownGenerations, "set_generation"),
    "registered": (AsideSource, "delete"),
}


class Held:
    """A reader that gets its messages only when it is released."""

    def __init__(self, aside: AsideStream) -> None:
        self._reader = aside._reader
        self._take: Callable[[int, Sequence[Received]], None] = self._reader._take
        self._held: list[tuple[int, Sequence[Received]]] = []
        self._reader._take = lambda generation, messages: self._held.append((generation, messages))  # type: ignore[method-assign]

    def release(self) -> None:
        del self._reader._take
        for generation, messages in self._held:
            self._take(generation, messages)


@pytest.mark.usefixtures("at_once")
class TestRewriting:
    @pytest.fixture
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rewrite early, and without pauses."""
        monkeypatch.setattr(aside_fold, "_LONG_ENTRIES", 20)
        monkeypatch.setattr(aside_log, "DECLARED_S", 0.0)
        monkeypatch.setattr(aside_log, "DELETE_S", 0.0)
        monkeypatch.setattr(aside_log, "_STEP", 3)

    async def long(self, stage: AsideStage, **options: Any) -> AsideStream:
        """An owner whose aside has become long."""
        owner = await stage.owner(1, **options)
        for _ in range(3):
            assert await owner.store([record(n) for n in range(8)], 1) is None
        await owner.remove([record(0).id], 1)
        await owner.witness(b"progress", 1)
        return owner

    async def generations(self, stage: AsideStage) -> list[int]:
        """Which streams exist."""
        found = []
        for generation in range(5):
            channel = await stage.connection.channel()
            with contextlib.suppress(Exception):
                await channel.declare_queue(names.aside_stream(*PLACE, generation), passive=True)
                found.append(generation)
            await channel.close()
        return found

    @played
    async def test_a_long_aside_is_rewritten_and_the_old_stream_deleted(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await self.long(stage, room=1)
            operator = await stage.operator(room=1)
            await owner.compact_if_long(1)
            assert await self.generations(stage) == [1]
            expected = [record(n) for n in range(1, 8)]
            await operator.catch_up()
            for reader in (owner, operator, await stage.operator()):
                assert await all_records(reader) == expected
                assert reader.witnessed == (1, b"progress")
            await owner.compact_if_long(1)
            assert await self.generations(stage) == [1], "a short one was rewritten"
            assert await owner.store([record(9)], 1) is None
            assert await all_records(await stage.operator()) == [*expected, record(9)]

    @pytest.mark.parametrize("step", STEPS)
    @played
    async def test_a_rewriting_that_is_killed_is_completed_by_the_next_owner(
        self, rabbitmq_server: RabbitMQServer, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await self.long(stage)
            with monkeypatch.context() as patch:
                patch.setattr(*STEPS[step], killer)
                with pytest.raises(Killed):
                    await owner.compact_if_long(1)
            operator = await stage.operator()
            assert await all_records(operator) == [record(n) for n in range(1, 8)]
            request = MoveRequest([record(2).id], State.DEAD, None, None)
            assert await operator.request("a", request) == 1
            expected = [record(n) for n in (1, 3, 4, 5, 6, 7)]
            following = await stage.owner(2)
            assert await all_records(following) == expected
            assert following.witnessed == (1, b"progress")
            await following.compact_if_long(2)
            with pytest.raises(AsideLost):
                await owner.store([record(20)], 1)
            for reader in (following, await stage.operator()):
                assert await all_records(reader) == expected
            assert len(await self.generations(stage)) <= 2

    @played
    async def test_the_owner_goes_on_while_it_copies(self, rabbitmq_server: RabbitMQServer) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await self.long(stage, room=1)
            rewriting = asyncio.create_task(owner.compact_if_long(1))
            n = 100
            while not rewriting.done():
                assert await owner.store([record(n, value=b"%d" % n)], 1) is None
                await owner.remove([record(n - 2).id, record(n % 8).id], 1)
                n += 1
            await rewriting
            expected = await all_records(owner)
            assert [each.position for each in expected if each.position >= 100] == [n - 2, n - 1]
            assert await all_records(await stage.operator()) == expected

    @played
    async def test_a_request_written_into_a_closed_generation_is_written_again(
        self, rabbitmq_server: RabbitMQServer
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            owner, operator = await self.long(stage), await stage.operator()
            held = Held(operator)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(AsideSource, "delete", _nothing)
                await owner.compact_if_long(1)
                asking = asyncio.create_task(
                    operator.request("a", MoveRequest([record(2).id], State.DEAD, State.WAITING, 1.0))
                )
                await until(lambda: operator._writer._sent)
                await owner.store([record(30)], 1)
                held.release()
                assert await asking == 1
            await owner.catch_up()
            assert owner.table.rows[record(2).id].state is State.WAITING

    @pytest.mark.parametrize("counted", [True, False])
    @played
    async def test_an_operator_whose_generation_was_deleted_still_knows_what_it_moved(
        self, rabbitmq_server: RabbitMQServer, counted: bool
    ) -> None:
        """Its request stands before or behind the end of the generation that it never read."""
        async with staged(rabbitmq_server) as stage:
            owner, operator = await self.long(stage), await stage.operator()
            Held(operator)
            request = MoveRequest([record(2).id], State.DEAD, State.WAITING, 1.0)
            if not counted:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(AsideSource, "delete", _nothing)
                    await owner.compact_if_long(1)
            end = await end_of(stage.connection, names.aside_stream(*PLACE, 0))
            asking = asyncio.create_task(operator.request("a", request))
            while await end_of(stage.connection, names.aside_stream(*PLACE, 0)) == end:
                pass  # a publish to a stream that is being deleted ends the connection on 3.10
            if counted:
                await owner.catch_up()
                await until(lambda: owner.table.rows[record(2).id].state is State.WAITING)
                await owner.compact_if_long(1)
            del operator._reader._take
            await owner._source.delete(0)
            assert await asking == 1
            await owner.catch_up()
            assert owner._reader.fold.facts.outcomes == {"!move:a": 1}
            assert await all_records(await stage.operator()) == await all_records(owner)

    @played
    async def test_a_dead_letter_stored_while_its_generation_is_closed_is_not_lost(
        self, rabbitmq_server: RabbitMQServer
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            mover, member = await stage.owner(0), stage.aside(keeps_rows=False)
            for _ in range(3):
                await mover.store([record(n) for n in range(8)])
            await member.store([record(50)])
            held = Held(member)
            await mover.compact_if_long(0)
            storing = asyncio.create_task(member.store([record(51)]))
            await asyncio.sleep(0.1)
            held.release()
            assert await storing is None
            found = await all_records(await stage.operator())
            assert [each.position for each in found] == [*range(8), 50, 51]

    @played
    async def test_movers_that_rewrite_at_the_same_time_do_no_harm(
        self, rabbitmq_server: RabbitMQServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With 3.10, a publish to a stream that is still being created ends the connection. So there is a pause."""
        monkeypatch.setattr(aside_log, "DECLARED_S", 0.3)
        async with staged(rabbitmq_server) as stage:
            movers = [await stage.owner(0) for _ in range(3)]
            members = [stage.aside(keeps_rows=False) for _ in range(2)]
            for round_ in range(4):
                await movers[0].store([record(n) for n in range(25)])
                await movers[0].store([record(n) for n in range(25)])
                stores = [each.store([record(100 + 2 * round_ + at)]) for at, each in enumerate(members)]
                await asyncio.gather(*(each.compact_if_long(0) for each in movers), *stores)
            expected = [record(n) for n in [*range(25), *range(100, 108)]]
            for reader in (*movers, await stage.operator()):
                await reader.catch_up()
                assert await all_records(reader) == expected

    @played
    async def test_the_owner_writes_a_deleted_stream_again(
        self, rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1)
            await owner.store([record(n) for n in range(5)], 1)
            await owner._source.delete(0)
            await until(lambda: owner._reader.fold.base is not None)
            await owner.compact_if_long(1)
            assert "was deleted" in caplog.text
            assert await owner.store([record(7)], 1) is None
            for reader in (owner, await stage.operator()):
                assert [each.position for each in await all_records(reader)] == [0, 1, 2, 3, 4, 7]

    @played
    async def test_a_reader_of_a_deleted_stream_begins_again_with_the_new_one(
        self, rabbitmq_server: RabbitMQServer
    ) -> None:
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1)
            for n in range(10):
                await owner.store([record(n % 4)], 1)
            operator = await stage.operator()
            consuming, written = operator._reader._consuming, asyncio.Event()

            async def late() -> Channel:
                await written.wait()
                return await consuming()

            operator._reader._consuming = late  # type: ignore[method-assign]
            await owner._source.delete(0)
            await until(lambda: owner._reader.fold.base is not None)
            await owner.compact_if_long(1)
            await until(lambda: owner._reader.fold.is_open)
            await owner.remove([record(0).id], 1)
            written.set()
            await until(lambda: operator.table.rows.keys() == {record(n).id for n in (1, 2, 3)})


async def _nothing(*_: object) -> None:
    pass


@pytest.mark.slow
class TestMany:
    MANY = 100_000

    @played
    async def test_a_hundred_thousand_records_are_stored_rewritten_and_read(
        self, rabbitmq_server: RabbitMQServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(aside_log, "DECLARED_S", 0.0)
        monkeypatch.setattr(aside_fold, "_GROWN", 1)
        async with staged(rabbitmq_server) as stage:
            owner = await stage.owner(1)
            for at in range(0, self.MANY, 5_000):
                await owner.store([record(n, State.HELD) for n in range(at, at + 5_000)], 1)
            await owner.remove([record(n).id for n in range(0, self.MANY, 2)], 1)
            await owner.compact_if_long(1)
            operator = await stage.operator(room=1)
            assert [row.position for row in operator.table.above(-1)] == list(range(1, self.MANY, 2))
            rows = list(operator.table.above(-1))[1_000:2_000]
            found = await operator.records(rows)
            assert found == [record(row.position, State.HELD) for row in rows]
