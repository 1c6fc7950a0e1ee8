"""Which calls the relay makes, and what an error of the broker means for each row."""

import asyncio
from collections.abc import Callable, Sequence

from onward.brokers.base import Relay as RelayTag
from onward.errors import Backlogged, BrokerError, PartitionsDiffer, PublishError, RelayFenced, TooLarge
from onward.event import Event
from onward.outbox.base import OutboxRow
from onward.outbox.sending import BEHIND, Route, SendResult, send

TAGS = {0: ("box/0", 5), 1: ("box/1", 6)}


def row(id_: int, key: str | None = "a", *, topic: str = "orders", shard: int = 0, fault: str = "") -> OutboxRow:
    return OutboxRow(id_, shard, Event(f"e{id_}", topic, key, b"x" * id_), fault)


class Scripted:
    """A broker's publish that raises what `error` returns for the events of a call."""

    def __init__(self, error: Callable[[Sequence[Event]], BaseException | None] = lambda events: None) -> None:
        self.calls: list[tuple[list[str], RelayTag | None]] = []
        self._error = error

    async def __call__(self, events: Sequence[Event], *, relay: RelayTag | None = None) -> None:
        self.calls.append(([event.id for event in events], relay))
        if error := self._error(events):
            raise error

    @property
    def accepted(self) -> list[list[str]]:
        return [ids for ids, _ in self.calls]


def sent(
    rows: Sequence[OutboxRow], publish: Scripted, *, tags: bool = False, by_topic: bool = False
) -> tuple[dict[int, tuple[str, bool]], SendResult]:
    result = asyncio.run(send(rows, Route(publish, TAGS if tags else {}, by_topic)))
    return {failure.row.id: (failure.why, failure.refused) for failure in result.failed}, result


def test_all_rows_go_in_one_call_if_the_broker_checks_no_fences() -> None:
    publish = Scripted()
    assert sent([row(1), row(2, "b", shard=1), row(3)], publish)[0] == {}
    assert publish.calls == [(["e1", "e2", "e3"], None)]


def test_every_shard_has_its_own_call_with_its_fence() -> None:
    publish = Scripted()
    sent([row(1), row(2, "b", shard=1), row(3)], publish, tags=True)
    assert sorted(publish.calls) == [(["e1", "e3"], ("box/0", 5)), (["e2"], ("box/1", 6))]


def test_a_call_can_be_split_by_topic() -> None:
    publish = Scripted(lambda events: Backlogged("full", refused=events) if events[0].topic == "full" else None)
    failed, _ = sent([row(1, topic="full"), row(2, topic="free"), row(3, topic="full")], publish, by_topic=True)
    assert failed == {1: ("full", False), 3: ("full", False)}


def test_only_the_refused_and_unknown_events_of_a_publish_error_fail() -> None:
    publish = Scripted(lambda events: PublishError("lost", refused=events[1:2], unknown=events[2:3]))
    failed, _ = sent([row(1), row(2, "b"), row(3, "c"), row(4, "d")], publish)
    assert failed == {2: ("lost", False), 3: ("lost", False)}


def test_an_event_that_is_too_large_is_found_and_the_others_are_published() -> None:
    publish = Scripted(lambda events: TooLarge("5 is too large") if any(e.id == "e5" for e in events) else None)
    rows = [row(number, f"k{number % 4}") for number in range(1, 10)]
    failed, _ = sent(rows, publish)
    assert failed == {5: ("5 is too large", True), 9: (BEHIND, False)}
    ids = [each for ids in publish.accepted if "e5" not in ids for each in ids]
    assert ids == ["e1", "e2", "e3", "e4", "e6", "e7", "e8"]


def test_a_bad_topic_name_and_a_faulty_row_are_refused_without_a_call() -> None:
    publish = Scripted()
    failed, _ = sent([row(1, topic="no spaces"), row(2, "b", fault="bad headers"), row(3, "b")], publish)
    assert failed[1][1]
    assert "no spaces" in failed[1][0]
    assert failed[2] == ("bad headers", True)
    assert failed[3] == (BEHIND, False)
    assert publish.calls == []


def test_an_unreachable_broker_and_other_settings_only_make_rows_wait() -> None:
    for error in (BrokerError("down"), PartitionsDiffer("8, not 4"), OSError("no route"), TimeoutError()):
        failed, _ = sent([row(1), row(2, "b")], Scripted(lambda events, error=error: error))  # type: ignore[misc]
        assert failed.keys() == {1, 2}
        assert not any(refused for _, refused in failed.values())


def test_a_fenced_shard_is_reported_with_the_fence_that_was_seen() -> None:
    publish = Scripted(lambda events: RelayFenced("fenced", refused=events, seen=9) if events[0].id == "e1" else None)
    failed, result = sent([row(1), row(2, "b", shard=1)], publish, tags=True)
    assert failed == {}
    assert result.fenced == {0: 9}


def test_a_client_that_cancels_its_own_work_only_makes_rows_wait() -> None:
    failed, _ = sent([row(1)], Scripted(lambda events: asyncio.CancelledError()))
    assert failed == {1: ("CancelledError", False)}


def test_a_reason_can_be_stored_in_every_database() -> None:
    text = "bad\0text \ud800" + "x" * 10_000
    failed, _ = sent([row(1)], Scripted(lambda events: TooLarge(text)))
    why, refused = failed[1]
    assert refused
    assert "\0" not in why
    assert why.encode()
    assert len(why) <= 2_000
