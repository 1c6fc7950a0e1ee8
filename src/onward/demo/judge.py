"""The judge: finds out which orders were promised, and what happened to each.

It reads the shop's orders, the workers' effects and the numbers of the dead letters. It imports nothing of Onward,
so a fault of Onward cannot hide in the verdict.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PUBLISHED, HANDLED = 1, 2

# While the path runs, a later order of the same customer may overtake an order. The overtaken one may still be on its
# way into the dead letters, or another worker may take it over from a killed one. After this time it counts as lost.
LOST_AFTER_S = 10.0


class Balance(NamedTuple):
    """Where every published order stands: published = handled + dead + in_flight + lost. An order is published when it
    is committed, because its event is in the same transaction."""

    published: int
    handled: int
    dead: int
    in_flight: int
    lost: int
    inverted: int  # first completions that came after a later order of the same customer
    duplicates: int  # effects beyond the first of an order

    @property
    def clean(self) -> bool:
        return self.lost == 0 and self.inverted == 0


class Published(NamedTuple):
    number: int
    customer: str
    n: int  # counts the orders of this customer


class Effect(NamedTuple):
    """A row of the effects. `first`: it completed its order for the first time."""

    seq: int
    time: float  # Unix time
    worker: int
    pid: int
    number: int
    customer: str
    n: int
    attempt: int
    waited_s: float
    done: bool
    first: bool


class News(NamedTuple):
    published: Sequence[Published]
    effects: Sequence[Effect]


class OrderMarks:
    """Which orders are published and which are handled, by number, with the count of each."""

    def __init__(self) -> None:
        self.published = 0
        self.handled = 0
        self._marks = bytearray(1)  # PUBLISHED | HANDLED

    def has(self, number: int, bit: int) -> bool:
        return number < len(self._marks) and bool(self._marks[number] & bit)

    def add(self, number: int, bit: int) -> None:
        if number >= len(self._marks):
            self._marks.extend(bytes(number + 1024 - len(self._marks)))
        before = self._marks[number]
        self._marks[number] = after = before | bit
        self.published += after & ~before & PUBLISHED
        # An effect may be read before its order. The order counts when both are there.
        self.handled += before != after == PUBLISHED | HANDLED

    def unknown(self) -> Iterator[int]:
        """Handled orders that were never published."""
        return (number for number, mark in enumerate(self._marks) if mark == HANDLED)

    def unhandled(self) -> Iterator[int]:
        """Published orders that are not handled."""
        return (number for number, mark in enumerate(self._marks) if mark & PUBLISHED and not mark & HANDLED)


class Judge:
    """Counts the balance as rows arrive. A new judge on the same folder reaches the same verdict."""

    def __init__(self, folder: Path) -> None:
        files = [folder / name for name in ("orders.db", "events.db")]  # the shop's own file, or the broker's
        shop = next((file for file in files if file.exists()), files[0])
        self._orders = sqlite3.connect(shop, timeout=10, isolation_level=None)
        self._effects = sqlite3.connect(folder / "effects.db", timeout=10, isolation_level=None)
        self._read_to = [0, 0]  # the last published number and the last effect seen
        self._marks = OrderMarks()
        self._last: dict[str, int] = {}  # customer -> highest n completed
        self._overtaken: dict[int, float] = {}  # order number -> when a later order of its customer was completed
        self._dead: set[int] = set()
        self._inverted = self._duplicates = 0

    def close(self) -> None:
        self._orders.close()
        self._effects.close()

    def read(self) -> News:
        """Read the rows written since the last call."""
        effects = self._effects.execute(
            "SELECT seq, time, worker, pid, number, customer, n, attempt, waited_s, outcome = 'done' FROM effects"
            " WHERE seq > ? ORDER BY seq",
            (self._read_to[1],),
        ).fetchall()
        published = self._orders.execute(
            "SELECT number, customer, n FROM orders WHERE number > ? ORDER BY number",
            (self._read_to[0],),
        ).fetchall()
        for number, *_ in published:
            self._marks.add(number, PUBLISHED)
            self._read_to[0] = number
        for seq, *_ in effects[-1:]:
            self._read_to[1] = seq
        return News([Published(*row) for row in published], [self._effect(row) for row in effects])

    def bury(self, numbers: Iterable[int]) -> Sequence[int]:
        """Count these orders as dead letters. Returns those that are new."""
        fresh = [number for number in numbers if not self.is_done(number)]
        for number in fresh:
            self._dead.add(number)
            self._overtaken.pop(number, None)
        return fresh

    def is_done(self, number: int) -> bool:
        return self._marks.has(number, HANDLED) or number in self._dead

    @property
    def overtaken(self) -> bool:
        """Whether a later order of the same customer overtook an order. That order should be a dead letter by now."""
        return bool(self._overtaken)

    def balance(self) -> Balance:
        """The balance while the demo runs. An unfinished order is in flight, unless it was overtaken too long ago."""
        overdue = time.time() - LOST_AFTER_S
        lost = [
            number
            for number, since in self._overtaken.items()
            if since < overdue and self._marks.has(number, PUBLISHED)
        ]
        return self._balance(len(lost))

    def verdict(self) -> Balance:
        """The balance after all orders should be finished. An unfinished order is lost."""
        return self._balance(len(self.missing()))

    def missing(self) -> Sequence[int]:
        """Published orders that are neither handled nor in the dead letters."""
        return [number for number in self._marks.unhandled() if number not in self._dead]

    def unknown(self) -> Sequence[int]:
        """Handled orders that the shop never committed: their events should not exist."""
        return list(self._marks.unknown())

    def wrongly_dead(self) -> Sequence[int]:
        """Dead letters that are not poison orders."""
        poison = {number for (number,) in self._orders.execute("SELECT number FROM orders WHERE poison")}
        return sorted(self._dead - poison)

    def _balance(self, lost: int) -> Balance:
        published, handled, dead = self._marks.published, self._marks.handled, len(self._dead)
        in_flight = published - handled - dead - lost
        return Balance(published, handled, dead, in_flight, lost, self._inverted, self._duplicates)

    def _effect(self, row: tuple[Any, ...]) -> Effect:
        *_, number, customer, n, _, _, done = row
        return Effect._make([*row, bool(done) and self._complete(number, customer, n)])

    def _complete(self, number: int, customer: str, n: int) -> bool:
        if self._marks.has(number, HANDLED):
            self._duplicates += 1
            return False
        self._marks.add(number, HANDLED)
        last = self._last.get(customer, 0)
        if n > last:
            self._last[customer] = n
            self._overtake(customer, last, n)
        elif number not in self._dead:  # a dead letter that was replayed later is no inversion
            self._inverted += 1
        self._overtaken.pop(number, None)
        self._dead.discard(number)
        return True

    def _overtake(self, customer: str, last: int, n: int) -> None:
        if n == last + 1:
            return
        skipped = self._orders.execute(
            "SELECT number FROM orders WHERE customer = ? AND n > ? AND n < ?", (customer, last, n)
        )
        now = time.time()
        self._overtaken.update((number, now) for (number,) in skipped if number not in self._dead)
