"""Publishing to SQLite with fsync, compared with a bare sqlite3 loop that writes the same bytes with fsync."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from bench.kit import Bench, Figure, Pace, child, median, ratios
from bench.workload import TOPIC, application, batches, items, value
from onward import Onward
from onward.event import new_id

BATCH = 100
CALLERS = 100

Row = tuple[str, str, bytes, float]


def run(bench: Bench) -> None:
    asyncio.run(_batches(bench))
    asyncio.run(_singles(bench))


async def _batches(bench: Bench) -> None:
    size, rounds = bench.sized((20_000, 7), (5_000, 3))
    ours, bare = Pace(), Pace()
    path = bench.path("batches.db")
    async with application(path) as app:
        await app.publish(TOPIC, value("warm-up", 0), key="warm-up")
        with _bare(bench.path("bare.db")) as db:
            for number, part in enumerate(batches(items(size * rounds), size), 1):
                bench.say(f"publish: calls of {BATCH} events, round {number} of {rounds}")
                with ours.timed(size):
                    for batch in batches(part, BATCH):
                        await app.publish_many(TOPIC, batch)
                rows = [_row(key, data) for key, data in part]
                with bare.timed(size):
                    for chunk in batches(rows, BATCH):
                        _insert(db, chunk)
    beside = f"executemany, {BATCH} rows a transaction: {bare}"
    report(bench, f"publish, calls of {BATCH} events (fsync)", ours, bare, beside, target=0.5)
    _read_back(bench, "published in batches", path, size * rounds + 1)


async def _singles(bench: Bench) -> None:
    each, rounds = bench.sized((40, 5), (10, 3))
    size = CALLERS * each
    ours, bare = Pace(), Pace()
    path = bench.path("singles.db")
    async with application(path) as app:
        with _bare(bench.path("bare-singles.db")) as db:
            for number in range(rounds):
                bench.say(f"publish: {CALLERS} callers of single events, round {number + 1} of {rounds}")
                with ours.timed(size):
                    await asyncio.gather(*[_caller(app, f"c-{key}", number * each, each) for key in range(CALLERS)])
                rows = [_row(key, data) for key, data in items(size // 10)]
                with bare.timed(len(rows)):
                    for row in rows:
                        _insert(db, [row])
    report(bench, f"publish, {CALLERS} callers of single events", ours, bare, f"one row a transaction: {bare}")
    _read_back(bench, "published by concurrent callers", path, size * rounds)


async def _caller(app: Onward, key: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        await app.publish(TOPIC, value(key, number), key=key)


@contextmanager
def _bare(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA wal_autocheckpoint=4000")  # the same as Onward
        db.execute("CREATE TABLE log (at INTEGER PRIMARY KEY, id TEXT, key TEXT, value BLOB, time REAL)")
        yield db


def _row(key: str, data: bytes) -> Row:
    return new_id(), key, data, time.time()


def _insert(db: sqlite3.Connection, rows: Sequence[Row]) -> None:
    db.execute("BEGIN IMMEDIATE")
    db.executemany("INSERT INTO log (id, key, value, time) VALUES (?, ?, ?, ?)", rows)
    db.execute("COMMIT")


def report(bench: Bench, what: str, ours: Pace, bare: Pace, beside: str, target: float | None = None) -> None:
    ratio = ratios(ours.per_wall_s, bare.per_wall_s)
    bench.add(
        Figure(
            what=what,
            measured=str(ours),
            value=median(ours.per_wall_s),
            beside=beside,
            ratio=ratio,
            target="" if target is None else f"≥ {target}x",
            met=None if target is None else ratio >= target,
            samples={
                "onward_per_s": ours.per_wall_s,
                "bare_per_s": bare.per_wall_s,
                "onward_per_cpu_s": ours.per_cpu_s,
                "bare_per_cpu_s": bare.per_cpu_s,
            },
        )
    )


def _read_back(bench: Bench, what: str, path: Path, events: int) -> None:
    """Check that every event that publish returned for reaches a handler, in the order of its key."""
    bench.say(f"publish: reading back {events:,} events")
    ran = child("bench.contestants.app", bench.folder, path=str(path), events=events, group="reader")
    bench.judge(what, ran.verdict)
