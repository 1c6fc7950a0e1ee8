import time
import timeit
import uuid

import pytest

from onward import Event
from onward.event import Partition, new_id, new_ids


def test_ids_are_uuid7_unique_and_ordered_by_time() -> None:
    before = int(time.time() * 1000)
    ids = [new_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    parsed = [uuid.UUID(each) for each in ids]
    assert {each.version for each in parsed} == {7}
    assert {each.variant for each in parsed} == {uuid.RFC_4122}
    stamps = [each.int >> 80 for each in parsed]
    assert before <= stamps[0] <= stamps[-1] <= int(time.time() * 1000)
    assert stamps == sorted(stamps)


def test_many_ids_at_once_are_uuid7_unique_and_ordered() -> None:
    many = [id_ for _ in range(100) for id_ in new_ids(100)]
    assert len(set(many)) == 10_000
    assert {uuid.UUID(each).version for each in many} == {7}
    call = new_ids(1000)
    assert call == sorted(call) or call[0][24:] > call[-1][24:]  # the counter may wrap around
    assert new_ids(0) == []


def test_an_event_is_immutable() -> None:
    event = Event("1", "orders", None, b"")
    with pytest.raises(AttributeError):
        event.key = "k"  # type: ignore[misc]


def test_a_tombstone_differs_from_an_empty_value() -> None:
    assert Event("1", "t", "k", None) != Event("1", "t", "k", b"")


def test_size_counts_value_and_key() -> None:
    assert Event("1", "t", "key", b"12345").size == 8
    assert Event("1", "t", None, None).size == 0


def test_size_counts_bytes_not_characters() -> None:
    assert Event("1", "t", "주문", b"", {"이름": "값"}).size == 6 + 6 + 3


def test_an_event_is_cheap_to_build() -> None:
    best = min(timeit.repeat(lambda: Event("1", "t", "k", b"v", {}, "x", 1.0), number=20_000, repeat=7)) / 20_000
    assert best < 1.5e-6  # 0.2 µs on an idle machine; the limit leaves room for a busy one


def test_the_text_of_a_partition_is_topic_and_index() -> None:
    assert str(Partition("orders", 3)) == "orders/3"
