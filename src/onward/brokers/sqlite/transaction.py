"""The writer's transaction as jobs and chores see it, and the guard that lets each of them fail alone."""

import sqlite3
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from onward import clock

T = TypeVar("T")


class Transaction:
    """A transaction of the writer. `now` is on the clock of the leases, `wall` is Unix time."""

    __slots__ = ("db", "now", "rings", "wall")

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.now = clock.now()
        self.wall = time.time()
        self.rings = False

    def ring(self) -> None:
        """Wake all readers after the commit of this transaction."""
        self.rings = True


class Chore(Protocol):
    """Work that becomes due again and again. While it runs, `due` is infinity."""

    due: float

    def work(self, tx: Transaction) -> Callable[[], None]:
        """Do the work. Returns a function that the writer calls after the commit, and which sets `due` again."""

    def failed(self, error: Exception) -> None:
        """Called if the work was not committed. The writer will call `work` again."""


class Outcome(msgspec.Struct, Generic[T]):
    result: T | None
    error: Exception | None


def guarded(tx: Transaction, work: Callable[[Transaction], T]) -> Outcome[T]:
    """Run the work in a savepoint, so that its error rolls back only this work. If the error has ended the whole
    transaction, raise it as sqlite3.Error."""
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
