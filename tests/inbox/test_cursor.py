"""Positions done, as intervals: pure, beside a set that does the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.inbox.cursor import MAX_INTERVALS, add, contains, decode, encode, pruned


def test_it_reads_as_it_is_stored() -> None:
    done = add(add((), [0, 1, 2, 7]), [5, 3])
    assert encode(done) == "0-4 5-6 7-8"
    assert decode(encode(done)) == done
    assert decode("") == ()


@given(st.lists(st.lists(st.integers(0, 60), max_size=10), max_size=10))
def test_it_holds_what_was_added_and_nothing_else(batches: list[list[int]]) -> None:
    done, model = decode(""), set[int]()
    for batch in batches:
        done, model = decode(encode(add(done, batch))), model | set(batch)
    assert {position for position in range(61) if contains(done, position)} == model


@pytest.mark.parametrize("settled", [0, 300, 10_000])
def test_pruning_forgets_only_what_the_log_cannot_bring(settled: int) -> None:
    done = add((), range(0, 1_000, 2))  # 500 intervals
    kept = pruned(done, settled)
    assert all(contains(kept, position) for position in range(0, 1_000, 2) if position >= settled)
    assert not any(contains(kept, position) for position in range(1, 1_000, 2))
    assert len(kept) >= MAX_INTERVALS // 2
    assert (len(kept) == len(done)) == (settled == 0)


def test_few_intervals_are_all_kept() -> None:
    done = add((), range(0, 2 * MAX_INTERVALS, 2))
    assert pruned(done, 10_000) == done
