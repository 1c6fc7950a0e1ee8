"""Every process, language and broker must put a key into the same partition."""

import pytest

from onward.brokers.core.partitioner import KeyHashes, murmur2, partition_of

# From Kafka's own tests of its default partitioner.
KNOWN = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}


@pytest.mark.parametrize(("key", "value"), KNOWN.items())
def test_murmur2_is_the_same_as_in_kafka(key: str, value: int) -> None:
    assert murmur2(key.encode()) == value
    assert partition_of(key, 7) == (value & 0x7FFFFFFF) % 7


def test_all_partitions_are_used_evenly() -> None:
    counts = [0] * 8
    for n in range(8_000):
        counts[partition_of(f"customer-{n}", 8)] += 1
    assert min(counts) > 850
    assert max(counts) < 1_150


def test_the_cache_of_hashes_is_bounded() -> None:
    hashes = KeyHashes()
    for n in range(70_000):
        assert hashes[str(n)] == murmur2(str(n).encode()) & 0x7FFFFFFF
    assert len(hashes) <= 65_536
    assert hashes["x" * 1_000] == murmur2(b"x" * 1_000) & 0x7FFFFFFF
    assert "x" * 1_000 not in hashes
