"""Records of the aside as Redis stores them. Pure.

A record has a place: its position in hex and its log. Under it there is a row, which says what changes and what filters
ask for, and a body, which is the whole record. The places are sorted in an index.
"""

import functools
import logging

import msgspec

from onward.brokers.base import AsideRecord, State, Tries, record_id, record_log, record_position
from onward.brokers.redis.positions import hex_of
from onward.event import Partition

log = logging.getLogger("onward")

_encode = msgspec.msgpack.encode


class RecordRow(msgspec.Struct, frozen=True, array_like=True):
    state: State
    due: float | None
    wait_s: float | None
    tries: Tries
    key: str | None
    error: str | None
    failed_at: float | None
    size: int


_row = msgspec.msgpack.Decoder(RecordRow).decode
_body = msgspec.msgpack.Decoder(AsideRecord).decode


def place_of(id_: str) -> str:
    """Where the record with this id is. ValueError: it is no id of a record."""
    return f"{hex_of(record_position(id_))}:{record_log(id_)}"


def index_of(id_: str) -> int:
    """The partition that a record's id names. ValueError: it names none."""
    return int(id_.rsplit(":", 3)[2])


def is_id(id_: str) -> bool:
    try:
        return record_log(id_) != "" and index_of(id_) >= 0 and 0 <= record_position(id_) < 1 << 64
    except (ValueError, IndexError):
        return False


def id_at(group: str, partition: Partition, place: str) -> str:
    digits, _, log_id = place.partition(":")
    return record_id(group, log_id, partition, int(digits, 16))


def log_at(place: str) -> str:
    return place.partition(":")[2]


def stored(record: AsideRecord) -> tuple[str, bytes, bytes]:
    """The place, the row and the body."""
    record = record.whole()
    body, failure = _encode(record), record.failure
    row = RecordRow(
        record.state,
        record.due,
        record.wait_s,
        record.tries,
        record.event.key,
        failure.error if failure else None,
        failure.last if failure else None,
        len(body),
    )
    return place_of(record.id), _encode(row), body


def row_of(data: bytes) -> RecordRow | None:
    """None: it is damaged."""
    try:
        return _row(data)
    except msgspec.MsgspecError:
        return None


def encoded(row: RecordRow) -> bytes:
    return _encode(row)


def moved(row: RecordRow, to: State, due: float | None) -> bytes:
    """The row after an operator moved the record. Leaving the state dead resets the tries."""
    tries = Tries() if row.state is State.DEAD else row.tries
    return _encode(msgspec.structs.replace(row, state=to, due=due, tries=tries, wait_s=None))


def notice(id_: str, to: State | None, due: float | None) -> bytes:
    return _encode((id_, to, due))


def record_of(name: str, row: RecordRow, body: bytes | None) -> AsideRecord | None:
    """None: it is damaged, which must not stop the others."""
    try:
        if body is None:
            raise ValueError("its body is missing")
        return msgspec.structs.replace(_body(body), state=row.state, due=row.due, wait_s=row.wait_s, tries=row.tries)
    except (msgspec.MsgspecError, ValueError) as error:
        complain(name, str(error))
        return None


@functools.lru_cache(maxsize=1_000)
def complain(name: str, why: str) -> None:
    """Once for each record: they are read again and again."""
    log.warning("record %s is damaged and left out (%s); restore it from a backup, or drop it", name, why)
