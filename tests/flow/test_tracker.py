"""The tracker against a naive one that stores every position in a set."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.flow.driver import P, claims, event

from onward.brokers.base import Progress
from onward.event import Delivery
from onward.flow.entry import Entry
from onward.flow.tracker import Tracker

pytestmark = pytest.mark.slow

HORIZON = 40  # how far above the end the claims are compared


def entry(position: int) -> Entry:
    return Entry(Delivery(event("k"), P, position, 1), 0)


def progress_of(tracker: Tracker) -> Progress:
    return Progress(P, 1, tracker.watermark, tracker.done_above())


def opened(tracker: Tracker, *positions: int) -> None:
    for position in positions:
        assert tracker.add(position, entry(position))


class TrackerMachine(RuleBasedStateMachine):
    """Positions have holes and end in any order. A settle may be answered, or be refused with its records."""

    @initialize(
        watermark=st.integers(0, 5), spans=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4)
    )
    def start(self, watermark: int, spans: list[tuple[int, int]]) -> None:
        above, at = [], watermark
        for gap, length in spans:
            above.append((at + gap, at + gap + length))
            at += gap + length
        stored = Progress(P, 0, watermark, above) if watermark or above else None
        self.tracker = Tracker(stored)
        self.inherited = {position for start, stop in above for position in range(start, stop)}
        self.end = watermark
        self.open: dict[int, Entry] = {}
        self.done_ones = set(range(watermark)) | self.inherited
        self.fresh: list[int] = []
        self.letters: list[Entry] | None = None  # of the settle in flight
        self.named = 0  # fresh positions in it
        self.best = watermark
        self.delivered: set[int] = set()

    @rule(gap=st.integers(0, 3))
    def deliver(self, gap: int) -> None:
        position = self.end + gap
        self.end = position + 1
        delivered = entry(position)
        assert self.tracker.add(position, delivered) is (position not in self.inherited)
        if position not in self.inherited:
            self.open[position] = delivered
            self.delivered.add(position)

    @rule(gaps=st.lists(st.integers(-3, 3), max_size=20), back=st.integers(0, 2))
    def deliver_many(self, gaps: list[int], back: int) -> None:
        """Deliver long and short lists. Positions below the end are delivered for the second time."""
        entries, fits, at = [], [], self.end - back
        for gap in gaps:
            at = max(0, at + gap)
            entries.append(entry(at))
            if at >= self.end:
                self.end = at + 1
                fits += [entries[-1]] if at not in self.inherited else []
            at += 1
        assert list(self.tracker.add_all(entries)) == fits
        self.open |= {each.delivery.position: each for each in fits}
        self.delivered |= {each.delivery.position for each in fits}

    @rule(back=st.integers(1, 10))
    def deliver_again(self, back: int) -> None:
        """A position that was delivered is never opened again, whether it is open or done."""
        assert not self.tracker.add(self.end - back, entry(self.end - back))

    @rule(gap=st.integers(0, 3))
    def deliver_a_position_with_a_record(self, gap: int) -> None:
        position = self.end + gap
        self.end = position + 1
        self.tracker.pass_over(position)
        if position not in self.inherited:
            self.fresh.append(position)
            self.done_ones.add(position)
            self.delivered.add(position)

    @rule(to=st.integers(-3, 5))
    def reached(self, to: int) -> None:
        self.tracker.reached(self.end + to)
        self.end = max(self.end, self.end + to)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[position]
        self.tracker.done(position)
        self.fresh.append(position)
        self.done_ones.add(position)

    @rule(position=st.integers(0, 60))
    def completing_a_position_that_is_not_open_does_nothing(self, position: int) -> None:
        if position not in self.open:
            self.tracker.done(position)

    @precondition(lambda self: self.letters is None)
    @rule(share=st.floats(0, 1))
    def settle(self, share: float) -> None:
        """Some open events become records: they count as done in this settle."""
        leaving = sorted(self.open)[: int(share * len(self.open))]
        self.letters = [self.open.pop(position) for position in leaving]
        for position in leaving:
            self.tracker.leave(position)
        self.fresh += leaving
        self.done_ones |= set(leaving)
        assert self.tracker.fresh == self.fresh
        self.named = len(self.fresh)

    @precondition(lambda self: self.letters is not None)
    @rule()
    def settle_answered(self) -> None:
        self.tracker.forget(self.named)
        del self.fresh[: self.named]
        self.letters = None
        assert self.tracker.watermark >= self.best, "the settled watermark went back"
        self.best = self.tracker.watermark

    @precondition(lambda self: self.letters is not None)
    @rule()
    def settle_refused(self) -> None:
        assert self.letters is not None
        self.tracker.reopen()
        again = {each.delivery.position: each for each in self.letters}
        self.open |= again
        self.fresh = [position for position in self.fresh if position not in again]
        self.done_ones -= set(again)
        self.letters = None

    @invariant()
    def the_watermark_is_the_lowest_open_position(self) -> None:
        after = self.end  # if nothing is open: intervals done before this ownership may reach further
        while after in self.inherited:
            after += 1
        assert self.tracker.watermark == min(self.open, default=after)
        assert self.tracker.end == self.end
        assert self.tracker.open == self.open
        assert len(self.tracker) == len(self.open)
        blocking = self.tracker.blocking()
        assert blocking is (self.open[min(self.open)] if self.open else None)

    @invariant()
    def the_gap_counts_events_done_above_an_open_or_leaving_one(self) -> None:
        """It is exact, except for events that an earlier owner completed."""
        leaving = {each.delivery.position for each in self.letters or ()}
        lowest = min([*self.open, *leaving], default=self.end)
        done = len([each for each in self.delivered - self.open.keys() - leaving if each > lowest])
        assert self.tracker.gap >= done
        assert self.tracker.gap == done or self.inherited

    @invariant()
    def exactly_the_done_positions_are_claimed(self) -> None:
        """Done positions are claimed, also those done before this ownership. Open or unread ones never are."""
        progress = progress_of(self.tracker)
        for position in range(self.end + HORIZON):
            if position in self.done_ones:
                assert claims(progress, position), f"{position} is done"
            elif position in self.open or position >= self.end:
                assert not claims(progress, position), f"{position} is not done"

    @invariant()
    def spans_ascend_above_the_watermark(self) -> None:
        spans = self.tracker.done_above()
        bounds = [bound for span in spans for bound in span]
        assert bounds == sorted(bounds)
        assert all(self.tracker.watermark < start < stop for start, stop in spans)


def test_the_tracker_agrees_with_a_naive_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # So small that settled positions are trimmed all the time.
    monkeypatch.setattr("onward.flow.tracker._TRIM_AT", 2)
    run_state_machine_as_test(
        TrackerMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
    )


def test_completion_in_reverse_moves_the_watermark_once() -> None:
    tracker = Tracker(None)
    opened(tracker, *range(10_000))
    for position in range(9_999, 0, -1):
        tracker.done(position)
    assert progress_of(tracker) == Progress(P, 1, 0, [(1, 10_000)])
    tracker.done(0)
    assert progress_of(tracker) == Progress(P, 1, 10_000, [])


def test_the_memory_of_settled_positions_is_freed() -> None:
    tracker = Tracker(None)
    for position in range(0, 100_000, 2):
        opened(tracker, position)
        tracker.done(position)
        if position % 1_000 == 0:
            tracker.forget(len(tracker.fresh))
    assert tracker.watermark == 99_999
    assert len(tracker.flags) < 10_000
    assert len(tracker.flags) == len(tracker._positions)
    assert tracker.fresh == list(range(99_002, 100_000, 2))


def test_a_long_list_of_intervals_is_cut_at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.flow.tracker.MAX_INTERVALS", 2)
    tracker = Tracker(None)
    opened(tracker, *range(10))
    for position in range(1, 10, 2):
        tracker.done(position)
    assert progress_of(tracker) == Progress(P, 1, 0, [(1, 2), (3, 4)])


def test_fresh_has_each_position_once_and_until_it_is_answered() -> None:
    tracker = Tracker(None)
    opened(tracker, 0, 1, 2)
    tracker.done(1)
    tracker.done(1)
    named = len(tracker.fresh)
    tracker.done(0)
    assert tracker.fresh == [1, 0]
    tracker.forget(named)
    assert tracker.fresh == [0]


def test_stored_intervals_below_the_first_delivery_are_dropped() -> None:
    """Retention removed these events: the watermark passes them."""
    tracker = Tracker(Progress(P, 0, 5, [(7, 9), (20, 30)]))
    opened(tracker, 15)
    assert progress_of(tracker) == Progress(P, 1, 15, [(20, 30)])
    tracker.done(15)
    assert progress_of(tracker) == Progress(P, 1, 16, [(20, 30)])


def test_a_delivery_inside_a_stored_interval_shortens_the_interval() -> None:
    tracker = Tracker(Progress(P, 0, 5, [(7, 12)]))
    opened(tracker, 5)
    assert not tracker.add(8, entry(8))
    assert [claims(progress_of(tracker), position) for position in range(5, 13)] == [False, *[True] * 6, False]
    tracker.reached(12)
    assert progress_of(tracker) == Progress(P, 1, 5, [(6, 12)])
