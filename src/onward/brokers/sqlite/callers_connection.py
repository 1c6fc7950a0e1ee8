"""A connection of the application, as our statements need it."""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onward.brokers.sqlite.database import QueryResult
from onward.errors import BadSetting


class CallersConnection:
    """Runs our statements on a connection of the application: one of sqlite3, or SQLAlchemy's adapter for aiosqlite."""

    def __init__(self, connection: Any, driver: Any) -> None:
        self._connection = connection
        self._driver = driver

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> QueryResult:
        cursor = self._connection.cursor()
        cursor.execute(sql, parameters)
        found: QueryResult = cursor  # of some drivers, execute returns something else
        return found

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        self._connection.cursor().executemany(sql, parameters)

    @property
    def in_transaction(self) -> bool:
        return bool(self._driver.in_transaction)

    def is_on(self, path: Path) -> bool:
        """Whether its main database is this file. Raises BadSetting if it is a hard link to the file."""
        file = next(str(file) for _, name, file in self.execute("PRAGMA database_list") if name == "main")
        if file == str(path):
            return True
        if not file or not _is_one_file(file, path):  # a database in memory has no file
            return False
        if not _is_one_file(f"{file}-wal", f"{path}-wal"):
            raise BadSetting(
                f"{file} and {path} are two names (hard links) of one file; SQLite would write a log for each name and "
                f"damage the file. Connect to {path}, and remove the other name"
            )
        return True


@contextmanager
def borrowed(connection: Any) -> Iterator[CallersConnection | None]:
    """The application's connection, with plain rows and texts for our statements. None if it is not SQLite's."""
    driver = _driver(connection)
    if driver is None:
        yield None
        return
    before = driver.row_factory, driver.text_factory
    driver.row_factory, driver.text_factory = None, str
    try:
        yield CallersConnection(connection, driver)
    finally:
        driver.row_factory, driver.text_factory = before


def _driver(connection: Any) -> Any:
    if isinstance(connection, sqlite3.Connection):
        return connection
    driver = getattr(connection, "driver_connection", None)  # of SQLAlchemy's adapters for asyncio
    return driver if type(driver).__module__.partition(".")[0] == "aiosqlite" else None


def _is_one_file(one: str | Path, other: str | Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them does not exist
        return not os.path.exists(one) and not os.path.exists(other)
