"""Parking against a naive dictionary: records come back by position, and the events in memory are bounded."""

import time

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
from tests.flow.driver import event

from onward.brokers.base import State, Tries
from onward.flow.entry import ParkedRecord
from onward.flow.parking import Parking

KEYS = st.sampled_from(["a", "b", "", None])
CACHE_BYTES = 20


def ref(position: int, key: str | None, *, size: int = 0, stored: bool = True) -> ParkedRecord:
    return ParkedRecord(f"r{position}", position, key, State.HELD, 0.0, event(key, size), size, Tries(), stored)


class ParkingMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.parking = Parking(CACHE_BYTES)
        self.model: dict[int, ParkedRecord] = {}
        self.musts: set[int] = set()  # read again because their turn has come

    def kept(self) -> int:
        return sum(each.size for each in self.model.values() if each.event is not None)

    @rule(position=st.integers(0, 12), key=KEYS, size=st.integers(0, 9), stored=st.booleans())
    def add(self, position: int, key: str | None, size: int, stored: bool) -> None:
        """A new record, or a new version of a known one."""
        if position in self.model:
            key = self.model[position].key  # an event's key never changes
        each = ref(position, key, size=size, stored=stored)
        self.musts.discard(position)
        self.model[position] = each
        self.parking.add(each)
        assert each.event is not None or stored, "the only copy of an event was dropped"

    @rule(position=st.integers(0, 12))
    def remove(self, position: int) -> None:
        self.musts.discard(position)
        assert self.parking.remove(position) is self.model.pop(position, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), must=st.booleans())
    def refill(self, data: st.DataObject, must: bool) -> None:
        each = self.model[data.draw(st.sampled_from(sorted(self.model)))]
        before, room = each.event, CACHE_BYTES - self.kept()
        again = event(each.key, each.size)
        self.parking.refill(each, again, must=must)
        if before is not None:
            assert each.event is before
        else:
            assert (each.event is again) is (must or each.size <= room)
        if must and before is None:
            self.musts.add(each.position)

    @precondition(lambda self: any(not each.stored for each in self.model.values()))
    @rule(data=st.data(), drawn=st.booleans())
    def store(self, data: st.DataObject, drawn: bool) -> None:
        """A record is stored. Its event may be dropped if there is no room, unless it is in a lane."""
        unstored = sorted(each.position for each in self.model.values() if not each.stored)
        each = self.model[data.draw(st.sampled_from(unstored))]
        each.stored, each.drawn = True, drawn
        full = self.kept() > CACHE_BYTES
        self.parking.shed(each)
        assert (each.event is None) is (full and not drawn)
        if drawn:
            self.musts.add(each.position)

    @invariant()
    def records_come_back_by_position(self) -> None:
        assert self.parking.records == self.model
        assert len(self.parking) == len(self.model)
        assert {each.position for each in self.parking} == set(self.model)
        keys = {each.key for each in self.model.values()} - {None}
        assert self.parking.keys == len(keys)
        for key in ("a", "b", ""):
            of_key = sorted(each.position for each in self.model.values() if each.key == key)
            head = self.parking.head(key)
            assert (head.position if head else None) == (of_key[0] if of_key else None)
        assert self.parking.head(None) is None

    @invariant()
    def events_in_memory_are_bounded(self) -> None:
        """Only events without another copy, and those whose turn has come, may exceed the cache."""
        exempt = sum(each.size for each in self.model.values() if not each.stored or each.position in self.musts)
        assert self.kept() <= CACHE_BYTES + exempt
        assert self.parking._cached == self.kept() >= 0

    def teardown(self) -> None:
        """Once it is empty again, it holds as many events as a new one."""
        if not hasattr(self, "parking"):
            return
        for position in list(self.model):
            self.parking.remove(position)
        full, beyond = ref(1, "a", size=CACHE_BYTES), ref(2, "a", size=1)
        self.parking.add(full)
        self.parking.add(beyond)
        assert full.event is not None
        assert beyond.event is None


def test_parking_agrees_with_a_naive_dictionary() -> None:
    run_state_machine_as_test(
        ParkingMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
    )


def test_records_of_a_key_come_back_by_position_in_whatever_order_they_were_added() -> None:
    parking = Parking(1_000)
    for position in (5, 1, 9, 3, 7, 4):
        parking.add(ref(position, "a"))
    heads = []
    while (head := parking.head("a")) is not None:
        heads.append(head.position)
        parking.remove(head.position)
    assert heads == [1, 3, 4, 5, 7, 9]
    assert parking.keys == 0


def test_records_without_a_key_park_no_key() -> None:
    parking = Parking(1_000)
    parking.add(ref(1, None))
    assert (len(parking), parking.keys, parking.head(None)) == (1, 0, None)
    assert 1 in parking


def test_adding_a_record_takes_the_same_time_behind_many_and_few() -> None:
    def cost(records: int) -> float:
        parking = Parking(0)
        for position in range(records):
            parking.add(ref(position, "a"))
        start = time.process_time()
        for position in range(records, records + 5_000):
            parking.add(ref(position, "a"))
        return time.process_time() - start

    assert min(cost(100_000) for _ in range(3)) < 5 * min(cost(1_000) for _ in range(3))


def test_a_record_removed_behind_the_head_of_its_key_does_not_come_back() -> None:
    parking = Parking(1_000)
    for position in range(5):
        parking.add(ref(position, "a"))
    for position in (2, 1, 4):
        parking.remove(position)
    parking.remove(0)
    head = parking.head("a")
    assert head is not None
    assert head.position == 3
    parking.remove(3)
    assert parking.keys == 0
