"""The broker suite on SQLite: the whole of it at once, and again under load."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from onward.event import Event
from onward.testing import BrokerSuite, BrokerSuiteUnderLoad


class SqliteHarness:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "events.db"
        self.url = f"sqlite:///{self.path}"

    @contextmanager
    def refuse(self, event: Event) -> Iterator[None]:
        """The database itself refuses the record that holds this event."""
        self._execute(
            "CREATE TRIGGER onward_test_refuse BEFORE INSERT ON onward_log "
            f"WHEN instr(NEW.data, X'{event.id.encode().hex()}') BEGIN SELECT RAISE(ABORT, 'refused by the test'); END"
        )
        try:
            yield
        finally:
            self._execute("DROP TRIGGER onward_test_refuse")

    def _execute(self, sql: str) -> None:
        with closing(sqlite3.connect(self.path, timeout=10)) as connection, connection:
            connection.execute(sql)


@pytest.fixture
def harness(tmp_path: Path) -> SqliteHarness:
    return SqliteHarness(tmp_path)


class TestSqlite(BrokerSuite):
    pass


class TestSqliteUnderLoad(BrokerSuiteUnderLoad):
    pass
