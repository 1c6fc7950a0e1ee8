"""Until when a member of a Kafka group is sure, by a clock that is moved by hand."""

import pytest

from onward.brokers.kafka.contact import Contact


class Answers:
    taken_at = heard_at = 0.0


@pytest.fixture
def answers() -> Answers:
    return Answers()


def test_while_we_are_awake_the_silence_of_the_classic_client_is_an_answer(answers: Answers) -> None:
    contact = Contact(10.0, 100.0, told=True)
    for now in (101.0, 102.5, 104.5):
        contact.look(now, answers)
        assert contact.sure_until == now + 8.0
        assert not contact.wants_proof(now)


def test_after_a_sleep_it_is_none_until_a_commit_is_taken(answers: Answers) -> None:
    """A member that was stopped for longer than its session goes on: its client has not noticed yet."""
    contact = Contact(10.0, 100.0, told=True)
    contact.look(111.0, answers)
    for now in (111.1, 112.0, 113.0):
        contact.look(now, answers)
        assert contact.sure_until < now
        assert contact.wants_proof(now)
    answers.taken_at = answers.heard_at = 112.0
    contact.look(113.1, answers)
    assert contact.sure_until == 113.1 + 8.0
    assert not contact.wants_proof(113.1)


def test_what_was_sent_before_the_sleep_proves_nothing(answers: Answers) -> None:
    contact = Contact(10.0, 100.0, told=True)
    answers.taken_at = answers.heard_at = 100.5
    contact.look(111.0, answers)
    contact.look(111.1, answers)
    assert contact.sure_until < 111.0
    assert contact.wants_proof(111.1)


def test_an_answer_that_tells_nothing_of_the_group_does_not_end_the_doubt(answers: Answers) -> None:
    contact = Contact(10.0, 100.0, told=False)
    contact.look(111.0, answers)
    answers.heard_at = 112.0
    contact.look(112.1, answers)
    assert contact.sure_until < 112.1


def test_the_modern_client_is_not_taken_at_its_silence(answers: Answers) -> None:
    contact = Contact(10.0, 100.0, told=False)
    for now in (101.0, 102.0):
        contact.look(now, answers)
        assert contact.sure_until == 108.0
    assert not contact.wants_proof(102.0)
    assert contact.wants_proof(102.1)
    answers.taken_at = answers.heard_at = 102.2
    contact.look(102.5, answers)
    assert contact.sure_until == 110.2
