"""An adversary of relays: writers whose order of commits shows neither in ids, nor in transaction numbers, nor in time.

10 writers share 20 keys. A transaction locks the row of its key, counts it up and writes an event with that number, so
the number is the order of commits. Half of the transactions get their transaction number before the lock. Some roll
back, some write inside savepoints, and some stay open for long, with events of their own or as bystanders.

The judge compares the events that a relay has published with a ledger that was written in the same transactions. It
shares no code with any relay.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from onward.event import Event, new_id
from onward.outbox.rows import COLUMNS, values_of

TOPIC = "proof"
TABLE = "onward_outbox"
WRITERS = 10
KEYS = [f"key-{number}" for number in range(20)]
SLOW_KEYS = ["slow-0", "slow-1"]  # of transactions that stay open for long
UNORDERED = "unordered"  # its events are written without a key
ROLLBACKS = 0.05
SAVEPOINTS = 0.2
LONG_S = 1.0
AIR_S = 0.04  # between two transactions on SQLite: it does not share its one lock fairly

ADD_UP = "UPDATE proof_aggregate SET n = n + 1 WHERE name = %s"
COUNT = "SELECT n FROM proof_aggregate WHERE name = %s"
ELSEWHERE = "INSERT INTO proof_elsewhere (who) VALUES (%s)"
LEDGER = "INSERT INTO proof_ledger (name, n, event_id) VALUES (%s, %s, %s)"
EVENT = f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}) VALUES ({', '.join(['%s'] * len(COLUMNS))})"
TABLES = """
CREATE TABLE proof_aggregate (name VARCHAR(50) PRIMARY KEY, n BIGINT NOT NULL);
CREATE TABLE proof_elsewhere (who VARCHAR(50) NOT NULL);
CREATE TABLE proof_ledger (name VARCHAR(50) NOT NULL, n BIGINT NOT NULL, event_id VARCHAR(50) NOT NULL)
"""


class Place(NamedTuple):
    """A database with an outbox. `connect` returns a DB-API connection that is not in autocommit mode."""

    url: str
    connect: Callable[[], Any]
    serial: bool = False  # it has one writer at a time, so transactions must be short

    @property
    def longest_s(self) -> float:
        return 0.002 if self.serial else 0.04

    def sql(self, statement: str) -> str:
        return statement.replace("%s", "?") if self.serial else statement


class Published(NamedTuple):
    """An event as it arrived at the broker. `n` counts the commits of its name, from 1."""

    name: str
    n: int
    event_id: str


class Judgement(NamedTuple):
    committed: int
    lost: int  # committed, but never published
    inverted: int  # first published after a later event of its key
    invented: int  # published, but rolled back
    duplicates: int

    @property
    def right(self) -> bool:
        return self.lost == self.inverted == self.invented == 0 < self.committed


# -- the database ---------------------------------------------------------------------------------------------------


def prepare(place: Place) -> None:
    """New tables for the writers. The outbox must be there, without rows."""
    with closing(place.connect()) as connection:
        cursor = connection.cursor()
        for table in ("proof_aggregate", "proof_elsewhere", "proof_ledger"):
            cursor.execute(f"DROP TABLE IF EXISTS {table}")
        for statement in TABLES.split(";"):
            cursor.execute(statement)
        for name in (*KEYS, *SLOW_KEYS, UNORDERED):
            cursor.execute(place.sql("INSERT INTO proof_aggregate VALUES (%s, 0)"), (name,))
        connection.commit()


def ledger(place: Place) -> set[Published]:
    """Every committed event."""
    with closing(place.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT name, n, event_id FROM proof_ledger")
        return {Published(*row) for row in cursor.fetchall()}


# -- the writers ----------------------------------------------------------------------------------------------------


def write_for(place: Place, seconds: float) -> int:
    """Run the writers and the bystanders. When this returns, all their transactions have ended. Returns how many of
    them the database has rolled back because of a deadlock. The writers alone have none."""
    end = time.monotonic() + seconds
    roles = [*[_write] * WRITERS, *([] if place.serial else [_write_slowly] * len(SLOW_KEYS)), _look_on, _hold_number]
    with ThreadPoolExecutor(len(roles)) as pool:
        running = [pool.submit(_play, role, place, number, end) for number, role in enumerate(roles)]
        return sum(each.result() for each in running)


def _play(role: "Role", place: Place, number: int, end: float) -> int:
    """One transaction of this role after another. Returns the number of deadlocks."""
    deadlocks = 0
    with closing(place.connect()) as connection:
        writer = Writer(place, connection, random.Random(number))
        while time.monotonic() < end:
            try:
                role(writer, number)
            except Exception as error:
                if not is_deadlock(error):
                    raise
                connection.rollback()
                deadlocks += 1
    return deadlocks


def is_deadlock(error: Exception) -> bool:
    return "deadlock" in str(error).lower()


def _write(writer: "Writer", number: int) -> None:
    dice = writer.dice
    writer.begin(early=dice.random() < 0.5)
    writer.pause()
    for name in _names(dice):
        writer.emit(name)
    writer.pause()
    writer.end(commit=dice.random() >= ROLLBACKS)
    if writer.place.serial:
        time.sleep(dice.uniform(0, AIR_S))


def _names(dice: random.Random) -> list[str]:
    """The keys of a transaction. They are sorted, so that no two transactions wait for each other."""
    names = sorted(dice.sample(KEYS, dice.choice([1, 1, 1, 2])))
    return names * dice.choice([1, 1, 1, 2]) if len(names) == 1 else [*names, *[UNORDERED] * (dice.random() < 0.1)]


class Writer:
    """One transaction after another, over one connection."""

    def __init__(self, place: Place, connection: Any, dice: random.Random) -> None:
        self.place = place
        self.dice = dice
        self._connection = connection
        self._cursor = connection.cursor()

    def execute(self, statement: str, values: Sequence[object] = ()) -> None:
        self._cursor.execute(self.place.sql(statement), values)

    def begin(self, *, early: bool) -> None:
        """With `early` the transaction has its number before it locks anything that others want."""
        if self.place.serial:
            self.execute("BEGIN IMMEDIATE")
        if early:
            self.execute(ELSEWHERE, ("writer",))

    def end(self, *, commit: bool) -> None:
        if commit:
            self._connection.commit()
        else:
            self._connection.rollback()

    def pause(self) -> None:
        time.sleep(self.dice.uniform(0, self.place.longest_s / 2))

    def emit(self, name: str) -> None:
        """Lock the row of this name, then write its next event."""
        self.execute(ADD_UP, (name,))
        self.execute(COUNT, (name,))
        (n,) = self._cursor.fetchone()
        if self.dice.random() < SAVEPOINTS:
            self._nested(name, n)
        else:
            self._event(name, n)

    def _nested(self, name: str, n: int) -> None:
        """Write the event inside a savepoint. Sometimes roll back to it first, and write another one."""
        self.execute("SAVEPOINT inner_one")
        if self.dice.random() < 0.5:
            self._event(name, n)
            self.execute("ROLLBACK TO SAVEPOINT inner_one")
        self._event(name, n)
        self.execute("RELEASE SAVEPOINT inner_one")

    def _event(self, name: str, n: int) -> None:
        key = None if name == UNORDERED else name
        event = Event(new_id(), TOPIC, key, msgspec.json.encode([name, n]), {}, "", time.time())
        self.execute(EVENT, values_of(event))
        self.execute(LEDGER, (name, n, event.id))


# -- transactions that are open for long ----------------------------------------------------------------------------


def _write_slowly(writer: Writer, number: int) -> None:
    """Write an event of a key of its own, and commit it long after."""
    writer.begin(early=False)
    writer.emit(SLOW_KEYS[number % len(SLOW_KEYS)])
    time.sleep(writer.dice.uniform(0, LONG_S))
    writer.end(commit=True)


def _look_on(writer: Writer, number: int) -> None:
    """Read, without a transaction number."""
    writer.execute("BEGIN")
    writer.execute(f"SELECT count(*) FROM {TABLE}")
    time.sleep(writer.dice.uniform(0, LONG_S))
    writer.end(commit=False)


def _hold_number(writer: Writer, number: int) -> None:
    """Write something else, and stay open with that transaction number."""
    writer.begin(early=True)
    time.sleep(writer.dice.uniform(0, 0.02 if writer.place.serial else LONG_S))
    writer.end(commit=False)
    time.sleep(0.1)


Role = Callable[[Writer, int], None]


# -- the judge ------------------------------------------------------------------------------------------------------


def arrived(event_id: str, payload: bytes) -> Published:
    """An event of the writers, as a broker has it."""
    name, n = msgspec.json.decode(payload, type=tuple[str, int])
    return Published(name, n, event_id)


def judge(committed: set[Published], published: Iterable[Published]) -> Judgement:
    """`published`: in the order of arrival. Only the first arrival of an event can be out of order: after a crash a
    relay publishes the last events of a key again."""
    seen: set[Published] = set()
    highest: Counter[str] = Counter()
    inverted = arrivals = 0
    for each in published:
        arrivals += 1
        if each in seen or each not in committed:
            seen.add(each)
            continue
        seen.add(each)
        inverted += each.name != UNORDERED and each.n < highest[each.name]
        highest[each.name] = max(each.n, highest[each.name])
    return Judgement(
        committed=len(committed),
        lost=len(committed - seen),
        inverted=inverted,
        invented=len(seen - committed),
        duplicates=arrivals - len(seen),
    )
