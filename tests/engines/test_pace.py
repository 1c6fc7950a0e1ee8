"""How much a worker gets at once: enough to hide the way to it, and no more."""

from onward.engines.processes.pace import AHEAD, GLANCE_S, REST_S, Pace


def paced(run_s: float, late_s: float = 0.0) -> Pace:
    pace = Pace()
    pace.ran(run_s)
    pace.looked(late_s)
    return pace


def test_one_at_a_time_until_a_run_was_seen() -> None:
    assert Pace().window == 1


def test_ten_milliseconds_of_work_and_the_running_one() -> None:
    assert [paced(run_s).window for run_s in (1.0, 0.1, 0.005, 0.001, 0.0001)] == [1, 1, 3, 11, 101]
    assert paced(0.0).window == AHEAD


def test_more_where_the_machine_wakes_us_late_and_less_again_when_it_does_not() -> None:
    pace = paced(0.001, late_s=0.01)
    assert pace.window == 31
    for _ in range(100):
        pace.looked(0.0)
    assert pace.window == 11
    assert paced(0.001, late_s=10.0).window == 51


def test_looks_are_frequent_while_there_is_progress_and_rare_while_there_is_none() -> None:
    pace = Pace()
    pace.ran(0.001)
    assert pace.next_look_s(most=5) == GLANCE_S
    assert pace.next_look_s(most=1) == REST_S
    for _ in range(10):
        pace.looked(0.0)
    assert pace.next_look_s(most=5) == REST_S
    assert pace.resting
