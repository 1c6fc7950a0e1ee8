"""Lanes against naive lists: one event of a lane at a time, first in first out, the oldest of all lanes first."""

from collections.abc import Hashable
from heapq import heappop

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
from tests.flow.driver import P, event

from onward.brokers.base import Ordering
from onward.event import Delivery
from onward.flow.entry import Entry, Stage
from onward.flow.lanes import Lanes

KEYS = st.sampled_from(["a", "b", "c", "", None])
NO_LIMIT = 1 << 62


def entry(position: int, key: str | None) -> Entry:
    return Entry(Delivery(event(key), P, position, 1), 0)


def positions(entries: list[Entry]) -> list[int]:
    return [each.delivery.position for each in entries]


class LanesMachine(RuleBasedStateMachine):
    """The model: a list for each lane, and a list of the events without a lane."""

    @initialize(ordering=st.sampled_from(["key", "partition", "none"]))
    def start(self, ordering: Ordering) -> None:
        self.ordering = ordering
        self.lanes = Lanes(ordering)
        self.model: dict[Hashable, list[Entry]] = {}
        self.free: list[Entry] = []
        self.next = 0

    def name(self, each: Entry) -> Hashable | None:
        key = each.delivery.event.key
        return {"key": key, "partition": "*", "none": None}[self.ordering]

    def heads(self) -> list[Entry]:
        return [lane[0] for lane in self.model.values()] + self.free

    def waiting(self) -> list[Entry]:
        return [each for each in self.heads() if each.stage is Stage.QUEUED]

    def active(self) -> list[Entry]:
        return [each for each in self.heads() if each.stage is not Stage.QUEUED]

    @rule(key=KEYS, gap=st.integers(0, 2), share=st.sampled_from([1, 3, NO_LIMIT]))
    def add(self, key: str | None, gap: int, share: int) -> None:
        each = entry(self.next + gap, key)
        self.next += gap + 1
        name = self.name(each)
        lane = self.model.get(name, []) if name is not None else self.free
        fits = name is None or not lane or len(lane) < share
        assert self.lanes.add(each, share) is fits
        if fits:
            lane.append(each)
            if name is not None:
                self.model[name] = lane

    @precondition(lambda self: self.waiting())
    @rule(stage=st.sampled_from([Stage.RUNNING, Stage.DELAYED, Stage.MARKING]))
    def start_the_oldest(self, stage: Stage) -> None:
        oldest = min(self.waiting(), key=lambda each: each.delivery.position)
        assert heappop(self.lanes.ready) == oldest.delivery.position
        oldest.stage = stage

    @precondition(lambda self: self.active())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.active()))
        name = self.name(each)
        if name is None:
            self.free.remove(each)
            assert not self.lanes.leave(each)
            return
        self.model[name].pop(0)
        emptied = not self.model[name]
        if emptied:
            del self.model[name]
        assert self.lanes.leave(each) is emptied

    @precondition(lambda self: self.active())
    @rule(data=st.data())
    def run_again(self, data: st.DataObject) -> None:
        self.lanes.again(data.draw(st.sampled_from(self.active())))

    @precondition(lambda self: self.active())
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.active()))
        name = self.name(each)
        rest = self.model[name][1:] if name is not None else []
        assert self.lanes.cut(each) == rest
        if name is not None:
            del self.model[name][1:]

    @precondition(lambda self: self.heads())
    @rule(data=st.data(), count=st.integers(0, 4))
    def followers(self, data: st.DataObject, count: int) -> None:
        each = data.draw(st.sampled_from(self.heads()))
        name = self.name(each)
        assert self.lanes.followers(each, count) == (self.model[name][1 : 1 + count] if name is not None else [])

    @rule()
    def abandon(self) -> None:
        """Only running events are remembered, so that their lanes stay busy."""
        self.lanes.abandon()
        for name, lane in list(self.model.items()):
            self.model[name] = [each for each in lane if each.stage is Stage.RUNNING]
            if not self.model[name]:
                del self.model[name]
        self.free = []

    @rule(key=KEYS)
    def an_unknown_event_changes_nothing(self, key: str | None) -> None:
        """An event that was cut, or has already left, is not in any lane."""
        stranger = entry(10_000, key)
        assert not self.lanes.leave(stranger)
        assert self.lanes.cut(stranger) == []

    @invariant()
    def ready_are_the_heads_that_wait(self) -> None:
        assert sorted(self.lanes.ready) == sorted(positions(self.waiting()))

    @invariant()
    def a_lane_exists_while_it_has_a_head(self) -> None:
        assert len(self.lanes) == len(self.model)
        if self.ordering == "key":
            for key in ("a", "b", "c", ""):
                assert (key in self.lanes) is (key in self.model)
                assert self.lanes.head(key) is (self.model[key][0] if key in self.model else None)


def test_lanes_agree_with_naive_lists() -> None:
    run_state_machine_as_test(
        LanesMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
    )


def test_a_batch_runs_several_events_of_a_lane_and_the_next_waits_for_all_of_them() -> None:
    lanes = Lanes("key")
    first, second, third = entries = [entry(position, "a") for position in range(3)]
    for each in entries:
        lanes.add(each, NO_LIMIT)
    heappop(lanes.ready)
    first.stage = second.stage = Stage.RUNNING
    lanes.leave(first)
    assert lanes.ready == []
    lanes.leave(second)
    assert lanes.ready == [2]
    assert lanes.head("a") is third


def test_a_cut_leaves_events_that_run_with_the_head() -> None:
    lanes = Lanes("key")
    entries = [entry(position, "a") for position in range(4)]
    for each in entries:
        lanes.add(each, NO_LIMIT)
    entries[0].stage = entries[1].stage = Stage.RUNNING
    assert positions(lanes.cut(entries[0])) == [2, 3]
    assert positions(lanes.followers(entries[0], 9)) == [1]


def test_a_cut_is_only_made_at_the_head() -> None:
    lanes = Lanes("key")
    entries = [entry(position, "a") for position in range(3)]
    for each in entries:
        lanes.add(each, NO_LIMIT)
    assert lanes.cut(entries[1]) == []
    assert positions(lanes.cut(entries[0])) == [1, 2]


def test_an_abandoned_batch_keeps_its_lane_busy_until_its_last_run_ends() -> None:
    lanes = Lanes("key")
    old = [entry(position, "a") for position in range(3)]
    for each in old:
        lanes.add(each, NO_LIMIT)
    old[0].stage = old[1].stage = Stage.RUNNING
    lanes.abandon()
    new = entry(0, "a")
    lanes.add(new, NO_LIMIT)
    assert lanes.ready == []
    lanes.leave(old[0])
    assert lanes.ready == []
    lanes.leave(old[1])
    assert lanes.ready == [0]
    assert lanes.head("a") is new


@pytest.mark.parametrize("ordering", ["key", "none"])
def test_keyless_events_have_no_lane(ordering: Ordering) -> None:
    lanes = Lanes(ordering)
    for position in range(5):
        assert lanes.add(entry(position, None), 1)
    assert sorted(lanes.ready) == [0, 1, 2, 3, 4]
    assert len(lanes) == 0


def test_an_empty_key_is_a_key() -> None:
    lanes = Lanes("key")
    lanes.add(entry(0, ""), NO_LIMIT)
    lanes.add(entry(1, ""), NO_LIMIT)
    assert lanes.ready == [0]
    assert "" in lanes
    assert None not in lanes


def test_with_partition_order_keyless_events_are_in_the_same_lane() -> None:
    lanes = Lanes("partition")
    for position, key in enumerate(["a", None, "b"]):
        lanes.add(entry(position, key), NO_LIMIT)
    assert lanes.ready == [0]
    assert len(lanes) == 1
