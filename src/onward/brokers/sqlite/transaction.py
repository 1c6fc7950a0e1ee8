"""What jobs work with inside the writer's transaction, and the guard that lets each of them fail alone."""

import sqlite3
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from onward import clock

T = TypeVar("T")


class Transaction:
    """`now` is the clock of leases, `wall` is Unix time."""

    __slots__ = ("db", "now", "rings", "wall")

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.now = clock.now()
        self.wall = time.time()
        self.rings = False

    def ring(self) -> None:
        """Wake readers when this transaction is committed."""
        self.rings = True


class Chore(Protocol):
    """Work that falls due again and again. The writer sets `due` to infinity while it is being done."""

    due: float

    def work(self, tx: Transaction) -> Callable[[], None]:
        """Returns what is to be done once it is committed; that sets `due` again."""

    def failed(self, error: Exception) -> None:
        """Nothing of it was committed; it will be called again."""


class Outcome(msgspec.Struct, Generic[T]):
    result: T | None
    error: Exception | None


def guarded(tx: Transaction, work: Callable[[Transaction], T]) -> Outcome[T]:
    """Run the work in a savepoint. An error that ended the whole transaction goes through, as SQLite's error."""
    tx.db.execute("SAVEPOINT job")
    try:
        result = work(tx)
        tx.db.execute("RELEASE job")
    except Exception as error:
        if not tx.db.in_transaction:
            raise error if isinstance(error, sqlite3.Error) else sqlite3.OperationalError(str(error)) from error
        tx.db.execute("ROLLBACK TO job")
        tx.db.execute("RELEASE job")
        return Outcome(None, error)
    return Outcome(result, None)
