"""Field tables, with pika as the judge in both directions."""

import struct
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pika.data import decode_table, encode_table  # type: ignore[import-untyped]

from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.tables import MAX_DEPTH, decoded_table, encoded_table, short_string

keys = st.text(max_size=60)
moments = st.integers(0, 253402300799).map(lambda seconds: datetime.fromtimestamp(seconds, UTC))
decimals = st.builds(
    lambda digits, scale: Decimal(digits).scaleb(-scale), st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, 20)
)
plain = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text() | st.binary() | moments | decimals
)


def tables(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4))
    return st.dictionaries(keys, values, max_size=8)


def read_by_pika(raw: bytes) -> Any:
    table, end = decode_table(raw, 0)
    assert end == len(raw)
    return table


def written_by_pika(table: dict[str, Any]) -> bytes:
    pieces: list[bytes] = []
    encode_table(pieces, table)
    return b"".join(pieces)


@settings(max_examples=60)
@given(tables(plain | st.floats(allow_nan=False)))
def test_a_table_comes_back_as_it_was(table: dict[str, Any]) -> None:
    assert decoded_table(encoded_table(table)[4:]) == table


@settings(max_examples=60)
@given(tables(plain))
def test_pika_reads_our_tables(table: dict[str, Any]) -> None:
    assert read_by_pika(encoded_table(table)) == table


@settings(max_examples=60)
@given(tables(plain))
def test_we_read_the_tables_of_pika(table: dict[str, Any]) -> None:
    assert decoded_table(written_by_pika(table)[4:]) == table


@pytest.mark.parametrize(
    ("kind", "form", "value"),
    [
        ("t", "B", 1),
        ("b", "b", -7),
        ("B", "B", 200),
        ("s", "h", -30000),
        ("U", "h", -30000),
        ("u", "H", 60000),
        ("I", "i", -(1 << 31)),
        ("i", "I", (1 << 32) - 1),
        ("l", "q", -(1 << 63)),
        ("L", "q", -(1 << 63)),
        ("f", "f", 2.0),
        ("d", "d", 3.0),
        ("T", "Q", 1_700_000_000),
    ],
)
def test_every_type_of_fixed_size_is_read_as_pika_reads_it(kind: str, form: str, value: float) -> None:
    entry = short_string("key") + kind.encode() + struct.pack(f">{form}", value)
    assert decoded_table(entry) == read_by_pika(struct.pack(">I", len(entry)) + entry)


def test_fractions_survive_unlike_in_pika() -> None:
    assert decoded_table(encoded_table({"x": 0.25, "y": [1e300]})[4:]) == {"x": 0.25, "y": [1e300]}


def test_text_that_is_not_utf_8_stays_bytes_and_a_name_is_escaped() -> None:
    assert decoded_table(b"\x02k\xffS\x00\x00\x00\x02a\xff") == {"k\\xff": b"a\xff"}


def test_a_time_that_no_calendar_has_stays_a_number() -> None:
    assert decoded_table(b"\x01kT" + b"\xff" * 8) == {"k": (1 << 64) - 1}


@settings(max_examples=60)
@given(tables(plain), st.data())
def test_a_cut_table_is_malformed_or_shorter(table: dict[str, Any], data: st.DataObject) -> None:
    raw = encoded_table(table)[4:]
    cut = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        found = decoded_table(cut)
    except Malformed:
        return
    assert list(found) == list(table)[: len(found)]
    assert all(found[key] == table[key] for key in found)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_table_or_malformed(raw: bytes) -> None:
    with suppress(Malformed):
        decoded_table(raw)


def test_tables_nest_only_so_deep() -> None:
    def nested(depth: int) -> bytes:
        raw = b""
        for _ in range(depth):
            raw = b"\x01kF" + struct.pack(">I", len(raw)) + raw
        return raw

    assert decoded_table(nested(MAX_DEPTH))
    for deeper in (MAX_DEPTH + 1, 10_000):
        with pytest.raises(Malformed, match="deep"):
            decoded_table(nested(deeper))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "object has no type"),
        ({1, 2}, "set has no type"),
        (1 << 63, "too large"),
        (datetime(1960, 1, 1, tzinfo=UTC), "too large"),
        (Decimal("12345678901.5"), "too large"),
        (Decimal("NaN"), "Decimal has no type"),
    ],
)
def test_a_value_that_amqp_cannot_express_is_refused(value: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encoded_table({"key": [value]})


def test_a_name_of_more_than_255_bytes_is_refused() -> None:
    assert short_string("é" * 127) == b"\xfe" + "é".encode() * 127
    with pytest.raises(ValueError, match="256 bytes"):
        short_string("é" * 128)
