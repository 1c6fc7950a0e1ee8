"""What a group's pending list says about its progress."""

from collections.abc import Sequence

import pytest

from onward.brokers.base import Progress, Tries
from onward.brokers.redis.foreign.leftovers import Leftovers, PendingPage, Stocktaking
from onward.brokers.redis.positions import joined
from onward.errors import BrokerError
from onward.event import Partition

PARTITION = Partition("scan", 0)
NOTHING = Leftovers((), ())


def at(ms: int, seq: int = 0) -> int:
    position = joined(ms, seq)
    assert position is not None
    return position


def page(kinds: str, *entries: tuple[int, int], last: int = 100) -> PendingPage:
    """Entries are (ms, deliveries)."""
    ids = [f"{ms}-0".encode() for ms, _ in entries]
    counts = [count for _, count in entries]
    return PendingPage.of([b"page", f"{last}-0".encode(), 0, None, ids, counts, kinds.encode()])


def taken_stock(
    *pages: PendingPage, stored: Progress | None = None, last: bytes = b"100-0", ours: bytes = b"0-0"
) -> tuple[Progress, Leftovers]:
    stock = Stocktaking(stored, ours, NOTHING)
    for each in pages:
        stock.page(each)
    return stock.result(PARTITION, 1, last)


def done(progress: Progress, leftovers: Leftovers, positions: Sequence[int]) -> list[bool]:
    """As an owner sees it: below the watermark, or finished by another consumer."""
    left = leftovers.between(0, leftovers.until)
    return [
        position < progress.watermark or (leftovers.is_theirs(position) and position not in left)
        for position in positions
    ]


def test_all_is_done_up_to_the_last_delivered_id_except_what_is_pending() -> None:
    progress, leftovers = taken_stock(page("to", (10, 1), (30, 1)), page("t", (70, 1)))
    assert progress.watermark == at(10)
    places = [at(9), at(10), at(11), at(30), at(69), at(70), at(100), at(100, 1), at(101)]
    assert done(progress, leftovers, places) == [True, False, True, False, True, False, True, False, False]


def test_nothing_pending_means_that_the_group_is_at_its_last_delivered_id() -> None:
    progress, leftovers = taken_stock()
    assert (progress.watermark, list(leftovers.positions)) == (at(100, 1), [])
    assert taken_stock(last=b"0-0")[0].watermark == 0


def test_only_entries_of_other_consumers_are_taken() -> None:
    work = Stocktaking(None, b"0-0", NOTHING).page(page("otT", (10, 1), (20, 1), (30, 4)))
    assert list(work.takes) == [b"20-0"]
    assert [(each.id, each.position, each.deliveries) for each in work.lost] == [(b"30-0", at(30), 4)]


def test_what_our_progress_has_passed_is_not_opened_again() -> None:
    """A record in the aside stays pending, and so does what an owner could not acknowledge."""
    stored = Progress(PARTITION, 1, at(20), [(at(30), at(41)), (at(200), at(201))])
    stock = Stocktaking(stored, b"24-0", NOTHING)
    work = stock.page(page("otoOt", (10, 1), (25, 1), (35, 1), (40, 1), (45, 1)))
    assert not work.lost
    assert list(work.takes) == [b"25-0", b"45-0"]
    assert list(stock.pending) == [at(10), at(25), at(35), at(40), at(45)]
    progress, leftovers = stock.result(PARTITION, 2, b"100-0")
    assert (progress.watermark, progress.epoch) == (at(20), 2)
    assert list(leftovers.positions) == [at(25), at(45)]
    places = [at(19), at(22), at(25), at(26), at(45), at(50), at(101)]
    assert done(progress, leftovers, places) == [True, False, False, True, False, True, False]
    assert list(progress.done_above) == [(at(30), at(41)), (at(200), at(201))]


def test_the_progress_does_not_go_back_behind_what_was_settled() -> None:
    """The group was created again further back, or a server lost its last writes."""
    stored = Progress(PARTITION, 1, at(150), [(at(150), at(160)), (at(170), at(180))])
    progress, _ = taken_stock(stored=stored)
    assert (progress.watermark, list(progress.done_above)) == (at(150), list(stored.done_above))


def test_what_we_gave_out_is_open_until_it_is_done_whatever_became_of_the_list() -> None:
    """Another program removed our consumer, or a server lost the last writes of the list."""
    stored = Progress(PARTITION, 1, at(10), [(at(20), at(21))])
    progress, leftovers = taken_stock(page("o", (50, 1)), stored=stored, ours=b"100-0")
    assert (progress.watermark, list(progress.done_above)) == (at(10), list(stored.done_above))
    assert not leftovers.intervals


def test_what_was_left_stays_left_over_several_owners() -> None:
    first, left = taken_stock(page("tt", (10, 1), (30, 1)))
    again = Leftovers.decode(left.encoded())
    assert (again.intervals, again.positions) == (left.intervals, left.positions)
    stored = Progress(PARTITION, 2, at(30), tries=first.tries)
    stock = Stocktaking(stored, b"120-0", again)
    stock.page(page("t", (150, 1)))
    progress, left = stock.result(PARTITION, 3, b"200-0")
    assert (progress.watermark, list(left.positions)) == (at(30), [at(30), at(150)])
    places = [at(29), at(30), at(31), at(100), at(110), at(120), at(121), at(150), at(151), at(201)]
    expected = [True, False, True, True, False, False, True, False, True, False]
    assert done(progress, left, places) == expected


def test_deliveries_but_the_last_count_as_failed_attempts() -> None:
    """Trap 10: poison entries come to an end. The last delivery was interrupted, so it did not fail."""
    stored = Progress(PARTITION, 1, 0, tries={at(30): Tries(7)})
    progress, _ = taken_stock(page("ttto", (10, 1), (20, 4), (30, 2), (40, 9)), stored=stored)
    assert dict(progress.tries) == {at(20): Tries(3), at(30): Tries(7)}


def test_the_number_of_tries_is_limited_to_the_entries_that_were_delivered_most_often() -> None:
    many = [(ms, 2 + (ms % 10 == 0)) for ms in range(1, 12_001)]
    progress, leftovers = taken_stock(page("t" * 12_000, *many, last=20_000), last=b"20000-0")
    assert len(progress.tries) == 1_000
    assert {tries.failed for tries in progress.tries.values()} == {2}
    assert len(leftovers.positions) == 12_000


def test_an_id_that_does_not_fit_into_a_position_is_named() -> None:
    with pytest.raises(BrokerError, match="9999999999999-0"):
        Stocktaking(None, b"0-0", NOTHING).page(page("t", (9_999_999_999_999, 1)))
