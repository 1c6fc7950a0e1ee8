"""What happens to the rows of a batch when the broker does not accept some of them."""

from onward.event import Event
from onward.outbox.base import OutboxRow
from onward.outbox.delivering import BatchDelivery
from onward.outbox.sending import BEHIND, RowFailure

HELD = {0: 5, 1: 6}


def row(id_: int, key: str | None, shard: int = 0) -> OutboxRow:
    return OutboxRow(id_, shard, Event(f"e{id_}", "orders", key, b""))


def parked(delivery: BatchDelivery) -> list[tuple[int, str, bool]]:
    return [(each.row.id, each.why, each.refused) for each in delivery.parked]


def left(delivery: BatchDelivery) -> list[int]:
    return [each.id for each in delivery.left]


def test_rows_behind_parked_ones_of_their_key_are_parked_at_once() -> None:
    delivery = BatchDelivery([row(1, "a"), row(2, "b"), row(3, "a")], HELD, {("orders", "a")})
    assert parked(delivery) == [(1, BEHIND, False), (3, BEHIND, False)]
    assert left(delivery) == [2]


def test_a_refused_row_is_parked_with_the_rows_behind_it() -> None:
    rows = [row(1, "a"), row(2, "b"), row(3, "a"), row(4, "c")]
    delivery = BatchDelivery(rows, HELD, ())
    delivery.settle([RowFailure(rows[0], "too large", refused=True), RowFailure(rows[2], BEHIND)])
    assert parked(delivery) == [(1, "too large", True), (3, BEHIND, False)]
    assert left(delivery) == []


def test_a_refused_row_waits_while_an_earlier_row_of_its_key_is_left() -> None:
    rows = [row(1, "a"), row(2, "a")]
    delivery = BatchDelivery(rows, HELD, ())
    failed = [RowFailure(rows[0], "down"), RowFailure(rows[1], "too large", refused=True)]
    delivery.settle(failed)
    assert (left(delivery), parked(delivery)) == ([1, 2], [])
    delivery.give_up(failed)
    assert parked(delivery) == [(1, "down", False), (2, BEHIND, False)]


def test_events_without_a_key_are_parked_one_by_one() -> None:
    rows = [row(1, None), row(2, None), row(3, None)]
    delivery = BatchDelivery(rows, HELD, ())
    delivery.settle([RowFailure(rows[0], "too large", refused=True), RowFailure(rows[2], "down")])
    assert parked(delivery) == [(1, "too large", True)]
    assert left(delivery) == [3]


def test_rows_of_a_lost_shard_are_neither_published_nor_parked() -> None:
    rows = [row(1, "a"), row(2, "b", shard=1), row(3, "c", shard=1)]
    delivery = BatchDelivery(rows, HELD, {("orders", "b")})
    delivery.keep({0: 5})
    assert (left(delivery), delivery.parked, delivery.held) == ([1], [], {0: 5})


def test_a_shard_with_another_fence_is_lost() -> None:
    delivery = BatchDelivery([row(1, "a"), row(2, "b", shard=1)], HELD, ())
    delivery.keep({0: 5, 1: 7})
    assert (left(delivery), delivery.held) == ([1], {0: 5})


def test_rows_that_are_left_stay_in_order() -> None:
    rows = [row(number, f"k{number % 3}") for number in range(30)]
    delivery = BatchDelivery(rows, HELD, ())
    delivery.settle([RowFailure(each, "down") for each in reversed(rows[10:])])
    assert left(delivery) == list(range(10, 30))


def test_rows_of_a_shard_that_is_not_ours_are_left_to_its_owner() -> None:
    delivery = BatchDelivery([row(1, "a"), row(2, "b", shard=1)], {0: 5}, ())
    assert (left(delivery), parked(delivery)) == ([1], [])
