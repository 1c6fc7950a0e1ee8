"""What the page shows of a poisoned customer, from handmade news."""

import time
from pathlib import Path

import pytest

from onward.demo import follow
from onward.demo.follow import FollowedOrders
from onward.demo.judge import Effect, Judge, News, Published
from onward.demo.shop import ATTEMPTS, OrderPlaced
from onward.demo.view import Log
from tests.demo.test_judge import Books

POISON = OrderPlaced(10, "c-1", 5, 100, 0.0, poison=True)


class Desk:
    def __init__(self, judge: Judge) -> None:
        self.log = Log()
        self.followed = FollowedOrders(self.log, lambda attempt: 2.0 * attempt)
        self._judge = judge
        self._seq = 0

    def publish(self, *orders: tuple[int, str, int]) -> None:
        self.followed.take(News([Published(*order) for order in orders], []), self._judge)

    def run(self, number: int, *, attempt: int = 1, done: bool = True) -> None:
        self._seq += 1
        effect = Effect(self._seq, time.time(), 1, 1, number, "c-1", number - 5, attempt, 0.0, done, done)
        self.followed.take(News([], [effect]), self._judge)

    def show(self) -> dict[str, object]:
        (shown,) = self.followed.snapshot(lambda _: 3)
        return dict(shown)

    def lines(self) -> str:
        return "\n".join(text for *_, text in self.log.lines())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    Books(tmp_path)
    return Desk(Judge(tmp_path))


def test_a_poisoned_customer_waits_and_its_later_orders_are_held(desk: Desk) -> None:
    desk.followed.add_poison(POISON, 2)
    desk.publish((11, "c-1", 6), (12, "c-2", 1), (13, "c-1", 7))
    desk.run(10, done=False)
    shown = desk.show()
    assert (shown["customer"], shown["partition"], shown["state"], shown["failed"]) == ("c-1", 3, "waiting", 1)
    assert shown["orders"] == [(6, False), (7, False)]
    assert shown["held"] == 2
    assert shown["wait_s"] == 2.0
    assert 0.0 < float(str(shown["next_in_s"])) <= 2.0
    assert desk.followed.poisoned
    assert desk.followed.customers == ["c-1"]
    assert "order 10 of c-1 failed: attempt 1 of 3, next attempt in 2 s" in desk.lines()


def test_a_failure_before_the_publish_has_returned_is_shown(desk: Desk) -> None:
    desk.run(10, done=False)
    desk.followed.add_poison(POISON, 0)
    assert desk.show()["failed"] == 1


def test_after_the_dead_letter_the_held_orders_run(desk: Desk) -> None:
    desk.followed.add_poison(POISON, 2)
    desk.publish((11, "c-1", 6), (13, "c-1", 7))
    for attempt in range(1, ATTEMPTS + 1):
        desk.run(10, attempt=attempt, done=False)
    desk.followed.bury(10)
    desk.publish((14, "c-1", 8))  # nothing holds this one any more
    assert not desk.followed.poisoned
    assert desk.show() | {"state": "running", "held": 2} == desk.show()
    desk.run(11)
    assert desk.show()["orders"] == [(6, True), (7, False)]
    desk.run(13)
    assert desk.show() | {"state": "over", "held": 0, "ran": 2, "handled": False} == desk.show()
    assert "all 2 held orders of c-1 ran" in desk.lines()


def test_held_orders_that_were_seen_before_the_dead_letter_count(desk: Desk) -> None:
    """The effects are read before the dead letters, so a held order may be seen first."""
    desk.followed.add_poison(POISON, 1)
    desk.publish((11, "c-1", 6))
    desk.run(11)
    desk.followed.bury(10)
    assert desk.show() | {"state": "over", "ran": 1} == desk.show()


def test_a_poison_order_that_is_handled_after_all_holds_nothing(desk: Desk) -> None:
    desk.followed.add_poison(POISON, 0)
    desk.run(10, attempt=4)
    assert desk.show() | {"state": "over", "handled": True} == desk.show()
    assert not desk.followed.poisoned


def test_a_customer_is_forgotten_a_while_after_its_orders_ran(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.followed.add_poison(POISON, 0)
    desk.followed.bury(10)
    desk.followed.add_replayed({10: "c-1"}, left=0)
    desk.run(10, attempt=4)
    assert desk.followed.customers == ["c-1"]
    monkeypatch.setattr(follow, "LINGER_S", -1.0)
    desk.publish()
    assert desk.followed.snapshot(lambda _: 0) == []
    assert desk.followed.customers == []
