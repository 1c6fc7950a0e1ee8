"""The tracker against a naive one that keeps every position in a set."""

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


def told(tracker: Tracker) -> Progress:
    return Progress(P, 1, tracker.watermark, tracker.done_above())


def opened(tracker: Tracker, *positions: int) -> None:
    for position in positions:
        assert tracker.add(position, entry(position))


class TrackerMachine(RuleBasedStateMachine):
    """Positions come with holes, end in any order, and a settle may be answered, or refused with some of them."""

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
        """In lists, long ones and short ones; what is behind what was seen is there for the second time."""
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
        """What was seen never fits again, open or done."""
        assert not self.tracker.add(self.end - back, entry(self.end - back))

    @rule(gap=st.integers(0, 3))
    def deliver_what_has_a_record(self, gap: int) -> None:
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
    def done_of_what_is_not_open_is_harmless(self, position: int) -> None:
        if position not in self.open:
            self.tracker.done(position)

    @precondition(lambda self: self.letters is None)
    @rule(share=st.floats(0, 1))
    def settle(self, share: float) -> None:
        """Some open ones become records: they count as done in this settle."""
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
        assert self.tracker.watermark >= self.best, "what was settled went back"
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
        after = self.end  # with nothing open: what was done before this ownership may reach further
        while after in self.inherited:
            after += 1
        assert self.tracker.watermark == min(self.open, default=after)
        assert self.tracker.end == self.end
        assert self.tracker.open == self.open
        assert len(self.tracker) == len(self.open)
        blocking = self.tracker.blocking()
        assert blocking is (self.open[min(self.open)] if self.open else None)

    @invariant()
    def the_gap_is_what_is_done_above_what_is_open_or_leaving(self) -> None:
        """It is exact, but for what an earlier owner did."""
        leaving = {each.delivery.position for each in self.letters or ()}
        lowest = min([*self.open, *leaving], default=self.end)
        done = len([each for each in self.delivered - self.open.keys() - leaving if each > lowest])
        assert self.tracker.gap >= done
        assert self.tracker.gap == done or self.inherited

    @invariant()
    def claims_are_exactly_what_is_done(self) -> None:
        """What is done is claimed, also what was done before this ownership; what is open or unread never is."""
        progress = told(self.tracker)
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


def test_it_agrees_with_a_naive_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    # So small that the cut of what is settled happens all the time.
    monkeypatch.setattr("onward.flow.tracker._TRIM_AT", 2)
    run_state_machine_as_test(
        TrackerMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
    )


def test_completion_in_reverse_moves_the_watermark_once() -> None:
    tracker = Tracker(None)
    opened(tracker, *range(10_000))
    for position in range(9_999, 0, -1):
        tracker.done(position)
    assert told(tracker) == Progress(P, 1, 0, [(1, 10_000)])
    tracker.done(0)
    assert told(tracker) == Progress(P, 1, 10_000, [])


def test_memory_of_what_is_settled_is_given_back() -> None:
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


def test_a_long_list_of_spans_is_cut_at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.flow.tracker.MAX_INTERVALS", 2)
    tracker = Tracker(None)
    opened(tracker, *range(10))
    for position in range(1, 10, 2):
        tracker.done(position)
    assert told(tracker) == Progress(P, 1, 0, [(1, 2), (3, 4)])


def test_fresh_names_each_position_once_and_until_it_is_answered() -> None:
    tracker = Tracker(None)
    opened(tracker, 0, 1, 2)
    tracker.done(1)
    tracker.done(1)
    named = len(tracker.fresh)
    tracker.done(0)
    assert tracker.fresh == [1, 0]
    tracker.forget(named)
    assert tracker.fresh == [0]


def test_stored_spans_below_the_first_delivery_are_dropped() -> None:
    """Retention took what the map spoke of: the watermark passes over it."""
    tracker = Tracker(Progress(P, 0, 5, [(7, 9), (20, 30)]))
    opened(tracker, 15)
    assert told(tracker) == Progress(P, 1, 15, [(20, 30)])
    tracker.done(15)
    assert told(tracker) == Progress(P, 1, 16, [(20, 30)])


def test_a_delivery_inside_a_stored_span_shortens_it_to_what_is_ahead() -> None:
    tracker = Tracker(Progress(P, 0, 5, [(7, 12)]))
    opened(tracker, 5)
    assert not tracker.add(8, entry(8))
    assert [claims(told(tracker), position) for position in range(5, 13)] == [False, *[True] * 6, False]
    tracker.reached(12)
    assert told(tracker) == Progress(P, 1, 5, [(6, 12)])
