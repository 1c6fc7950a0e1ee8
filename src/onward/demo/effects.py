"""What the workers did: one table that all workers write and that only the judge and the page read.

This module imports nothing of Onward, so a fault of Onward cannot hide here. One shared table puts all outcomes in a
total order (`seq`) that does not depend on clocks.
"""

import asyncio
import os
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

FILE = "effects.db"

# A SIGKILL does not lose writes that the operating system already has, so no commit here has to wait for the disk.
_OPEN = "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS effects (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL,
    worker INTEGER NOT NULL,
    pid INTEGER NOT NULL,
    number INTEGER NOT NULL,
    customer TEXT NOT NULL,
    n INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    waited_s REAL NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('done', 'failed'))
);
CREATE INDEX IF NOT EXISTS failed ON effects (number) WHERE outcome = 'failed';
"""
_INSERT = """
INSERT INTO effects (time, worker, pid, number, customer, n, attempt, waited_s, outcome)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


class Subject(NamedTuple):
    """The order an effect is about."""

    number: int
    customer: str
    n: int
    placed: float


class Effects:
    """Writes the effects of one worker. A row is committed when the call returns."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._db = connect(folder)
        self._worker = worker
        self._rows: list[tuple[object, ...]] = []
        self._written: asyncio.Future[None] | None = None

    def close(self) -> None:
        self._db.close()

    async def done(self, order: Subject, attempt: int) -> None:
        await self._add(order, attempt, "done")

    async def failed(self, order: Subject, attempt: int) -> None:
        await self._add(order, attempt, "failed")

    def attempt(self, number: int) -> int:
        """The number of the next attempt of this order, counted over all workers."""
        row = self._db.execute("SELECT count(*) FROM effects WHERE number = ? AND outcome = 'failed'", (number,))
        return int(row.fetchone()[0]) + 1

    async def _add(self, order: Subject, attempt: int, outcome: str) -> None:
        now = time.time()
        subject = (order.number, order.customer, order.n)
        self._rows.append((now, self._worker, os.getpid(), *subject, attempt, now - order.placed, outcome))
        if self._written is None:
            loop = asyncio.get_running_loop()
            self._written = loop.create_future()
            loop.call_soon(self._write)
        # All callers that wait for this commit share the future. Cancelling one caller must not cancel the others.
        await asyncio.shield(self._written)

    def _write(self) -> None:
        """One commit for everything that ended in the same turn of the loop. With a commit for each row, the processes
        would mostly wait for each other's lock."""
        rows, self._rows = self._rows, []
        written, self._written = self._written, None
        assert written is not None, "the first row creates the future and schedules the write"
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(_INSERT, rows)
        except sqlite3.Error as error:
            written.set_exception(error)
        else:
            written.set_result(None)


def connect(folder: Path) -> sqlite3.Connection:
    db = sqlite3.connect(folder / FILE, timeout=10, isolation_level=None)
    db.executescript(_OPEN)
    return db


def create(folder: Path) -> None:
    db = connect(folder)
    db.executescript(_SCHEMA)
    db.close()
