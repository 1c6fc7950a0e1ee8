"""A thread that reads through its own connection. In WAL mode, readers and the writer do not wait for each other."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from onward.brokers.sqlite.store import Store
from onward.errors import Closed

T = TypeVar("T")


class StoreReader:
    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"onward-{name}")
        self._db: sqlite3.Connection | None = None
        self._closed = False

    async def run(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run the query in one read transaction, so that it sees one moment of the store."""
        if self._closed:
            raise Closed(f"the reader of {self._store.path} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._query, query)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
            self._thread.shutdown(wait=False)

    def _query(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._db is None:
                self._db = self._store.connect()
            self._db.execute("BEGIN")
            try:
                found = query(self._db)
                self._store.check(self._db)
                return found
            finally:
                if self._db.in_transaction:
                    self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._store.explained(error) from error

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
