"""The outcome of each event that was sent, from the reports and counts of the producer."""

from collections.abc import Mapping, Sequence

import pytest
from confluent_kafka import KafkaError

from onward import Event
from onward.brokers.core.publishing import Outgoing
from onward.brokers.kafka.sending import (
    BEHIND,
    KafkaOutgoing,
    SendFailure,
    Sending,
    awaits_reports,
    outcomes,
    spared_by_refusal,
    suspects,
)
from onward.event import new_id

Q, FLIGHT, LARGE = KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError.MSG_SIZE_TOO_LARGE
DENIED, SEQUENCE = KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
FULL = KafkaError._QUEUE_FULL
HERE, THERE = ("orders", 0), ("orders", 1)


def outgoing(key: str | None = "k", partition: int = 0) -> KafkaOutgoing:
    return Outgoing(Event(new_id(), "orders", key, b""), partition, 100, ())


def reported(codes: Sequence[int | None]) -> dict[int, KafkaError | None]:
    """0: there was no report."""
    return {at: None if code is None else KafkaError(code) for at, code in enumerate(codes) if code != 0}


def short(found: Mapping[int, SendFailure | None]) -> str:
    """a: accepted, ?: may be stored, s: spared, r: refused."""
    return "".join(
        "a" if each is None else "?" if each.unknown else "s" if each.spared else "r" for each in found.values()
    )


@pytest.mark.parametrize(
    ("codes", "sent", "expected"),
    [
        ([None, None, None], {}, "aaa"),
        ([None, Q, Q, Q], None, "a???"),  # unknown what was sent
        ([None, Q, Q, Q], {}, "asss"),
        ([None, Q, Q, Q], {HERE: 2}, "a??s"),  # they are sent in order
        ([None, Q, Q, Q], {HERE: 9}, "a???"),  # sent more than once
        ([None, Q, Q, Q], {THERE: 3}, "asss"),
        ([FLIGHT, FLIGHT, Q, FULL], {HERE: 2}, "??ss"),
        ([None, 0, Q], {HERE: 1}, "a?s"),
        ([None, LARGE, LARGE, SEQUENCE, Q], {HERE: 4}, "arrss"),  # a batch, one on its way, one in the queue
        ([Q, LARGE, SEQUENCE, Q], {HERE: 3}, "?rss"),  # the first waited to be sent again
        ([LARGE, SEQUENCE, LARGE], {HERE: 3}, "rss"),  # the third may not pass the second
        ([DENIED, SEQUENCE, Q], {HERE: 2}, "rrr"),
        ([SEQUENCE, Q], {HERE: 1}, "?s"),  # without a refusal before it the outcome is unknown
        ([KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND], {}, "?"),
        ([KafkaError._UNKNOWN_TOPIC], None, "s"),
    ],
)
def test_an_outcome_is_certain_or_unknown(
    codes: list[int | None], sent: dict[tuple[str, int], int] | None, expected: str
) -> None:
    items = [outgoing() for _ in codes]
    assert short(outcomes(items, range(len(items)), reported(codes), sent)) == expected


def test_a_refusal_does_not_affect_other_partitions() -> None:
    items = [outgoing(partition=n % 2) for n in range(6)]
    reports = reported([None, None, LARGE, Q, Q, Q])
    assert short(outcomes(items, range(6), reports, {HERE: 1})) == "aarsss"
    assert short(outcomes(items, range(6), reports, {HERE: 1, THERE: 1})) == "aar?ss"
    found = outcomes(items, range(6), reports, {})
    assert suspects(found) == [2]
    assert spared_by_refusal(found) == [3, 4, 5]
    assert not spared_by_refusal(outcomes(items, range(6), reported([None, None, Q, Q, Q, Q]), {}))


def test_reports_are_awaited_while_they_can_change_an_outcome() -> None:
    items = [outgoing(partition=n % 2) for n in range(4)]
    assert awaits_reports(items, range(4), reported([LARGE, 0, 0, 0]))
    assert not awaits_reports(items, range(4), reported([LARGE, Q, 0, None]))
    assert not awaits_reports(items, [0, 2], reported([LARGE, 0, 0, 0]))


def test_an_event_behind_a_failed_one_of_its_key_is_not_sent() -> None:
    sending = Sending(
        [outgoing("a"), outgoing("b"), outgoing(None), outgoing("a"), outgoing("b"), outgoing(None)], deadline=0.0
    )
    sending.outcomes = {0: SendFailure("refused"), 1: None, 2: SendFailure("refused")}
    assert sending.going([3, 4, 5]) == [4, 5]
    assert sending.outcomes[3] is BEHIND


def test_lanes_keep_a_key_in_order_and_keyless_events_apart() -> None:
    sending = Sending([outgoing("a"), outgoing(None), outgoing("b"), outgoing("a"), outgoing(None)], deadline=0.0)
    assert [list(lane) for lane in sending.lanes([0, 1, 2, 3, 4])] == [[0, 3], [1], [2], [4]]
