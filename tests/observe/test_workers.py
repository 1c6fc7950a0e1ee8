"""The reports of several workers combined into one."""

from typing import Any

import pytest

from onward.observe.health import Health
from onward.observe.metrics import Family, Sample
from onward.observe.workers import HUNG_S, SILENT_S, Report, Workers
from tests.observe.readings import reading
from tests.observe.test_metrics import parsed

LABELS = "[('group', 'billing'), ('topic', 'orders')]"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def workers(clock: Clock) -> Workers:
    workers = Workers(2, clock)
    workers.started(1)
    workers.started(2)
    return workers


def report(*troubles: str, **different: Any) -> Report:
    took = Family("took", "histogram", "", (), (Sample((), 1.0, (1, 0)),), bounds=(1.0,))
    return Report(Health(not troubles, troubles), (reading(**different),), (took,), "shop")


def both(workers: Workers, **different: Any) -> None:
    workers.reported(1, report(**different))
    workers.reported(2, report(**different))


def test_it_is_ready_when_every_worker_is(workers: Workers) -> None:
    assert workers.health() == Health(False, ("worker 1 is starting", "worker 2 is starting"))
    workers.reported(1, report())
    workers.reported(2, report("the disk is full"))
    assert workers.health() == Health(False, ("worker 2: the disk is full",))
    workers.reported(2, report())
    assert workers.health() == Health(True)


def test_a_dead_worker_is_not_ready_until_its_replacement_is(workers: Workers) -> None:
    both(workers)
    workers.ended(2)
    assert workers.health().troubles == ("worker 2 is not running; another one will be started",)
    workers.started(2)
    assert workers.health().troubles == ("worker 2 is starting",)
    workers.reported(2, report())
    assert workers.health().ready


def test_a_worker_that_stops_reporting_is_logged_once(workers: Workers, clock: Clock) -> None:
    both(workers)
    assert workers.news() == []
    clock.now += SILENT_S + 1
    workers.reported(2, report())
    assert workers.news() == ["not ready: worker 1 has not reported for 5 s"]
    clock.now += 1
    assert workers.news() == []
    workers.reported(1, report())
    assert workers.news() == ["worker 1 reports again, or was replaced"]
    assert workers.news() == []


def test_a_silent_worker_is_not_ready_and_its_gauges_are_left_out(workers: Workers, clock: Clock) -> None:
    both(workers, open=3, done=10)
    clock.now += SILENT_S + 1
    workers.reported(1, report(open=3, done=10))
    assert workers.health().troubles == ("worker 2 has not reported for 6 s",)
    values = parsed(workers.metrics())
    assert values[f"shop_lag_open{LABELS}"] == 3
    assert values[f"shop_events_done_total{LABELS}"] == 20
    assert [each.worker for each in workers.readings()] == [1]


def test_it_is_live_while_one_worker_is(workers: Workers, clock: Clock) -> None:
    assert workers.live().ready, "they are starting"
    both(workers)
    clock.now += HUNG_S + 1
    workers.tended()
    assert workers.live() == Health(False, ("no worker has reported for 30 s",))
    workers.reported(1, report())
    assert workers.live().ready
    clock.now += HUNG_S + 1
    workers.tended()
    workers.ended(2)
    assert workers.live().ready, "the supervisor is about to replace it"


def test_a_supervisor_that_hangs_is_not_live(workers: Workers, clock: Clock) -> None:
    clock.now += HUNG_S + 1
    both(workers)
    assert workers.live() == Health(False, ("the supervisor hangs",))


def test_counters_never_fall_and_gauges_are_those_of_running_workers(workers: Workers) -> None:
    both(workers, done=10, open=4, blocked_s=2.0, restarted=0)
    values = parsed(workers.metrics())
    assert values[f"shop_events_done_total{LABELS}"] == 20
    assert values[f"shop_lag_open{LABELS}"] == 8
    assert values[f"shop_lag_blocked_seconds{LABELS}"] == 2
    workers.ended(1)
    workers.started(1)
    values = parsed(workers.metrics())
    assert values[f"shop_events_done_total{LABELS}"] == 20
    assert values["shop_took_count[]"] == 2
    assert values[f"shop_lag_open{LABELS}"] == 4
    workers.reported(1, report(done=5, open=1))
    values = parsed(workers.metrics())
    assert values[f"shop_events_done_total{LABELS}"] == 25
    assert values["shop_took_count[]"] == 3
    assert values[f"shop_lag_open{LABELS}"] == 5


def test_readings_have_the_number_of_their_worker(workers: Workers) -> None:
    both(workers)
    assert [(each.worker, each.topic) for each in workers.readings()] == [(1, "orders"), (2, "orders")]


def test_a_family_has_the_shape_of_the_worker_that_started_last(workers: Workers, clock: Clock) -> None:
    """For example when a reload changes the bounds of a histogram while an old worker still drains."""
    finer = Family("took", "histogram", "", (), (Sample((), 1.0, (0, 1, 0)),), bounds=(0.5, 1.0))
    both(workers)
    workers.ended(1)
    clock.now += 1
    workers.started(1)
    workers.reported(1, Report(Health(True), (), (finer,), "shop"))
    assert parsed(workers.metrics())["shop_took_bucket[('le', '0.5')]"] == 0
    workers.ended(2)
    workers.started(2)
    workers.reported(2, Report(Health(True), (), (finer,), "shop"))
    values = parsed(workers.metrics())
    assert values["shop_took_count[]"] == 2
    assert values[f"shop_events_done_total{LABELS}"] == 2 * 12_345, "other families still count"
    workers.ended(1)
    assert parsed(workers.metrics())["shop_took_count[]"] == 2
