import pytest

from onward import GiveUp, OnwardError, Retry, RetryLater


def test_waits_grow_to_the_cap_and_end() -> None:
    retry = Retry(attempts=6, first_delay_s=1, factor=2, max_delay_s=5, jitter=0)
    assert [retry.delay_s(n, ValueError(), lambda: 0.0) for n in range(1, 7)] == [1, 2, 4, 5, 5, None]


def test_jitter_only_lengthens() -> None:
    retry = Retry(first_delay_s=10, jitter=0.5)
    assert retry.delay_s(1, ValueError(), lambda: 0.0) == 10
    assert retry.delay_s(1, ValueError(), lambda: 1.0) == 15
    assert retry.delay_s(4, ValueError(), lambda: 1.0) == retry.longest_s == 90


def test_only_the_errors_of_the_policy_are_retried() -> None:
    retry = Retry(on=(OSError, ValueError), give_up_on=(ConnectionError,))
    assert retry.delay_s(1, ValueError(), lambda: 0.0) is not None
    assert retry.delay_s(1, TypeError(), lambda: 0.0) is None
    assert retry.delay_s(1, ConnectionResetError(), lambda: 0.0) is None


def test_a_thousand_attempts_do_not_overflow() -> None:
    assert Retry(attempts=10_000).delay_s(9_999, ValueError(), lambda: 0.0) == 60


@pytest.mark.parametrize(
    "field",
    [
        {"attempts": 0},
        {"factor": 0.5},
        {"first_delay_s": -1},
        {"jitter": -0.1},
        {"immediate": -1},
        {"first_delay_s": float("nan")},
    ],
)
def test_a_policy_that_cannot_work_is_refused(field: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        Retry(**field)  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [[ValueError], ValueError, (ValueError, "OSError")])
def test_error_classes_must_be_a_tuple(kinds: object) -> None:
    with pytest.raises(ValueError, match="tuple of exception classes"):
        Retry(on=kinds)  # type: ignore[arg-type]


def test_the_first_retries_may_happen_at_once() -> None:
    retry = Retry(attempts=6, immediate=2, first_delay_s=1, factor=2, jitter=0)
    assert [retry.delay_s(n, ValueError(), lambda: 0.0) for n in range(1, 7)] == [0, 0, 1, 2, 4, None]


def test_a_handler_may_set_the_wait_but_not_the_number_of_attempts() -> None:
    retry = Retry(attempts=3, max_delay_s=5, give_up_on=(OnwardError,), on=(OSError,))
    assert [retry.delay_s(n, RetryLater(90), lambda: 1.0) for n in (1, 2, 3)] == [90, 90, None]


def test_a_handler_may_give_up() -> None:
    assert Retry().delay_s(1, GiveUp("no such customer"), lambda: 0.0) is None


@pytest.mark.parametrize("after_s", [-1, float("nan"), float("inf")])
def test_an_invalid_wait_is_refused_where_it_is_raised(after_s: float) -> None:
    with pytest.raises(ValueError, match="seconds from now"):
        RetryLater(after_s)


@pytest.mark.parametrize(
    ("retry", "longest_s"),
    [
        (Retry(attempts=1), 0.0),
        (Retry(attempts=3, immediate=2), 0.0),
        (Retry(attempts=2, jitter=0.5), 1.5),
        (Retry(attempts=4, immediate=1, jitter=0), 2.0),
        (Retry(attempts=100, jitter=0), 60.0),
    ],
)
def test_the_longest_wait_is_the_last_one(retry: Retry, longest_s: float) -> None:
    waits = [retry.delay_s(attempt, ValueError(), lambda: 1.0) for attempt in range(1, retry.attempts)]
    assert retry.longest_s == max([wait for wait in waits if wait is not None], default=0.0) == longest_s
