"""The intervals of done positions, compared with a set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.inbox.cursor import MAX_INTERVALS, add, contains, decode, encode, pruned


def test_decode_returns_what_was_encoded() -> None:
    done = add(add((), [0, 1, 2, 7]), [5, 3])
    assert encode(done) == "0-4 5-6 7-8"
    assert decode(encode(done)) == done
    assert decode("") == ()


@given(st.lists(st.lists(st.integers(0, 60), max_size=10), max_size=10))
def test_it_contains_exactly_the_added_positions(batches: list[list[int]]) -> None:
    done, model = decode(""), set[int]()
    for batch in batches:
        done, model = decode(encode(add(done, batch))), model | set(batch)
    assert {position for position in range(61) if contains(done, position)} == model


@pytest.mark.parametrize("settled", [0, 300, 10_000])
def test_pruning_removes_only_positions_that_the_log_cannot_deliver_again(settled: int) -> None:
    done = add((), range(0, 1_000, 2))  # 500 intervals
    kept = pruned(done, settled)
    assert all(contains(kept, position) for position in range(0, 1_000, 2) if position >= settled)
    assert not any(contains(kept, position) for position in range(1, 1_000, 2))
    assert len(kept) >= MAX_INTERVALS // 2
    assert (len(kept) == len(done)) == (settled == 0)


def test_pruning_removes_nothing_from_few_intervals() -> None:
    done = add((), range(0, 2 * MAX_INTERVALS, 2))
    assert pruned(done, 10_000) == done
