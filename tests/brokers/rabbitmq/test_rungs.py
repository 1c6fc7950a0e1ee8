"""Retries of work queues wait in rungs: which rung, how long in all, and what a message says of earlier attempts."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onward.brokers.rabbitmq.work.rungs import (
    DUE_MS,
    RUNGS_MS,
    Retrying,
    headers_of,
    parsed,
    retrying,
    rung_for,
)
from onward.event import Tries

WALL = 1_700_000_000.0


def test_the_rungs_double_from_one_second_to_4096_seconds() -> None:
    assert [ms for ms in RUNGS_MS if ms >= 1_000] == [1_000 * 2**n for n in range(13)]
    assert RUNGS_MS[-1] == 4_096_000
    assert list(RUNGS_MS) == sorted(RUNGS_MS)


@pytest.mark.parametrize(
    ("left_ms", "rung_ms"),
    [
        (0, None),
        (DUE_MS, None),
        (DUE_MS + 1, 50),
        (45, 50),
        (95, 100),
        (200, 200),
        (199, 200),
        (400, 200),
        (800, 500),
        (1_000, 1_000),
        (1_900, 2_000),  # a tenth late at most, instead of five more rungs
        (1_700, 1_000),
        (30_000, 32_000),
        (25_000, 16_000),
        (86_400_000, 4_096_000),
    ],
)
def test_the_rung_is_the_largest_that_fits(left_ms: float, rung_ms: int | None) -> None:
    assert rung_for(left_ms) == rung_ms


@given(st.floats(0, 30 * 86_400_000))
@example(1_370.0)
def test_a_wait_is_never_too_short_and_at_most_a_tenth_too_long(wait_ms: float) -> None:
    waited, hops = 0.0, 0
    while (rung_ms := rung_for(wait_ms - waited)) is not None:
        waited += rung_ms
        hops += 1
    assert waited >= wait_ms - DUE_MS
    assert waited <= max(wait_ms * 1.1, wait_ms + RUNGS_MS[0])
    assert hops <= 20 + wait_ms / RUNGS_MS[-1]


def test_a_retry_waits_until_it_is_due() -> None:
    state = retrying(Tries(failed=1), WALL + 3.0, 3.0, WALL, None)
    assert state.waits_ms(WALL) == pytest.approx(3_000)
    assert state.waits_ms(WALL + 1) == pytest.approx(2_000)
    assert state.waits_ms(WALL + 3) == 0


def test_time_in_the_work_queue_counts_as_waited() -> None:
    state = retrying(Tries(failed=1), WALL + 10.0, 10.0, WALL, None).after(8_000)
    assert state.waits_ms(WALL + 60) == 0


@given(wait_s=st.floats(0.0, 10_000.0), wrong_s=st.floats(-1e6, 1e6))
def test_no_clock_makes_a_retry_wait_longer_than_asked(wait_s: float, wrong_s: float) -> None:
    """Each member that gets it in between has a clock that is wrong by `wrong_s`."""
    state = retrying(Tries(failed=1), WALL + 86_400.0, wait_s, WALL, None)
    waited = 0.0
    while (rung_ms := rung_for(state.waits_ms(WALL + waited / 1_000 - wrong_s))) is not None:
        waited += rung_ms
        state = parsed(headers_of(state.after(rung_ms)))
    assert waited <= max(wait_s * 1_000 * 1.1, wait_s * 1_000 + RUNGS_MS[0]) + 20


def test_a_retry_without_a_due_time_is_due() -> None:
    assert retrying(Tries(), None, None, WALL, None).waits_ms(WALL) == 0
    assert retrying(Tries(), WALL - 5, None, WALL, None).waits_ms(WALL) == 0


@given(
    st.integers(0, 10**6),
    st.integers(0, 2),
    st.integers(0, 1000),
    st.floats(0, 4e9),
    st.floats(0, 1e9),
    st.none() | st.floats(1, 4e9),
)
def test_headers_carry_the_state(
    failed: int, started: int, crashes: int, due: float, left_ms: float, first: float | None
) -> None:
    state = Retrying(Tries(failed, started, crashes), due, left_ms, first)
    found = parsed(headers_of(state))
    assert found.tries == state.tries
    assert found.due == pytest.approx(due, abs=0.001)
    assert found.left_ms == pytest.approx(left_ms, abs=0.5)
    assert (found.first_failure is None) == (first is None)


@given(
    st.dictionaries(
        st.sampled_from(["onward-tries", "onward-due", "onward-first-failure"]),
        st.text("0123456789,.-einfa x", max_size=12) | st.none(),
    )
)
@example({"onward-tries": "1,2"})
@example({"onward-tries": "1,2,nan"})
@example({"onward-due": "inf,inf"})
@example({"onward-tries": "-1,0,0"})
def test_damaged_headers_make_a_retry_due(headers: dict[str, object]) -> None:
    found = parsed(headers)
    assert all(number >= 0 for number in (found.tries.failed, found.tries.started, found.tries.crashes))
    assert math.isfinite(found.due)
    assert found.waits_ms(WALL) < math.inf


@pytest.mark.parametrize("value", ["1e300,1e300", "1e11,1e300", "1.7e308,99999999999999"])
def test_no_header_makes_a_message_wait_longer_than_a_year(value: str) -> None:
    assert parsed({"onward-due": value}).waits_ms(WALL) <= 365 * 86_400_000
    assert len(headers_of(parsed({"onward-due": value}))["onward-due"]) < 40


@pytest.mark.parametrize("value", ["1e30,0,0", "0,2147483648,0", "0,0,1e300"])
def test_a_number_of_tries_that_no_integer_holds_counts_as_damaged(value: str) -> None:
    assert parsed({"onward-tries": value}).tries == Tries()


def test_a_first_failure_that_no_clock_shows_counts_as_damaged() -> None:
    assert parsed({"onward-first-failure": "1e300"}).first_failure is None
