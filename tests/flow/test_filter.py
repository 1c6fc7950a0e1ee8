"""Events of a type that the handler filters out: done at intake, without a lane, a record or a run."""

from typing import Any

from onward.brokers.base import AsideRecord, Assigned, Progress, State, Tries, record_id
from onward.event import Delivery, Event, Partition
from onward.flow.actions import Actions, LoadPage
from onward.flow.entry import DONE, Instant
from onward.flow.limits import Limits
from onward.flow.plane import ControlPlane

P = Partition("orders", 0)
AT = Instant(1.0, 1.0)


def event(key: str, type_: str) -> Event:
    return Event("id", "orders", key, b"", {}, type_)


def plane(stored: Progress | None = None, **limits: Any) -> ControlPlane:
    plane = ControlPlane(
        Limits(group="g", settle_interval_s=0.0, wants=lambda type_: type_.startswith("order."), **limits)
    )
    plane.assigned(Assigned(P, 1, 1, "log", stored, False))
    plane.tick(AT, 9.0)
    return plane


def deliver(plane: ControlPlane, *types: str, first: int = 0, key: str = "a") -> None:
    plane.delivered([Delivery(event(key, each), P, first + n, 1) for n, each in enumerate(types)], AT)


def works(actions: Actions) -> list[int]:
    return [each.position for each in actions.work if isinstance(each, Delivery)]


def settled(plane: ControlPlane, actions: Actions) -> Progress:
    assert actions.settle is not None
    plane.settled([], AT)
    return actions.settle.progress[0]


def test_filtered_events_are_done_at_intake_and_the_rest_keep_their_order() -> None:
    p = plane()
    p.loaded(LoadPage(P, 1, None), [], AT)
    deliver(p, "order.placed", "mail.sent", "order.paid", "mail.read")
    actions = p.tick(AT, 9.0)
    assert works(actions) == [0]
    progress = settled(p, actions)
    assert (progress.watermark, list(progress.done_above)) == (0, [(1, 2), (3, 4)])
    assert list(progress.fresh) == [1, 3]
    p.completed([(work, DONE) for work in actions.work if isinstance(work, Delivery)], AT)
    actions = p.tick(AT, 9.0)
    assert works(actions) == [2]
    p.completed([(work, DONE) for work in actions.work if isinstance(work, Delivery)], AT)
    assert settled(p, p.tick(Instant(2.0, 2.0), 9.0)).watermark == 4
    assert (p.counts.delivered, p.counts.filtered, p.counts.done, p.counts.skipped) == (4, 2, 2, 0)


def test_a_log_of_only_filtered_events_is_passed_without_a_slot() -> None:
    p = plane(concurrency=1)
    p.loaded(LoadPage(P, 1, None), [], AT)
    deliver(p, *["mail.sent"] * 500)
    actions = p.tick(AT, 9.0)
    assert not actions.work
    assert settled(p, actions).watermark == 500
    assert p.open == 0


def test_events_delivered_before_the_records_were_loaded_are_filtered_after_that() -> None:
    p = plane()
    deliver(p, "mail.sent", "order.placed")
    assert p.counts.filtered == 0
    p.loaded(LoadPage(P, 1, None), [], AT)
    assert works(p.tick(AT, 9.0)) == [1]
    assert (p.counts.delivered, p.counts.filtered) == (2, 1)


def test_a_filtered_event_is_not_held_behind_a_parked_key() -> None:
    p = plane()
    waiting = AsideRecord(
        record_id("g", "log", P, 0), "g", P, 0, State.WAITING, 1e9, event("a", "order.placed"), Tries(1), None
    )
    p.loaded(LoadPage(P, 1, None), [waiting], AT)
    p.tick(AT, 9.0)
    p.loaded(LoadPage(P, 1, 0), [], AT)
    deliver(p, "order.placed", "mail.sent", "order.paid")
    actions = p.tick(AT, 9.0)
    assert actions.settle is not None
    assert [(record.position, record.state) for record in actions.settle.aside] == [(2, State.HELD)]
    assert actions.settle.progress[0].watermark == 3
    assert p.counts.filtered == 1


def test_a_record_whose_type_is_now_filtered_still_runs() -> None:
    p = plane(Progress(P, 0, 5))
    held = AsideRecord(record_id("g", "log", P, 3), "g", P, 3, State.HELD, None, event("a", "mail.sent"), Tries(), None)
    p.loaded(LoadPage(P, 1, None), [held], AT)
    p.tick(AT, 9.0)
    p.loaded(LoadPage(P, 1, 3), [], AT)
    assert works(p.tick(AT, 9.0)) == [3]


def test_an_event_done_before_is_not_counted_as_filtered_again() -> None:
    p = plane(Progress(P, 0, 1))
    p.loaded(LoadPage(P, 1, None), [], AT)
    deliver(p, "mail.sent", "mail.sent")
    p.tick(AT, 9.0)
    assert (p.counts.filtered, p.counts.skipped) == (1, 1)
