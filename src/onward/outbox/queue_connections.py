"""A connection of the queue store: the same methods for every database. The subclasses are in queue_mariadb,
queue_postgresql and queue_sqlite.

A connection commits each statement by itself, except in `transaction`. Its errors are OutboxError.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from onward.errors import BadOutbox, MissingExtra, OutboxError, OutboxUnreachable
from onward.outbox.databases import dialect_of
from onward.settings import redacted

LONGEST_LOCK_S = 8  # shorter than the time within which a server must answer, so that it reports what it waits for


class RelayBell(Protocol):
    """Waits for a writer's commit. One thread waits, and another one closes it, which ends the wait."""

    def wait(self, timeout_s: float) -> None: ...
    def close(self) -> None: ...


class SleepingBell:
    """No bell: `wait` sleeps until the time is over or the bell is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def wait(self, timeout_s: float) -> None:
        self._closed.wait(timeout_s)

    def close(self) -> None:
        self._closed.set()


class QueueConnection(ABC):
    begin = "BEGIN"
    faults: tuple[type[Exception], ...]  # what the driver raises

    def __init__(self, url: str, table: str) -> None:
        self.url = url
        self.table = table
        self.where = redacted(url)
        self._raw: Any = None

    def rows(self, statement: str, *values: Any) -> Sequence[tuple[Any, ...]]:
        with self._executed(statement, values) as cursor:
            found: Sequence[tuple[Any, ...]] = cursor.fetchall()
            return found

    def run(self, statement: str, *values: Any) -> int:
        """Returns the number of rows that it changed, or found as they should be."""
        with self._executed(statement, values) as cursor:
            count: int = cursor.rowcount
            return count

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits at the end of the block, and rolls back if it raises. It sees what others commit meanwhile."""
        self.start()
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            with suppress(OutboxError):
                self.run("ROLLBACK")
            raise

    def start(self) -> None:
        """Begin a transaction."""
        self.run(self.begin)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For statements that only read. They lock no rows."""
        yield

    def limit_pauses(self, lease_s: float) -> None:  # noqa: B027 - SQLite cannot
        """Let the database end a transaction of ours that pauses for a third of the lease, as in a process that was
        suspended. And do not wait for others much longer."""

    @abstractmethod
    def check_server(self) -> None:
        """BadOutbox if this database cannot have an outbox, for other reasons than its tables and rights."""

    @abstractmethod
    def identity(self) -> str:
        """Differs from that of every copy of this database."""

    def bell(self) -> RelayBell:
        return SleepingBell()

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            with suppress(*self.faults):
                raw.close()

    @abstractmethod
    def _ours(self, error: Exception) -> OutboxError:
        """The driver's error as one of ours."""

    @contextmanager
    def _executed(self, statement: str, values: Sequence[Any]) -> Iterator[Any]:
        try:
            cursor = self._raw.cursor()
            try:
                cursor.execute(statement, *([values] if values else []))
                yield cursor
            finally:
                cursor.close()
        except self.faults as error:
            raise self._ours(error) from error

    def _missing(self, text: str) -> BadOutbox:
        return BadOutbox(f"{self.where} has no outbox {self.table} ({text}): run `onward outbox init URL`")

    def _read_only(self, text: str) -> BadOutbox:
        return BadOutbox(f"{self.where} refuses writes ({text}): use the primary server, not a replica")

    def _unreachable(self, text: str) -> OutboxUnreachable:
        return OutboxUnreachable(f"the outbox's database {self.where} cannot be used ({text}); is it running?")


def connect(url: str, table: str) -> QueueConnection:
    """OutboxUnreachable if no server answers. MissingExtra if its driver is not installed."""
    try:
        kind = _kind(dialect_of(url))
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the outbox needs {error.name}, which is not installed: pip install 'onward[outbox]'"
        ) from error
    return kind(url, table)


def _kind(dialect: str) -> Callable[[str, str], QueueConnection]:
    if dialect == "mariadb":
        from onward.outbox.queue_mariadb import MariaDBConnection

        return MariaDBConnection
    if dialect == "postgresql":
        from onward.outbox.queue_postgresql import PostgresConnection

        return PostgresConnection
    from onward.outbox.queue_sqlite import SqliteConnection

    return SqliteConnection
