"""Which store an outbox has: by its database and, on PostgreSQL, by its mode."""

from contextlib import closing
from typing import Any, cast

from onward.outbox.base import OutboxStore
from onward.outbox.databases import check_table, dialect_of
from onward.outbox.queue_connections import connect
from onward.outbox.queue_store import QueueStore


def open_store(url: str, table: str) -> OutboxStore:
    """The store of an outbox, not opened yet. BadSetting: an outbox does not work on this database."""
    if dialect_of(url) == "postgresql":
        return cast("OutboxStore", _PostgresStore(url, check_table(table)))
    return QueueStore(url, table)


class _PostgresStore:
    """The log store or the queue store: the tables decide, each time it is opened."""

    def __init__(self, url: str, table: str) -> None:
        self._url = url
        self._table = table
        self._mode = ""
        self._chosen: Any = None

    def open(self) -> None:
        self.close()
        if (mode := self._stored_mode()) != self._mode:
            self._mode, self._chosen = mode, self._store(mode)
        self._chosen.open()

    def close(self) -> None:
        if self._chosen is not None:
            self._chosen.close()

    def __getattr__(self, name: str) -> Any:
        """All other methods are those of the chosen store."""
        return getattr(self._chosen, name)

    def _stored_mode(self) -> str:
        with closing(connect(self._url, self._table)) as db:
            found = db.rows(f"SELECT value FROM {self._table}_meta WHERE name = 'mode'")
        return str(found[0][0]) if found else "log"

    def _store(self, mode: str) -> OutboxStore:
        if mode == "queue":
            return QueueStore(self._url, self._table)
        from onward.outbox.postgresql_log import PostgresLogStore

        return PostgresLogStore(self._url, self._table)
