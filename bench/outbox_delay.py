"""From a commit in one process to the handler in another, through a relay in a third.

The time starts before the event is added to the transaction, so it includes the INSERT and the commit.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import psycopg

from bench.contestants.listener import READY, Delays, Tick
from bench.kit import CHILD_TIMEOUT_S, Bench, Figure, percentile
from bench.outbox_database import PostgresDatabase, await_line, background, running
from onward import Onward
from onward.outbox import Outbox

TOPIC = "ticks"
CONNECTIONS = 4
LIMIT_MS = 20.0
APPLICATION = """
from onward import Onward
from onward.outbox import Outbox

app = Onward({broker!r})
Outbox(app, {database!r})
"""


class Load(NamedTuple):
    per_s: int
    events: int
    keys: int = 100
    limit_ms: float | None = None  # of the median


def run(bench: Bench, database: PostgresDatabase, brokers: Sequence[tuple[str, str]]) -> None:
    """`brokers`: their names and URLs."""
    seconds = bench.sized(10, 1)
    for name, url in brokers:
        for load in (Load(1_000, 1_000 * seconds, limit_ms=LIMIT_MS), Load(20, 20 * seconds, keys=1)):
            bench.say(f"outbox: commit to handler, {database.name} to {name}, {load.per_s:,} events/s")
            database.renew()
            found = _measure(bench, database, url, load)
            what = f"commit to handler, {database.name} to {name}, {load.per_s:,} /s"
            bench.judge(f"outbox, {what}", found.verdict)
            _report(bench, what, found.delays_ms, load)


def _measure(bench: Bench, database: PostgresDatabase, broker: str, load: Load) -> Delays:
    topic = f"{TOPIC}-{load.per_s}"
    module = Path(bench.folder, "outbox_delay_app.py")
    module.write_text(APPLICATION.format(broker=broker, database=database.url))
    relay = [sys.executable, "-m", "onward", "relay", "outbox_delay_app:app", "--log-level", "error"]
    listener = {"url": broker, "topic": topic, "events": load.events}
    with (
        background("bench.contestants.listener", bench.folder, listener) as listening,
        running(relay, bench.folder),
        Writers(database.url, broker, topic) as writers,
    ):
        writers.warm_up(listening)
        writers.write(load)
        output, _ = listening.communicate(timeout=CHILD_TIMEOUT_S)
    return msgspec.json.decode(output.splitlines()[-1], type=Delays)


class Writers:
    """Connections that commit one event per transaction. A key belongs to one of them."""

    def __init__(self, database: str, broker: str, topic: str) -> None:
        self._outbox = Outbox(Onward(broker), database)
        self._topic = topic
        self._connections = [psycopg.connect(database) for _ in range(CONNECTIONS)]

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()

    def warm_up(self, listener: "subprocess.Popen[str]") -> None:
        """Send events until the listener has got one."""
        ready = threading.Thread(target=await_line, args=(listener, READY))
        ready.start()
        while ready.is_alive():
            self._commit(self._connections[0], "warm-up", -1)
            ready.join(0.05)

    def write(self, load: Load) -> None:
        start = time.monotonic() + 0.1
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for writing in [pool.submit(self._write, number, load, start) for number in range(CONNECTIONS)]:
                writing.result()

    def _write(self, number: int, load: Load, start: float) -> None:
        for at in range(load.events):
            key = at % load.keys
            if key % CONNECTIONS == number:
                time.sleep(max(0.0, start + at / load.per_s - time.monotonic()))
                self._commit(self._connections[number], f"tick-{key}", at // load.keys)

    def _commit(self, connection: "psycopg.Connection[tuple[object, ...]]", key: str, number: int) -> None:
        self._outbox.add(connection, self._topic, Tick(key, number, time.monotonic()), key=key)
        connection.commit()
        self._outbox.ring()


def _report(bench: Bench, what: str, delays_ms: list[float], load: Load) -> None:
    p50, p99 = percentile(delays_ms, 0.5), percentile(delays_ms, 0.99)
    bench.add(
        Figure(
            what=what,
            measured=f"p50 {p50:.1f} ms, p99 {p99:.1f} ms",
            value=p50,
            target="" if load.limit_ms is None else f"p50 ≤ {load.limit_ms:g} ms",
            met=None if load.limit_ms is None else p50 <= load.limit_ms,
            samples={"delays_ms": delays_ms},
        )
    )
