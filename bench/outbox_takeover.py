"""How long the events of a killed relay's shards wait until another relay publishes them."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg

from bench.kit import Bench, Figure, spread
from bench.outbox_database import PostgresDatabase, background
from onward.event import Event, new_id
from onward.outbox import schema
from onward.outbox.rows import COLUMNS, values_of

KEYS = [f"key-{number}" for number in range(64)]
EVERY_S = 0.05
PATIENCE_S = 60.0
RELAYS = 2
INSERT = f"INSERT INTO {schema.TABLE} ({', '.join(COLUMNS)}) VALUES ({', '.join(['%s'] * len(COLUMNS))})"


class Arrival(NamedTuple):
    pid: int
    key: str
    at: float


def run(bench: Bench, database: PostgresDatabase) -> None:
    lease_s, rounds = bench.sized((10.0, 3), (1.0, 1))
    took_s = []
    for number in range(rounds):
        database.renew()
        took_s.append(measure(bench, database, lease_s))
        bench.say(f"outbox: takeover, round {number + 1} of {rounds}: {took_s[-1]:.2f} s")
    limit_s = lease_s + 1
    bench.add(
        Figure(
            what=f"a killed relay: to the next event of every key, lease_s={lease_s:g}",
            measured=f"{spread(took_s, '.2f')} s",
            value=max(took_s),
            target=f"≤ {limit_s:g} s, each",
            met=max(took_s) <= limit_s,
            samples={"took_s": took_s},
        )
    )


def measure(bench: Bench, database: PostgresDatabase, lease_s: float) -> float:
    """Kill one of two relays while events of all keys come. Returns when the other one has published all its keys."""
    path = bench.path(f"arrivals-{new_id()}")
    arguments = {"database": database.url, "path": str(path), "lease_s": lease_s}
    module = "bench.contestants.outbox_arrivals"
    with ExitStack() as stack:
        for _ in range(RELAYS):
            stack.enter_context(background(module, bench.folder, arguments))
        stack.enter_context(_writing(database.url))
        _owners(path)
        time.sleep(random.uniform(0.2, 0.7) * lease_s)  # leases of any age
        owners = _owners(path)
        dead = owners[KEYS[0]]
        killed_at = time.monotonic()
        os.kill(dead, signal.SIGKILL)
        orphans = {key for key, pid in owners.items() if pid == dead}
        return max(_taken_over(path, orphans, dead, killed_at).values()) - killed_at


def _owners(path: Path) -> dict[str, int]:
    """Which relay publishes each key, once both have some."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        since = time.monotonic()
        time.sleep(4 * EVERY_S)
        owners = {each.key: each.pid for each in _arrivals(path) if each.at > since}
        if len(owners) == len(KEYS) and len(set(owners.values())) == RELAYS:
            return owners
    raise RuntimeError("two relays do not share the keys")


def _taken_over(path: Path, orphans: set[str], dead: int, killed_at: float) -> dict[str, float]:
    """When another relay has first published each of the keys."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found: dict[str, float] = {}
        for pid, key, at in _arrivals(path):
            if key in orphans and pid != dead and at > killed_at:
                found.setdefault(key, at)
        if len(found) == len(orphans):
            return found
        time.sleep(EVERY_S)
    raise RuntimeError("the other relay has not taken over")


def _arrivals(path: Path) -> list[Arrival]:
    lines = path.read_text().splitlines() if path.exists() else []
    split = [line.split() for line in lines]
    return [Arrival(int(pid), key, float(at)) for pid, key, at in split]


@contextmanager
def _writing(url: str) -> Iterator[None]:
    """Commit an event of every key, again and again."""
    over = threading.Event()

    def write() -> None:
        with psycopg.connect(url) as connection:
            while not over.wait(EVERY_S):
                events = [Event(new_id(), "takeover", key, b"", {}, "", time.time()) for key in KEYS]
                connection.cursor().executemany(INSERT, [values_of(event) for event in events])
                connection.commit()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()
