"""The SQL that writes events to an outbox, and what it means if a database refuses it. Pure."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple
from zlib import crc32

from onward.errors import BadOutbox
from onward.event import Event
from onward.outbox.rows import COLUMNS, Values

Dialect = Literal["postgresql", "mariadb", "sqlite"]
Marks = Literal["%s", "?", "$", ":"]
"""How a driver writes placeholders. `$` and `:` have numbers behind them."""

CHUNK_ROWS = 500  # 3,500 values: every driver and database accepts more
CHUNK_BYTES = 2 << 20  # of payload. MariaDB accepts statements of 16 MB by default, and escaping may double the size
SLOTS = 256  # rows of the lock table on MariaDB


class OutboxEntry(NamedTuple):
    """An event to write. `lock`: first lock its key until the transaction ends."""

    event: Event
    values: Values
    lock: bool


class WriteStep(NamedTuple):
    """A statement. `rows`: it must return this many rows, or else the lock table is incomplete."""

    sql: str
    values: tuple[Any, ...]
    rows: int | None = None


def steps(dialect: Dialect, marks: Marks, table: str, entries: Sequence[OutboxEntry]) -> Iterator[WriteStep]:
    """The statements that write the events. Usually it is one INSERT."""
    if keys := sorted({entry.event.key for entry in entries if entry.lock and entry.event.key is not None}):
        yield from _locks(dialect, marks, table, keys)
    for chunk in _chunks(entries):
        yield WriteStep(_insert(table, marks, len(chunk)), tuple(chain.from_iterable(entry.values for entry in chunk)))


def _locks(dialect: Dialect, marks: Marks, table: str, keys: Sequence[str]) -> Iterator[WriteStep]:
    """All transactions lock in the same order, so they cannot deadlock. SQLite has one writer, so it needs no lock."""
    if dialect == "postgresql":
        mark = _row(marks, 1, 1)
        yield WriteStep(
            f"SELECT pg_advisory_xact_lock(hashtextextended(k, 0)) FROM unnest({mark}::text[]) AS k", (keys,)
        )
    if dialect == "mariadb":
        slots = sorted({crc32(key.encode()) % SLOTS for key in keys})
        where = ", ".join(map(str, slots))
        sql = f"SELECT slot FROM {table}_lock WHERE slot IN ({where}) ORDER BY slot FOR UPDATE"
        yield WriteStep(sql, (), rows=len(slots))


def _chunks(entries: Sequence[OutboxEntry]) -> Iterator[Sequence[OutboxEntry]]:
    start = size = 0
    for at, entry in enumerate(entries):
        size += entry.event.size
        if at > start and (at - start >= CHUNK_ROWS or size > CHUNK_BYTES):
            yield entries[start:at]
            start, size = at, entry.event.size
    yield entries[start:]


@lru_cache(maxsize=2 * CHUNK_ROWS)
def _insert(table: str, marks: Marks, rows: int) -> str:
    width = len(COLUMNS)
    values = ", ".join(f"({_row(marks, 1 + width * row, width)})" for row in range(rows))
    return f"INSERT INTO {table} ({', '.join(COLUMNS)}) VALUES {values}"


def _row(marks: Marks, first: int, width: int) -> str:
    numbered = marks in ("$", ":")
    return ", ".join(f"{marks}{first + at}" if numbered else marks for at in range(width))


# PostgreSQL's states and MariaDB's numbers. SQLite has only texts.
_MISSING = {"42P01", "3F000", 1146}
_OTHER_COLUMNS = {"42703", "428C9", 1054}
_FORBIDDEN = {"42501", 1044, 1142, 1143}
_READ_ONLY = {"25006", 1290, 1792, 1836}


def refusal(error: BaseException, dialect: Dialect, table: str) -> BadOutbox | None:
    """What the error of a driver means, if the table or the rights are the cause."""
    code = error.args[0] if error.args else None
    if not isinstance(code, int):
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    text = str(error.args[-1] if error.args else error).strip().partition("\n")[0]
    if code in _MISSING or text.startswith("no such table"):
        return BadOutbox(f"the outbox's table {table} does not exist ({text}): run `onward outbox init URL`")
    if code in _OTHER_COLUMNS or "has no column named" in text:
        return BadOutbox(f"the table {table} is not an outbox ({text}): choose another name with table=")
    if code in _FORBIDDEN:
        return BadOutbox(f"this user may not write to the outbox ({text}): run {_grant(dialect, table)}")
    if code in _READ_ONLY or "readonly database" in text:
        return BadOutbox(
            f"the outbox's table {table} cannot be written ({text}): use the primary server and a transaction that is "
            "not read-only"
        )
    return None


def incomplete_locks(table: str) -> BadOutbox:
    return BadOutbox(f"the table {table}_lock has not all of its {SLOTS} rows: run `onward outbox init URL`")


def _grant(dialect: Dialect, table: str) -> str:
    if dialect == "mariadb":
        return (
            f"`GRANT INSERT ON {table} TO user`, and for lock=True also `GRANT SELECT, UPDATE ON {table}_lock TO user`"
        )
    home = table.rpartition(".")[0]
    return f"`GRANT INSERT ON {table} TO user`" + (f" and `GRANT USAGE ON SCHEMA {home} TO user`" if home else "")
