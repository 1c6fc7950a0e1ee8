"""How much work a worker gets at once: enough to hide the latency of the socket, and not more."""

from onward.engines.processes.pace import AHEAD, GLANCE_S, REST_S, Pace


def paced(run_s: float, late_s: float = 0.0) -> Pace:
    pace = Pace()
    pace.ran(run_s)
    pace.looked(late_s)
    return pace


def test_the_window_is_one_until_a_run_has_ended() -> None:
    assert Pace().window == 1


def test_the_window_is_ten_milliseconds_of_work_and_the_running_event() -> None:
    assert [paced(run_s).window for run_s in (1.0, 0.1, 0.005, 0.001, 0.0001)] == [1, 1, 3, 11, 101]
    assert paced(0.0).window == AHEAD


def test_the_window_grows_while_the_timer_is_late_and_shrinks_again() -> None:
    pace = paced(0.001, late_s=0.01)
    assert pace.window == 31
    for _ in range(100):
        pace.looked(0.0)
    assert pace.window == 11
    assert paced(0.001, late_s=10.0).window == 51


def test_checks_are_frequent_while_there_is_progress_and_rare_otherwise() -> None:
    pace = Pace()
    pace.ran(0.001)
    assert pace.next_look_s(most=5) == GLANCE_S
    assert pace.next_look_s(most=1) == REST_S
    for _ in range(10):
        pace.looked(0.0)
    assert pace.next_look_s(most=5) == REST_S
    assert pace.resting
