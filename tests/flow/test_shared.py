"""Partitions that several members hold at once: each event goes to one member, and retries arrive as deliveries."""

import pytest
from tests.flow.driver import FAR_S, LOG, Driver, P, failure, record

from onward.brokers.base import Assigned, Moved, State, Tries, record_id
from onward.flow.entry import Again


def sharing(**limits: object) -> Driver:
    driver = Driver(ordering="none", **limits)
    driver.share()
    return driver


def fresh(d: Driver) -> list[int]:
    """Positions reported as newly done, in order."""
    return [position for settlement in d.settlements for progress in settlement.progress for position in progress.fresh]


def test_a_shared_partition_starts_without_reading_records() -> None:
    d = Driver(ordering="none")
    d.plane.assigned(Assigned(P, 1, None, LOG, None, False, shared=True))
    d._begin(P, 1, None)
    d.deliver("a", turn=False)
    actions = d.tick()
    assert (list(actions.load), d.running()) == ([], [0])


@pytest.mark.parametrize("in_s", [0.0, 1.0, FAR_S])
def test_a_retry_is_stored_and_forgotten(in_s: float) -> None:
    """Also an immediate retry: another member may get it, with its tries."""
    d = sharing()
    d.deliver("a")
    d.again(0, in_s=in_s)
    assert (d.states(), fresh(d)) == ({0: State.WAITING}, [0])
    assert d.letter(0).tries == Tries(1)
    assert (d.plane.open, d.lag().parked) == (0, 0)
    d.wait(2 * FAR_S)
    assert (d.running(), d.states()) == ([], {0: State.WAITING})


def test_a_retry_arrives_as_a_delivery_with_its_tries() -> None:
    d = sharing()
    d.deliver_at({0: "a"}, tries=Tries(2))
    assert [each.attempt for each in d.starts] == [3]
    d.again(0)
    assert d.letter(0).tries == Tries(3)


def test_a_retry_that_killed_its_workers_too_often_is_dead() -> None:
    d = sharing(crash_limit=2)
    d.deliver_at({0: "a"}, tries=Tries(2, 0, 2))
    assert (d.running(), d.states()) == ([], {0: State.DEAD})


def test_a_retry_that_killed_its_worker_runs_alone() -> None:
    d = sharing()
    d.deliver("a")
    d.deliver_at({1: "b"}, tries=Tries(1, 0, 1))
    assert d.running() == [0]
    d.done(0)
    assert d.running() == [1]


def test_until_a_retry_is_stored_its_event_is_open() -> None:
    d = sharing()
    d.store_down = True
    d.deliver("a", "b")
    d.again(0, in_s=1.0)
    d.done(1)
    assert (fresh(d)[-1], d.lag().queued) == (1, 1)
    d.store_down = False
    d.wait(2)
    assert (d.states(), d.plane.open) == ({0: State.WAITING}, 0)


def test_a_dead_letter_is_stored_as_usual() -> None:
    d = sharing()
    d.deliver("a")
    d.dead(0)
    assert (d.states(), fresh(d), d.plane.open) == ({0: State.DEAD}, [0], 0)


def test_a_position_that_was_done_in_an_earlier_ownership_is_another_event() -> None:
    d = sharing()
    d.deliver("a", "b")
    d.done(0)
    d.again(1, in_s=FAR_S)
    d.share()
    d.deliver("c", "d")
    assert d.running() == [0, 1]


def test_a_position_that_still_runs_from_an_earlier_ownership_is_another_event() -> None:
    d = sharing()
    d.deliver("a")
    d.share()
    d.deliver("b")
    assert [run[1:] for run in d.runs] == [(1, 0), (2, 0)]
    d.end({0: Again(d.now, failure())}, epoch=1)
    assert d.states() == {}
    d.done(0)
    assert fresh(d) == [0]


def test_moves_by_an_operator_are_ignored_in_a_shared_partition() -> None:
    d = sharing()
    d.records[record(5, "a").id] = record(5, "a", State.WAITING)
    d.plane.moved(Moved(P, d.owned[P], [record_id("g", LOG, P, 5)], State.WAITING, 0.0), d.at)
    d.turn()
    assert (d.loads, d.running()) == ([], [])


def test_a_shared_partition_is_released_once_its_runs_are_settled() -> None:
    d = sharing()
    d.deliver("a", "b")
    d.again(0, in_s=FAR_S)
    d.revoke(P)
    assert d.drained == []
    d.done(1)
    assert (d.drained, fresh(d)) == ([P], [0, 1])
