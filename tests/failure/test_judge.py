"""What happens to an event after an error."""

import logging
from typing import Any

import pytest

from onward import GiveUp, Retry, RetryLater, Skip
from onward.error_report import harmless
from onward.errors import Expired, RemoteError, Undecodable, WorkerDied
from onward.event import Delivery, Event, Partition
from onward.failure import trace
from onward.failure.judge import ErrorJudge, Ruling
from onward.flow.entry import DONE, Again, Dead, Instant
from onward.testing.engine_handlers import ERRORS, Masked

AT = Instant(now=100.0, wall=1_700_000_000.0)


def rule(error: BaseException, *, attempt: int = 1, attempts: int = 3) -> Ruling:
    judge = ErrorJudge("shop.bill", Retry(attempts=attempts, first_delay_s=2, give_up_on=(KeyError,)), lambda: 0.5)
    event = Event("id-1", "orders", "c-1", b"{}")
    return judge.rule(Delivery(event, Partition("orders", 3), 17, 1, attempt), error, AT)


def test_a_failed_event_is_retried_after_the_wait_of_the_policy() -> None:
    outcome, level, text, _ = rule(ValueError("no stock"))
    assert isinstance(outcome, Again)
    assert (outcome.at, outcome.crashed) == (102.1, False)
    story = outcome.failure
    assert (story.reason, story.error, story.message, story.attempts) == ("failed", "ValueError", "no stock", 1)
    assert level == logging.WARNING
    assert text == ("shop.bill: orders/3 position 17 key 'c-1' failed, attempt 1, again in 2.1 s: ValueError: no stock")


def test_the_death_of_a_worker_is_charged_to_its_event() -> None:
    outcome = rule(WorkerDied("signal 9")).outcome
    assert isinstance(outcome, Again)
    assert (outcome.at, outcome.crashed) == (102.1, True)


def test_a_handler_sets_its_own_wait() -> None:
    outcome = rule(RetryLater(60)).outcome
    assert isinstance(outcome, Again)
    assert outcome.at == 160.0


def test_a_skipped_event_counts_as_handled() -> None:
    outcome, level, text, _ = rule(Skip("a test order"))
    assert outcome is DONE
    assert level == logging.INFO
    assert text.endswith("was skipped: a test order")


@pytest.mark.parametrize(
    ("error", "attempt", "reason", "attempts"),
    [
        (ValueError("no stock"), 3, "exhausted", 3),
        (RetryLater(1), 3, "exhausted", 3),
        (GiveUp("no such customer"), 1, "refused", 1),
        (KeyError("id"), 2, "refused", 2),
        (Undecodable("the value cannot be decoded as Order"), 1, "undecodable", 1),
        (Expired("its time was over"), 2, "expired", 1),  # the second attempt was not made
        (WorkerDied("signal 9"), 3, "crashed", 3),
    ],
)
def test_a_dead_letter_has_a_reason_and_its_failure(error: Exception, attempt: int, reason: str, attempts: int) -> None:
    outcome = rule(error, attempt=attempt).outcome
    assert isinstance(outcome, Dead)
    story = outcome.failure
    assert (story.reason, story.attempts, story.handler) == (reason, attempts, "shop.bill")
    assert (story.error, story.message) == (type(error).__name__, str(error))
    assert type(error).__name__ in story.traceback
    assert story.first == story.last == AT.wall


def test_the_traceback_contains_the_cause_of_a_decision() -> None:
    try:
        try:
            raise ConnectionError("the bank is closed")
        except ConnectionError as cause:
            raise GiveUp("no bank") from cause
    except GiveUp as error:
        outcome = rule(error).outcome
    assert isinstance(outcome, Dead)
    assert "the bank is closed" in outcome.failure.traceback


@pytest.mark.parametrize("name", ["Masked", "Nameless", "Vague"])
def test_an_error_that_raises_when_it_is_read_is_a_failure(name: str) -> None:
    error = ERRORS[name]()
    outcome = rule(harmless(error)).outcome
    assert isinstance(outcome, Again)
    assert outcome.failure.error == name
    last = rule(harmless(error), attempt=3).outcome
    assert isinstance(last, Dead)
    assert (last.failure.reason, last.failure.error) == ("exhausted", name)
    assert name in last.failure.traceback


def test_every_error_gets_a_ruling() -> None:
    outcome, level, text, _ = rule(Masked())
    assert isinstance(outcome, Dead)
    assert level == logging.ERROR
    assert "Masked cannot be read" in text


def test_a_long_traceback_is_cut_in_the_middle_and_can_be_stored() -> None:
    outcome = rule(ValueError("a" * 50_000 + "\ud800"), attempt=3).outcome
    assert isinstance(outcome, Dead)
    message = outcome.failure.message
    assert len(message) < 21_000
    assert message.endswith("\\ud800")
    assert "…" in message


def test_the_methods_of_an_error_may_raise_anything() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise SystemExit(3)

    ruling = rule(Rude(), attempts=1)
    assert isinstance(ruling.outcome, Dead)
    assert ruling.outcome.failure.message == "its text cannot be read: SystemExit"


def test_the_log_line_of_an_error_is_short_and_without_control_characters() -> None:
    ruling = rule(ValueError("\x1b[2J\n" + "x" * 900), attempts=1)
    assert ruling.text.isprintable()
    assert len(ruling.text) < 700


def raised(error: Exception) -> Exception:
    """The error with a traceback of two frames: one of this package, in place of the engine, and one of the handler."""
    names: dict[str, Any] = {}
    exec(compile("def run(step): step()", trace.__file__, "exec"), names)

    def handler() -> None:
        raise error

    try:
        names["run"](handler)
    except type(error) as caught:
        return caught
    raise AssertionError


@pytest.mark.parametrize("attempt", [1, 3])
def test_the_log_shows_where_it_failed_in_the_users_code(attempt: int) -> None:
    text = rule(raised(ValueError("no stock")), attempt=attempt).trace
    assert "test_judge.py" in text
    assert "raise error" in text
    assert trace.__file__ not in text
    assert "\x1b" not in rule(raised(ValueError("\x1b[2J")), attempt=attempt).trace
    assert all(line.startswith("    ") for line in text.splitlines())


def test_the_log_shows_where_it_failed_in_another_process() -> None:
    error = RemoteError("ValueError", "no stock", ["builtins.ValueError"], "Traceback\n  File far.py\nValueError: \x07")
    assert rule(error).trace == "    Traceback\n      File far.py\n    ValueError: \\x07"


def test_the_log_shows_the_cause_too_and_a_deep_recursion_in_a_few_lines() -> None:
    def fall(steps: int) -> None:
        if not steps:
            raise KeyError("id")
        if steps % 2:
            fall(steps - 1)
        else:
            fall(steps - 1)

    try:
        fall(300)
    except KeyError as cause:
        error = ValueError("no order")
        error.__cause__ = cause
    text = rule(raised(error)).trace
    assert "KeyError: 'id'" in text
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize(
    "error", [Skip("a test"), RetryLater(1), GiveUp("no"), Expired("late"), WorkerDied("signal 9")]
)
def test_a_decision_of_the_handler_is_logged_without_a_traceback(error: Exception) -> None:
    assert rule(raised(error)).trace == ""
