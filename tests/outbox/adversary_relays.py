"""Popular relays that are wrong. The proof shows that the adversary finds each of them out.

A relay is a generator of batches: it reads one and yields it, and when it is resumed the batch is published.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from tests.outbox.adversary import TABLE, Judgement, Place, Published, arrived, is_deadlock, judge, ledger, write_for

BATCH = 10
BROKER_S = 0.02  # a broker answers within this time
Rows = Sequence[Any]  # each begins with id, event id and payload
PopularRelay = Callable[[Any], Iterator[Rows]]  # over a connection

AFTER_LAST_ID = f"SELECT id, event_id, payload FROM {TABLE} WHERE id > %s ORDER BY id LIMIT 200"
BELOW_XMIN = f"""
SELECT id, event_id, payload, xid::text FROM {TABLE}
WHERE xid < pg_snapshot_xmin(pg_current_snapshot()) AND (xid, id) > (%s::xid8, %s) ORDER BY xid, id LIMIT 200
"""
UNLOCKED = f"SELECT id, event_id, payload FROM {TABLE} ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED"


def after_the_last_id(connection: Any) -> Iterator[Rows]:
    """`WHERE id > last ORDER BY id`: passes over a row whose transaction commits after one with a higher id."""
    last = 0
    while True:
        rows = _read(connection, AFTER_LAST_ID, last)
        connection.commit()
        yield rows
        last = rows[-1][0] if rows else last


def in_the_order_of_xids(connection: Any) -> Iterator[Rows]:
    """`xid < xmin ORDER BY xid, id`: a transaction may have its number before it locks the row of its key."""
    last = ("0", 0)
    while True:
        rows = _read(connection, BELOW_XMIN, *last)
        connection.commit()
        yield rows
        last = (rows[-1][3], rows[-1][0]) if rows else last


def skipping_locked_rows(connection: Any) -> Iterator[Rows]:
    """`FOR UPDATE SKIP LOCKED` in several relays: two of them have rows of the same key at the same time."""
    while True:
        # On MariaDB the default level would lock the gaps between the rows too, and the writers would wait.
        connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        rows = _read(connection, UNLOCKED)
        yield rows
        for row in rows:
            connection.cursor().execute(f"DELETE FROM {TABLE} WHERE id = %s", (row[0],))
        connection.commit()


def _read(connection: Any, statement: str, *values: object) -> Rows:
    cursor = connection.cursor()
    cursor.execute(statement, values)
    rows: Rows = cursor.fetchall()
    return rows


class Sink:
    """A broker that accepts everything, and takes a moment to do so."""

    def __init__(self) -> None:
        self.arrivals: list[Published] = []

    def publish(self, rows: Rows) -> None:
        time.sleep(random.uniform(0, BROKER_S))
        self.arrivals.extend([arrived(event_id, payload) for _, event_id, payload, *_ in rows])


def watched(place: Place, relay: PopularRelay, *, relays: int = 1, seconds: float) -> Judgement:
    """Judge a relay that runs while the writers write, and afterwards until it finds no more rows."""
    sink, over = Sink(), threading.Event()
    with ThreadPoolExecutor(relays) as pool:
        running = [pool.submit(_run, place, relay, sink, over) for _ in range(relays)]
        try:
            write_for(place, seconds)
        finally:
            over.set()
        for each in running:
            each.result()
    return judge(ledger(place), sink.arrivals)


def _run(place: Place, relay: PopularRelay, sink: Sink, over: threading.Event) -> None:
    with closing(place.connect()) as connection:
        batches = relay(connection)
        while True:
            ending = over.is_set()  # before the read, so that the last read sees every commit
            try:
                rows = next(batches)
            except Exception as error:
                if not is_deadlock(error):
                    raise
                connection.rollback()
                batches = relay(connection)
                continue
            if rows:
                sink.publish(rows)
            elif ending:
                return
            else:
                time.sleep(0.002)
