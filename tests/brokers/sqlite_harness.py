"""The harness that runs the public suites on SQLite: where its file is, and how to make it refuse."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from onward.event import Event


class SqliteHarness:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "events.db"
        self.url = f"sqlite:///{self.path}"

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)

    @contextmanager
    def refuse(self, event: Event) -> Iterator[None]:
        """The database itself refuses the record batch with this event."""
        with self._refusing("onward_log", f"WHEN instr(NEW.data, X'{event.id.encode().hex()}')"):
            yield

    @contextmanager
    def refuse_aside(self, larger_than: int = 0) -> Iterator[None]:
        """The database itself refuses records of the aside."""
        with self._refusing("onward_aside", f"WHEN length(NEW.data) > {larger_than}"):
            yield

    @contextmanager
    def _refusing(self, table: str, when: str) -> Iterator[None]:
        self._execute(
            f"CREATE TRIGGER onward_test_refuse BEFORE INSERT ON {table} {when} "
            "BEGIN SELECT RAISE(ABORT, 'refused by the test'); END"
        )
        try:
            yield
        finally:
            self._execute("DROP TRIGGER onward_test_refuse")

    def _execute(self, sql: str) -> None:
        with closing(sqlite3.connect(self.path, timeout=10)) as connection, connection:
            connection.execute(sql)
