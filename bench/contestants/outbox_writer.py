"""Writes the events of the workload to an outbox, in transactions of many: by COPY on PostgreSQL, else by INSERT.

It is the load of the relay, not a contestant, so it takes the fastest way into the table.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql

from bench.kit import Ran, Stopwatch, peak_kb
from bench.outbox_database import KEYS, VALUE_BYTES
from bench.witness import Verdict
from bench.workload import Item, batches, items
from onward.event import Event, new_ids
from onward.outbox import schema
from onward.outbox.rows import COLUMNS, Values, values_of

INTO = f"{schema.TABLE} ({', '.join(COLUMNS)})"
INSERT = f"INSERT INTO {INTO} VALUES ({', '.join(['%s'] * len(COLUMNS))})"

Write = Callable[[Sequence[Values]], None]


def run(url: str, topic: str, events: int, per_transaction: int) -> Ran:
    with closing(_connect(url)) as connection:
        write = _copied(connection) if isinstance(connection, psycopg.Connection) else _inserted(connection)
        watch = Stopwatch()
        for batch in batches(items(events, keys=KEYS, value_bytes=VALUE_BYTES), per_transaction):
            write(_rows(topic, batch))
            connection.commit()
    wall_s, cpu_s = watch.read()
    return Ran(wall_s=wall_s, cpu_s=cpu_s, peak_kb=peak_kb(), verdict=Verdict(events, events, 0, 0))


def _connect(url: str) -> Any:
    if url.startswith("postgresql"):
        return psycopg.connect(url)
    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=parts.username,
        password=parts.password or "",
        database=parts.path.lstrip("/"),
    )


def _rows(topic: str, batch: Sequence[Item]) -> list[Values]:
    now = time.time()
    ids = new_ids(len(batch))
    return [values_of(Event(id_, topic, key, data, {}, "", now)) for id_, (key, data) in zip(ids, batch, strict=True)]


def _copied(connection: "psycopg.Connection[Any]") -> Write:
    def write(rows: Sequence[Values]) -> None:
        with connection.cursor() as cursor, cursor.copy(f"COPY {INTO} FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(["text", "text", "text", "text", "float8", "text", "bytea"])
            for row in rows:
                copy.write_row(row)

    return write


def _inserted(connection: Any) -> Write:
    def write(rows: Sequence[Values]) -> None:
        connection.cursor().executemany(INSERT, rows)  # PyMySQL makes one statement of it

    return write
