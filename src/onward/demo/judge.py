"""The judge: who was promised what, and what became of it.

It reads the shop's orders, the workers' effects and the numbers of the dead letters, and imports nothing of Onward:
the path that it judges has no say in the verdict.
"""

import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PUBLISHED, HANDLED = 1, 2

# While the path runs, an order that a later one of its customer overtook may still be on its way into the dead
# letters, or be taken over from a killed worker. After this long it is neither.
LOST_AFTER_S = 10.0


class Balance(NamedTuple):
    """Where every published order stands: published = handled + dead + in_flight + lost."""

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


class Effect(NamedTuple):
    """A row of the effects, and whether it completed its order for the first time."""

    seq: int
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
    published: Sequence[tuple[int, str]]  # number and customer
    effects: Sequence[Effect]


class Judge:
    """Keeps the balance while rows are added. A new judge on the same folder comes to the same verdict."""

    def __init__(self, folder: Path) -> None:
        self._orders = sqlite3.connect(folder / "orders.db", timeout=10, isolation_level=None)
        self._effects = sqlite3.connect(folder / "effects.db", timeout=10, isolation_level=None)
        self._read_to = [0, 0]  # the last published number and the last effect seen
        self._marks = bytearray(1)  # by order number: PUBLISHED | HANDLED
        self._last: dict[str, int] = {}  # customer -> highest n completed
        self._overtaken: dict[int, float] = {}  # order number -> when a later one of its customer was completed
        self._dead: set[int] = set()
        self._published = self._handled = self._inverted = self._duplicates = 0

    def close(self) -> None:
        self._orders.close()
        self._effects.close()

    def read(self) -> News:
        """Take in what was written since the last call."""
        effects = self._effects.execute(
            "SELECT seq, worker, pid, number, customer, n, attempt, waited_s, outcome = 'done' FROM effects"
            " WHERE seq > ? ORDER BY seq",
            (self._read_to[1],),
        ).fetchall()
        published = self._orders.execute(
            "SELECT number, customer FROM published JOIN orders USING (number) WHERE number > ? ORDER BY number",
            (self._read_to[0],),
        ).fetchall()
        for number, _ in published:
            self._mark(number, PUBLISHED)
            self._read_to[0] = number
        for seq, *_ in effects[-1:]:
            self._read_to[1] = seq
        return News(published, [self._effect(row) for row in effects])

    def bury(self, numbers: Iterable[int]) -> Sequence[int]:
        """These are in the dead letters. Returns those not known before."""
        fresh = [number for number in numbers if not self.is_done(number)]
        for number in fresh:
            self._dead.add(number)
            self._overtaken.pop(number, None)
        return fresh

    def is_done(self, number: int) -> bool:
        return self._is(number, HANDLED) or number in self._dead

    @property
    def overtaken(self) -> bool:
        """Some order was passed by a later one of its customer: it should be in the dead letters by now."""
        return bool(self._overtaken)

    def balance(self) -> Balance:
        """While the path runs: what is not done is in flight, unless it was overtaken for too long."""
        overdue = time.time() - LOST_AFTER_S
        lost = [number for number, since in self._overtaken.items() if since < overdue and self._is(number, PUBLISHED)]
        return self._balance(len(lost))

    def verdict(self) -> Balance:
        """When the path has come to rest: whatever is not done is lost."""
        return self._balance(len(self.missing()))

    def missing(self) -> Sequence[int]:
        """Published orders that are neither handled nor in the dead letters."""
        return [
            number
            for number, mark in enumerate(self._marks)
            if mark & PUBLISHED and not mark & HANDLED and number not in self._dead
        ]

    def wrongly_dead(self) -> Sequence[int]:
        """Orders that were given up though nothing was wrong with them."""
        poison = {number for (number,) in self._orders.execute("SELECT number FROM orders WHERE poison")}
        return sorted(self._dead - poison)

    def _balance(self, lost: int) -> Balance:
        done = self._handled + len(self._dead)
        open_ = self._published - done - lost
        return Balance(self._published, self._handled, len(self._dead), open_, lost, self._inverted, self._duplicates)

    def _effect(self, row: tuple[Any, ...]) -> Effect:
        *_, number, customer, n, _, _, done = row
        return Effect._make([*row, bool(done) and self._complete(number, customer, n)])

    def _complete(self, number: int, customer: str, n: int) -> bool:
        if self._is(number, HANDLED):
            self._duplicates += 1
            return False
        self._mark(number, HANDLED)
        last = self._last.get(customer, 0)
        if n > last:
            self._last[customer] = n
            self._overtake(customer, last, n)
        elif number not in self._dead:  # given up and later replayed is no inversion
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

    def _is(self, number: int, bit: int) -> bool:
        return number < len(self._marks) and bool(self._marks[number] & bit)

    def _mark(self, number: int, bit: int) -> None:
        if number >= len(self._marks):
            self._marks.extend(bytes(number + 1024 - len(self._marks)))
        before = self._marks[number]
        self._marks[number] = after = before | bit
        self._published += after & ~before & PUBLISHED
        # An order can be handled a moment before its publish returns; it counts when both have happened.
        self._handled += before != after == PUBLISHED | HANDLED
