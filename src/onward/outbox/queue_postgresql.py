"""Connections of the queue store to PostgreSQL."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from onward.errors import OutboxError
from onward.outbox.postgresql import PostgresListener, begin, connect, translated
from onward.outbox.queue_connections import LONGEST_LOCK_S, QueueConnection, RelayBell

# The statistics of a queue are often those of an empty table. Then the planner would fetch a whole backlog and sort it.
_IN_INDEX_ORDER = "SET LOCAL enable_bitmapscan = off; SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off"


class PostgresConnection(QueueConnection):
    faults = (OSError,)  # `translated` catches those of psycopg

    def __init__(self, url: str, table: str) -> None:
        super().__init__(url, table)
        self._raw = connect(url)

    def limit_pauses(self, lease_s: float) -> None:
        pause_s = lease_s / 3
        self.begin = begin(lock_s=min(pause_s + 1, LONGEST_LOCK_S), idle_s=pause_s)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In a transaction, because the role's own isolation level may be SERIALIZABLE. Then each read could make a
        writer's transaction fail."""
        with self.transaction():
            self.run(_IN_INDEX_ORDER)
            yield

    def check_server(self) -> None:
        ((replica,),) = self.rows("SELECT pg_is_in_recovery()")
        if replica:
            raise self._read_only("it is a replica")

    def identity(self) -> str:
        ((allowed, database, table),) = self.rows(
            "SELECT has_function_privilege('pg_control_system()', 'EXECUTE'), oid, %s::regclass::oid FROM pg_database "
            "WHERE datname = current_database()",
            self.table,
        )
        cluster = self.rows("SELECT system_identifier FROM pg_control_system()")[0][0] if allowed else "-"
        return f"cluster {cluster}, database {database}, table {table}"

    def bell(self) -> RelayBell:
        return PostgresListener(self.url, self.table.rpartition(".")[2])

    @contextmanager
    def _executed(self, statement: str, values: Sequence[Any]) -> Iterator[Any]:
        with translated(self.url, self.table), super()._executed(statement, values) as cursor:
            yield cursor

    def _ours(self, error: Exception) -> OutboxError:
        return self._unreachable(str(error))
