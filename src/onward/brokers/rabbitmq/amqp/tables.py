"""Field tables: the arguments of declares and the headers of messages. Pure."""

import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from onward.brokers.rabbitmq.amqp.faults import Malformed

MAX_DEPTH = 64  # of tables and arrays inside each other

_FIXED = {  # by the byte that names the type
    ord("b"): struct.Struct(">b"),
    ord("B"): struct.Struct(">B"),
    ord("s"): struct.Struct(">h"),
    ord("U"): struct.Struct(">h"),
    ord("u"): struct.Struct(">H"),
    ord("I"): struct.Struct(">i"),
    ord("i"): struct.Struct(">I"),
    ord("l"): struct.Struct(">q"),
    ord("L"): struct.Struct(">q"),  # signed in RabbitMQ, as `l`
    ord("f"): struct.Struct(">f"),
    ord("d"): struct.Struct(">d"),
}
_LENGTH = struct.Struct(">I")
_TIME = struct.Struct(">Q")
_DECIMAL = struct.Struct(">Bi")
_TRUTH, _TEXT, _BYTES, _ARRAY, _TABLE, _STAMP, _NUMBER, _VOID = b"tSxAFTDV"
_WIDTHS = {_TRUTH: 1, _VOID: 0, _STAMP: 8, _NUMBER: 5}


def short_string(text: str) -> bytes:
    """The text with its length in one byte. Raises ValueError if it has more than 255 bytes."""
    raw = text.encode()
    if len(raw) > 255:
        raise ValueError(f"{text[:40]!r}… has {len(raw)} bytes; AMQP allows 255 for a name, key or short property")
    return bytes((len(raw),)) + raw


def long_string(raw: bytes) -> bytes:
    return _LENGTH.pack(len(raw)) + raw


def encoded_table(table: Mapping[str, Any] | None) -> bytes:
    """The table with its length in front. Raises ValueError if it has a value that AMQP cannot express."""
    return long_string(b"".join([short_string(key) + _encoded(value) for key, value in (table or {}).items()]))


def _encoded(value: object) -> bytes:
    match value:
        case str():
            return b"S" + long_string(value.encode())
        case bool():
            return b"t\1" if value else b"t\0"
        case None:
            return b"V"
        case bytes() | bytearray() | memoryview():
            return b"x" + long_string(bytes(value))
        case Mapping():
            return b"F" + encoded_table(value)
        case Sequence():
            return b"A" + long_string(b"".join([_encoded(each) for each in value]))
    try:
        return _number(value)
    except struct.error as error:
        raise ValueError(f"{value!r} is too large for an AMQP table") from error


def _number(value: object) -> bytes:
    match value:
        case int() if -(1 << 31) <= value < 1 << 31:
            return struct.pack(">ci", b"I", value)
        case int():
            return struct.pack(">cq", b"l", value)
        case float():
            return struct.pack(">cd", b"d", value)
        case datetime():
            return struct.pack(">cQ", b"T", int(value.timestamp()))
        case Decimal() if value.is_finite():
            exponent = min(0, int(value.as_tuple().exponent))
            return struct.pack(">cBi", b"D", -exponent, int(value.scaleb(-exponent)))
        case _:
            raise ValueError(f"{value!r} cannot be in an AMQP table: a {type(value).__name__} has no type there")


def decoded_table(raw: bytes) -> dict[str, Any]:
    """The table of these entries, without a length in front. Text that is not UTF-8 stays bytes.

    Raises Malformed if the entries are cut off, of an unknown type, or too deep.
    """
    try:
        return _entries(raw, 0, len(raw), 0)
    except (struct.error, IndexError) as error:
        raise Malformed("a field table is cut off") from error


def text_of(raw: bytes) -> str:
    """The text of a short string. A byte that is not UTF-8 is shown as an escape, so any name can be read."""
    return raw.decode(errors="backslashreplace")


def entry_end(raw: bytes, at: int) -> int:
    """Where the entry at `at` ends: its name and its value, which is not decoded. It may be beyond the end of `raw`.
    Raises Malformed if its type is unknown."""
    at += 1 + raw[at]
    kind = raw[at]
    at += 1
    if fixed := _FIXED.get(kind):
        return at + fixed.size
    if kind in (_TEXT, _BYTES, _TABLE, _ARRAY):
        end: int = at + 4 + _LENGTH.unpack_from(raw, at)[0]
        return end
    if kind in _WIDTHS:
        return at + _WIDTHS[kind]
    raise Malformed(f"a field table has a value of the unknown type {bytes((kind,))!r}")


def _entries(raw: bytes, at: int, end: int, depth: int) -> dict[str, Any]:
    table: dict[str, Any] = {}
    while at < end:
        key_end = at + 1 + raw[at]
        table[text_of(raw[at + 1 : key_end])], at = _value(raw, key_end, depth)
    if at != end:
        raise Malformed("a field table is cut off")
    return table


def _value(raw: bytes, at: int, depth: int) -> tuple[Any, int]:
    """The value whose type stands at `at`, and where the next entry begins: beyond the end if the value is cut off."""
    kind = raw[at]
    at += 1
    if fixed := _FIXED.get(kind):
        return fixed.unpack_from(raw, at)[0], at + fixed.size
    if kind in (_TEXT, _BYTES, _TABLE, _ARRAY):
        start = at + 4
        end = start + _LENGTH.unpack_from(raw, at)[0]
        return _long(kind, raw, start, end, depth), end
    if kind == _TRUTH:
        return raw[at] != 0, at + 1
    if kind == _VOID:
        return None, at
    if kind == _STAMP:
        return _moment(_TIME.unpack_from(raw, at)[0]), at + 8
    if kind == _NUMBER:
        scale, digits = _DECIMAL.unpack_from(raw, at)
        return Decimal(digits).scaleb(-scale), at + 5
    raise Malformed(f"a field table has a value of the unknown type {bytes((kind,))!r}")


def _long(kind: int, raw: bytes, start: int, end: int, depth: int) -> object:
    if kind == _TEXT:
        try:
            return raw[start:end].decode()
        except UnicodeDecodeError:
            return raw[start:end]
    if kind == _BYTES:
        return raw[start:end]
    if depth == MAX_DEPTH:
        raise Malformed(f"a field table is more than {MAX_DEPTH} tables deep")
    return _entries(raw, start, end, depth + 1) if kind == _TABLE else _elements(raw, start, end, depth + 1)


def _elements(raw: bytes, at: int, end: int, depth: int) -> list[Any]:
    found = []
    while at < end:
        value, at = _value(raw, at, depth)
        found.append(value)
    if at != end:
        raise Malformed("an array in a field table is cut off")
    return found


def _moment(seconds: int) -> datetime | int:
    """As a time, or as the number if no calendar reaches that far."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return seconds
