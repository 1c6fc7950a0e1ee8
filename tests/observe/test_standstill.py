"""When a partition is stuck, and when it only waits."""

from typing import Any

import msgspec

from onward.observe.reading import Reading
from onward.observe.standstill import LEAST_S, Patience, Standstill
from tests.observe.readings import partition, reading

NAME = ("orders", "billing")
QUEUED: dict[str, Any] = {"blocking_state": "queued", "running": 0}


def patience(**different: Any) -> Patience:
    return Patience(**{"handler": "shop.bill", "slots": 12, "timeout_s": 30.0, "wait_s": 10.0, **different})


def watched(
    *seen: Reading, seconds: int = 60, still: Standstill | None = None, begin: float = 1000.0, **different: Any
) -> list[str]:
    """The report after `seconds` looks, one per second, at readings that repeat."""
    still = still or Standstill({NAME: patience(**different)})
    troubles: list[str] = []
    for second in range(seconds):
        troubles = still.look([seen[second % len(seen)]], begin + second)
    return troubles


def test_a_run_longer_than_its_time_limit_and_a_retry_is_stuck() -> None:
    assert watched(reading(partition(3)), seconds=40) == []
    (trouble,) = watched(reading(partition(3)), seconds=43)
    assert trouble == "shop.bill: orders/3 is stuck at position 7: running for 42 s, longer than 40 s"


def test_a_partition_that_makes_progress_again_is_no_longer_stuck() -> None:
    still = Standstill({NAME: patience()})
    assert watched(reading(partition()), still=still)
    assert watched(reading(partition(blocking_position=8)), still=still, seconds=40, begin=2000.0) == []


def test_a_stuck_run_is_reported_even_if_other_runs_make_progress() -> None:
    seen = [reading(partition(), done=n) for n in range(60)]
    assert watched(*seen)


def test_each_attempt_has_its_own_time_limit() -> None:
    still = Standstill({NAME: patience()})
    for attempt in range(1, 6):
        assert (
            watched(reading(partition(blocking_attempt=attempt)), still=still, seconds=35, begin=1000.0 + 35 * attempt)
            == []
        )


def test_a_retry_that_is_not_due_is_never_stuck() -> None:
    delayed = partition(open=1, queued=0, running=0, blocking_state="delayed")
    assert watched(reading(delayed), seconds=5_000) == []
    first = partition(open=9, queued=8, running=0, blocking_state="delayed")
    assert watched(reading(first, busy=0), seconds=5_000) == [], "the events behind it wait in their order"


def test_a_partition_without_open_events_is_not_stuck() -> None:
    idle = partition(open=0, queued=0, running=0, blocking_position=None, blocking_state=None, blocking_attempt=None)
    assert watched(reading(idle), seconds=5_000) == []


def test_a_run_without_a_time_limit_is_never_stuck() -> None:
    assert watched(reading(partition()), seconds=5_000, timeout_s=None) == []


def test_an_event_queued_behind_runs_without_a_limit_only_waits() -> None:
    assert watched(reading(partition(**QUEUED), busy=12), seconds=5_000, timeout_s=None) == []
    assert watched(reading(partition(**QUEUED), busy=0), seconds=60, timeout_s=None), "no handler runs, so it is stuck"


def test_an_event_queued_while_all_slots_work_waits_for_a_slot() -> None:
    seen = [reading(partition(**QUEUED), busy=12, done=n) for n in range(600)]
    assert watched(*seen, seconds=600) == []


def test_an_event_queued_while_slots_are_free_is_stuck() -> None:
    seen = [reading(partition(**QUEUED), busy=3, done=n) for n in range(60)]
    (trouble,) = watched(*seen)
    assert "queued for 59 s" in trouble


def test_a_queued_event_may_wait_for_a_lone_run_of_a_slower_handler() -> None:
    slow = patience(handler="shop.slow", timeout_s=300.0)
    still = Standstill({NAME: patience(), ("orders", "slow"): slow})
    assert watched(reading(partition(**QUEUED), busy=0), still=still, seconds=300) == []
    endless = patience(handler="shop.endless", timeout_s=None)
    still = Standstill({NAME: patience(), ("orders", "endless"): endless})
    readings = [reading(partition(**QUEUED), busy=0), reading(group="endless", busy=1)]
    assert [trouble for second in range(300) for trouble in still.look(readings, 1000.0 + second)] == []


def test_a_partition_whose_records_are_not_read_is_stuck() -> None:
    early = partition(running=0, blocking_position=None, blocking_state=None, blocking_attempt=None)
    (trouble,) = watched(reading(early, busy=0))
    assert "orders/0 is stuck: waiting for its records for 59 s" in trouble


def test_the_time_starts_again_for_a_partition_that_comes_back() -> None:
    still = Standstill({NAME: patience()})
    watched(reading(partition()), still=still, seconds=39)
    still.look([reading()], 1039.0)
    assert watched(reading(partition()), still=still, seconds=39, begin=1040.0) == []


def test_the_time_of_a_suspended_process_does_not_count() -> None:
    still = Standstill({NAME: patience()})
    still.look([reading(partition())], 1000.0)
    assert still.look([reading(partition())], 9000.0) == []


def test_looks_at_odd_times_count_the_time_between_them() -> None:
    still = Standstill({NAME: patience()})
    troubles = [still.look([reading(partition())], 1000.0 + 0.1 * n) for n in range(402)]
    assert troubles[399] == []
    assert troubles[401]


def test_a_short_limit_leaves_room_for_a_busy_machine() -> None:
    assert watched(reading(partition()), seconds=int(LEAST_S), timeout_s=0.1, wait_s=0.0) == []
    assert watched(reading(partition()), seconds=int(LEAST_S) + 2, timeout_s=0.1, wait_s=0.0)


def test_a_full_partition_with_more_to_read_is_stuck() -> None:
    full = partition(open=0, queued=0, running=0, blocking_position=None, blocking_state=None, blocking_attempt=None)
    full = msgspec.structs.replace(full, paused_by="max_parked", undelivered=9, parked=5)
    assert watched(reading(full, busy=0), seconds=40) == []
    (trouble,) = watched(reading(full, busy=0), seconds=60)
    assert "is stuck: paused by max_parked" in trouble
    empty = msgspec.structs.replace(full, undelivered=0)
    assert watched(reading(empty, busy=0), seconds=5_000) == [], "there is nothing to read"
