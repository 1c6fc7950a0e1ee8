"""Hot keys: none is missed, none is counted twice, and a million cold ones cost nothing."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from onward.flow.hot import HotKeys

ALL = 1 << 30


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    capacity=st.integers(1, 4),
    batches=st.lists(st.lists(st.integers(0, 150) | st.integers(0, 3), max_size=60), max_size=12),
)
def test_a_key_with_more_than_its_share_is_always_found(capacity: int, batches: list[list[int]]) -> None:
    hot = HotKeys(capacity)
    true: Counter[str] = Counter()
    for batch in batches:
        keys = [f"k{number}" for number in batch]
        hot.add(keys)
        true.update(keys)
    found = dict(hot.top(ALL))
    for key, count in true.items():
        if count > true.total() / capacity:
            assert key in found
    assert all(0 < count <= true[key] for key, count in found.items()), "not a lower bound"
    assert len(found) <= 16 * capacity


def test_a_hot_key_stands_out_of_a_million_cold_ones_in_bounded_memory() -> None:
    hot = HotKeys(64)
    largest = 0
    for start in range(0, 1_000_000, 1_000):
        hot.add([f"cold-{number}" for number in range(start, start + 1_000)])
        hot.add(["hot"] * 50)
        largest = max(largest, len(hot.top(ALL)))
    assert largest <= 16 * 64
    (key, count), *_ = hot.top(1)
    assert key == "hot"
    # At most one count per cut and counter is taken from it.
    assert 50_000 - 1_050_000 / 65 <= count <= 50_000


def test_keyless_events_are_not_a_hot_key() -> None:
    hot = HotKeys()
    hot.add([None, None, "a"])
    assert hot.top(5) == [("a", 1)]
    hot.add([None, "a"])
    assert hot.top(5) == [("a", 2)]


def test_the_hottest_come_first() -> None:
    hot = HotKeys()
    hot.add(["a", "b", "c", "b", "c", "c"])
    assert hot.top(2) == [("c", 3), ("b", 2)]
