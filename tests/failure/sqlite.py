"""SQLite under the failure suites."""

import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from onward.event import Event


class SqliteHarness:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "events.db"
        self.url = f"sqlite:///{self.path}"

    def refuse(self, event: Event) -> AbstractContextManager[None]:
        raise NotImplementedError(f"no scenario here has {event.id} refused")

    @contextmanager
    def refuse_aside(self) -> Iterator[None]:
        """The database itself refuses every record."""
        self._execute(
            "CREATE TRIGGER onward_test_refuse BEFORE INSERT ON onward_aside "
            "BEGIN SELECT RAISE(ABORT, 'refused by the test'); END"
        )
        try:
            yield
        finally:
            self._execute("DROP TRIGGER onward_test_refuse")

    def _execute(self, sql: str) -> None:
        with closing(sqlite3.connect(self.path, timeout=10)) as connection, connection:
            connection.execute(sql)
