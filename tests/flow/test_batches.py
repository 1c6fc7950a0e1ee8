"""Handlers that get several events at once."""

import pytest
from tests.flow.driver import Driver, P, Q, record, stored, working

from onward.brokers.base import State
from onward.flow.entry import DONE


class TestBatches:
    def calls(self, d: Driver) -> list[list[int]]:
        return [sorted(position for _, _, position in call) for call in d.calls]

    def test_a_call_has_up_to_batch_size_events_of_one_partition(self) -> None:
        d = working(batch_size=3, concurrency=2)
        d.assign(Q)
        d.deliver(*[None] * 7, turn=False)
        d.deliver(*[None] * 2, partition=Q)
        assert sorted(self.calls(d)) == [[0, 1], [0, 1, 2]]

    def test_a_batch_may_have_several_events_of_a_key_in_order(self) -> None:
        d = working(batch_size=4)
        d.deliver("a", "b", "a", "a")
        assert self.calls(d) == [[0, 1, 2, 3]]
        assert [delivery.position for delivery in d.starts] == [0, 1, 2, 3]

    def test_two_batches_never_share_a_key(self) -> None:
        d = working(batch_size=2)
        d.deliver("a", "a", "a", "b")
        assert self.calls(d) == [[0, 1], [3]]
        d.done(0, 1)
        assert self.calls(d) == [[3], [2]]

    def test_a_batch_waits_to_fill(self) -> None:
        d = working(batch_size=3, batch_wait_s=1.0)
        d.deliver("a", "b")
        d.wait(0.9)
        assert d.calls == []
        d.wait(0.2)
        assert self.calls(d) == [[0, 1]]

    def test_a_full_batch_does_not_wait(self) -> None:
        d = working(batch_size=3, batch_wait_s=1.0)
        d.deliver("a", "b")
        d.deliver("c")
        assert self.calls(d) == [[0, 1, 2]]

    def test_events_left_after_a_full_batch_wait_to_fill(self) -> None:
        d = working(batch_size=3, batch_wait_s=1.0)
        d.deliver(*[None] * 4)
        assert self.calls(d) == [[0, 1, 2]]
        d.wait(1.1)
        assert self.calls(d) == [[0, 1, 2], [3]]

    def test_a_slot_is_free_when_all_events_of_its_call_have_ended(self) -> None:
        d = working(batch_size=2, concurrency=1)
        d.deliver(None, None, None)
        d.done(0)
        assert self.calls(d) == [[1]]
        d.done(1)
        assert self.calls(d) == [[2]]

    @pytest.mark.parametrize("bad", range(8))
    def test_a_bad_event_never_fails_the_others_of_its_batch(self, bad: int) -> None:
        d = working(batch_size=8, concurrency=1)
        d.deliver("a", "b", "a", "c", "a", "b", None, "a")
        calls = 0
        while d.calls:
            calls += 1
            positions = self.calls(d)[0]
            if bad not in positions:
                d.done(*positions)
            elif positions == [bad]:
                d.dead(bad)
            else:
                d.split(*positions)
        assert d.states() == {bad: State.DEAD}
        assert d.progress[P].watermark == 8
        assert all(delivery.attempt == 1 for delivery in d.starts)
        assert calls <= 12

    def test_a_cancelled_batch_runs_again_unchanged(self) -> None:
        d = working(batch_size=4)
        d.deliver("a", "a", "b")
        d.cancel(0, 1, 2)
        assert self.calls(d) == [[0, 1, 2]]

    def test_a_stale_batch_keeps_its_lanes_busy_until_its_end(self) -> None:
        d = working(batch_size=4)
        d.deliver("a", "a")
        d.fence(P)
        d.assign()
        d.deliver_at({0: "a", 1: "a", 2: "b"})
        assert sorted(d.runs) == [(P, 1, 0), (P, 1, 1), (P, 2, 2)]
        d.end({0: DONE, 1: DONE}, epoch=1)
        assert sorted(d.runs) == [(P, 2, 0), (P, 2, 1), (P, 2, 2)]

    def test_each_marked_event_runs_in_its_own_call(self) -> None:
        """Otherwise a crash could not be blamed on one event of the batch."""
        d = Driver(batch_size=4)
        d.assign(unclean=True)
        d.deliver("a", "b", "c")
        assert self.calls(d) == [[0], [1], [2]]

    def test_records_join_a_batch_too(self) -> None:
        d = Driver(batch_size=4)
        d.assign(stored=stored(2), records=[record(0, "a"), record(1, "b")])
        assert self.calls(d) == [[0, 1]]
