"""How long a member is surely in its group, with a clock that the test controls."""

import pytest

from onward.brokers.core.session_clock import SessionClock


class Answers:
    accepted_at = answered_at = 0.0


@pytest.fixture
def answers() -> Answers:
    return Answers()


def test_no_reported_loss_extends_sure_until_if_the_client_reports_losses(answers: Answers) -> None:
    session = SessionClock(10.0, 100.0, reports_loss=True)
    for now in (101.0, 102.5, 104.5):
        session.look(now, answers)
        assert session.sure_until == now + 8.0
        assert not session.wants_proof(now)


def test_after_a_suspension_only_an_accepted_request_extends_sure_until(answers: Answers) -> None:
    """The process was stopped for longer than its session and continues. The client has not noticed that yet."""
    session = SessionClock(10.0, 100.0, reports_loss=True)
    session.look(111.0, answers)
    for now in (111.1, 112.0, 113.0):
        session.look(now, answers)
        assert session.sure_until < now
        assert session.wants_proof(now)
    answers.accepted_at = answers.answered_at = 112.0
    session.look(113.1, answers)
    assert session.sure_until == 113.1 + 8.0
    assert not session.wants_proof(113.1)


def test_a_request_sent_before_the_suspension_proves_nothing(answers: Answers) -> None:
    session = SessionClock(10.0, 100.0, reports_loss=True)
    answers.accepted_at = answers.answered_at = 100.5
    session.look(111.0, answers)
    session.look(111.1, answers)
    assert session.sure_until < 111.0
    assert session.wants_proof(111.1)


def test_after_a_suspension_an_answer_that_does_not_prove_membership_is_not_enough(answers: Answers) -> None:
    session = SessionClock(10.0, 100.0, reports_loss=False)
    session.look(111.0, answers)
    answers.answered_at = 112.0
    session.look(112.1, answers)
    assert session.sure_until < 112.1


def test_a_client_that_never_reports_a_loss_needs_answers_to_extend_sure_until(answers: Answers) -> None:
    session = SessionClock(10.0, 100.0, reports_loss=False)
    for now in (101.0, 102.0):
        session.look(now, answers)
        assert session.sure_until == 108.0
    assert not session.wants_proof(102.0)
    assert session.wants_proof(102.1)
    answers.accepted_at = answers.answered_at = 102.2
    session.look(102.5, answers)
    assert session.sure_until == 110.2
