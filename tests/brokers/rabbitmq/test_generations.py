"""Generations of an aside: rewriting while others write, killed at each step, and what readers see."""

import contextlib
import random

import pytest

from onward.brokers.base import State
from onward.brokers.core.folded_aside import BodyRoom, MoveRequest
from onward.brokers.rabbitmq.aside_entries import (
    OPEN,
    AsideEntry,
    fence_entry,
    move_entry,
    next_entry,
    record_entry,
)
from onward.brokers.rabbitmq.aside_fold import AsideFold
from tests.brokers.rabbitmq.aside_world import (
    Deleted,
    OperatorActor,
    OwnerActor,
    Reader,
    Steps,
    World,
    record,
)


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
