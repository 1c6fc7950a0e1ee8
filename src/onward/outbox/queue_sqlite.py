"""Connections of the queue store to a SQLite file, and its bell."""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from onward.errors import BadOutbox, OutboxError, OutboxUnreachable
from onward.outbox.databases import sqlite_path
from onward.outbox.queue_connections import QueueConnection, RelayBell, SleepingBell

_BUSY_S = 5.0
_TRY_S = 0.001  # between two tries to begin
_LOOK_S = 0.01  # between two looks at a file

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_WRONG = {
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_NOTADB,
}


class SqliteConnection(QueueConnection):
    begin = "BEGIN IMMEDIATE"
    faults = (sqlite3.Error,)

    def __init__(self, url: str, table: str) -> None:
        super().__init__(url, table)
        self.path = sqlite_path(url)
        if not self.path.exists():
            raise self._missing("the file does not exist")
        try:
            self._raw = _open(self.path, _BUSY_S)
        except sqlite3.Error as error:
            raise self._ours(error) from error
        self._file = self._stat()

    def start(self) -> None:
        """Begin a transaction. SQLite's own wait sleeps up to 100 ms between two tries, so that busy writers would keep
        the lock from us for ever."""
        self._raw.execute("PRAGMA busy_timeout = 0")
        ends = time.monotonic() + _BUSY_S
        try:
            while not self._begun():
                if time.monotonic() >= ends:
                    raise OutboxUnreachable(
                        f"{self.where}: other connections have been writing for {_BUSY_S:g} s; make their transactions "
                        "shorter, or end the one that hangs"
                    )
                time.sleep(_TRY_S)
        finally:
            self._raw.execute(f"PRAGMA busy_timeout = {_BUSY_S * 1000:.0f}")

    def _begun(self) -> bool:
        try:
            self._raw.execute(self.begin)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY:
                return False
            raise self._ours(error) from error
        return True

    def check_server(self) -> None:
        """There is nothing to check: the first transaction shows whether the file can be written."""

    def identity(self) -> str:
        if (found := self._stat()) != self._file:
            raise OutboxUnreachable(f"{self.where} was replaced while it was open; connecting to the new file")
        return f"file {found}"

    def bell(self) -> RelayBell:
        return FileBell(self.path)

    def _stat(self) -> str:
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise OutboxUnreachable(f"{self.where} cannot be opened: {error}") from error
        return f"{found.st_dev}:{found.st_ino}"

    @contextmanager
    def _executed(self, statement: str, values: Sequence[Any]) -> Iterator[Any]:
        with super()._executed(statement.replace("%s", "?"), values) as cursor:
            yield cursor

    def _ours(self, error: Exception) -> OutboxError:
        code, text = getattr(error, "sqlite_errorcode", 0) & 0xFF, str(error)
        if code in _BUSY:
            return OutboxUnreachable(
                f"{self.where}: {text}: another connection has been writing for {_BUSY_S:g} s; end its transaction"
            )
        if code == sqlite3.SQLITE_READONLY:
            return BadOutbox(
                f"{self.where} cannot be written ({text}): give this user write access to it and its folder"
            )
        if text.startswith(("no such table", "no such column")):
            return self._missing(text)
        return BadOutbox(f"{self.where}: {text}") if code in _WRONG else self._unreachable(text)


def _open(path: Path, busy_s: float) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?mode=rw"
    raw = sqlite3.connect(address, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False)
    raw.text_factory = _text
    return raw


def _text(stored: bytes) -> str:
    """Another program may have stored a text that is not UTF-8."""
    return stored.decode("utf-8", "replace")


class FileBell(SleepingBell):
    """Rings when another connection has committed to a SQLite file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._guard = threading.Lock()  # `wait` and `close` have different threads
        self._raw: sqlite3.Connection | None = None
        self._seen: int | None = None
        self._changed()  # a commit from now on counts

    def wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not self._changed() and not self._closed.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return

    def close(self) -> None:
        super().close()
        with self._guard:
            if self._raw is not None:
                self._raw.close()
                self._raw = None

    def _changed(self) -> bool:
        """Since the last look. An error is no news: the other methods of the store report it."""
        with self._guard, suppress(sqlite3.Error):
            if self._closed.is_set():
                return False
            self._raw = self._raw or _open(self._path, 0.0)
            seen, (self._seen,) = self._seen, self._raw.execute("PRAGMA data_version").fetchone()
            return seen is not None and seen != self._seen
        return False
