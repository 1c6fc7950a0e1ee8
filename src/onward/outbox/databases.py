"""Connections to an outbox's database for commands that run a few statements: `onward outbox` and the schema.

They use our own drivers, whatever driver the URL names: psycopg, PyMySQL or sqlite3.
"""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from onward.errors import BadOutbox, BadSetting, MissingExtra, OutboxError, OutboxUnreachable
from onward.settings import redacted

_DIALECTS = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mariadb",
    "mariadb": "mariadb",
    "sqlite": "sqlite",
}
_MARIADB_FILES = ("unix_socket", "ssl_ca", "ssl_cert", "ssl_key")  # options in the query of a URL
_CONNECT_S = 10
_BUSY_S = 30.0
_TABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,40}\.)?[A-Za-z_][A-Za-z0-9_]{0,40}")

# PostgreSQL's states and MariaDB's numbers
_FORBIDDEN = {"42501", 1044, 1142, 1143, 1227, 1370}
_READ_ONLY = {"25006", 1290, 1792, 1836}
_NO_TABLE = {"42P01", 1146}
_NO_COLUMN = {"42703", 1054}
_NO_SCHEMA = {"3F000", 1049}
_TAKEN = {"42P07", "42723", 1050, 1304}
_LOST = {1053, 1927, 2003, 2006, 2013}


def dialect_of(url: str) -> str:
    """postgresql, mariadb or sqlite. BadSetting for another database."""
    scheme = url.partition("://")[0].partition("+")[0].lower()
    if scheme not in _DIALECTS:
        raise BadSetting(
            f"the outbox's database {redacted(url)}: an outbox works on PostgreSQL, MariaDB, MySQL and SQLite; "
            "write a URL such as postgresql://user@host/database"
        )
    return _DIALECTS[scheme]


def check_table(table: str) -> str:
    """Return the name. BadSetting if it is not one that needs no quotes."""
    if not _TABLE.fullmatch(table):
        raise BadSetting(
            f"the outbox's table {table!r}: use at most 41 letters, digits and _, with or without `schema.` before them"
        )
    return table


class OutboxConnection:
    """A connection that runs statements with %s for each value. Errors are OutboxError."""

    def __init__(self, url: str, raw: Any, rights: str) -> None:
        self.dialect = dialect_of(url)
        self.where = redacted(url)
        self._raw = raw
        self._rights = rights

    def run(self, statement: str, *values: Any) -> int:
        """Returns the number of rows that it changed."""
        with self._cursor(statement, values) as cursor:
            count: int = cursor.rowcount
            return count

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._cursor(statement, values) as cursor:
            return [tuple(row) for row in cursor.fetchall()]

    def value(self, statement: str, *values: Any) -> Any:
        """The first column of the first row; None if there is no row."""
        found = self.rows(statement, *values)
        return found[0][0] if found else None

    def has_table(self, table: str) -> bool:
        home, _, name = table.rpartition(".")
        if self.dialect == "postgresql":
            return self.value("SELECT to_regclass(%s)", table) is not None
        if self.dialect == "sqlite":
            schema = f"{home or 'main'}.sqlite_master"
            return self.value(f"SELECT 1 FROM {schema} WHERE name = %s COLLATE NOCASE", name) is not None
        try:  # information_schema would hide a table that this user may not use
            self.rows(f"SELECT 1 FROM {table} LIMIT 0")
        except BadOutbox as error:
            if _code(error.__cause__) in _NO_TABLE:
                return False
            raise
        return True

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits at the end of the block, and rolls back if it raises. Other statements commit at once."""
        self.run("BEGIN IMMEDIATE" if self.dialect == "sqlite" else "BEGIN")
        try:
            yield
            self._do(self._raw.commit)
        except BaseException:
            self._abort()
            raise

    def close(self) -> None:
        self._raw.close()

    @contextmanager
    def _cursor(self, statement: str, values: Sequence[Any]) -> Iterator[Any]:
        cursor = self._raw.cursor()
        try:
            if self.dialect == "sqlite":
                self._do(cursor.execute, statement.replace("%s", "?"), values)
            else:
                self._do(cursor.execute, statement, values or None)
            yield cursor
        finally:
            cursor.close()

    def _do(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            if (known := outbox_error(error, self.where, self._rights)) is None:
                raise
            raise known from error

    def _abort(self) -> None:
        try:
            self._raw.rollback()
        except Exception as error:
            if _driver(error) is None:
                raise


@contextmanager
def connected(url: str, *, rights: str, create: bool = False) -> Iterator[OutboxConnection]:
    """A connection until the end of the block. `rights`: what to do if this user lacks rights. `create`: create the
    file of a SQLite database."""
    connection = OutboxConnection(url, _connect(url, create), rights)
    try:
        yield connection
    finally:
        connection.close()


def outbox_error(error: Exception, where: str, rights: str) -> OutboxError | None:
    """The error of a driver as one of ours; None if it has another source. `where`: the database, without its password.
    `rights`: what to do if this user lacks rights."""
    if (driver := _driver(error)) is None:
        return None
    code, text = _code(error), _text(error)
    if _is_loss(driver, code, text):
        return OutboxUnreachable(f"{where}: the outbox's database cannot be used: {text}; is it running?")
    return BadOutbox(f"{where}: {text}{_cure(code, text, rights)}")


def lacks_column(error: OutboxError) -> bool:
    """Did the statement fail because a table has other columns?"""
    cause = error.__cause__
    return _code(cause) in _NO_COLUMN or str(cause).startswith("no such column")


def _cure(code: Any, text: str, rights: str) -> str:
    if code in _FORBIDDEN:
        return f"; {rights}"
    if code in _READ_ONLY or "readonly database" in text:
        return "; is it a replica? An outbox needs the primary server, and a user that may write"
    if code in _NO_TABLE or text.startswith("no such table"):
        return "; run `onward outbox init URL`"
    if code in _NO_SCHEMA or text.startswith("unknown database"):
        return "; create it first, or name an existing one with --table"
    if code in _TAKEN or text.endswith("already exists"):
        return "; choose another name with --table"
    return ""


def _driver(error: BaseException | None) -> str | None:
    """The driver that raised it; None if none did."""
    module = type(error).__module__.partition(".")[0]
    return module if module in ("psycopg", "pymysql", "sqlite3") else None


def _code(error: BaseException | None) -> Any:
    """PostgreSQL's state, or MariaDB's number."""
    number = error.args[0] if error is not None and error.args else None
    return number if isinstance(number, int) else getattr(error, "sqlstate", None)


def _text(error: Exception) -> str:
    """In one line, without MariaDB's number and the line of SQL that PostgreSQL shows."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    return " ".join(str(primary or (error.args[-1] if error.args else error)).split())


def _is_loss(driver: str, code: Any, text: str) -> bool:
    """Is the database, or the connection to it, not there now?"""
    if driver == "sqlite3":
        return text == "database is locked"
    if driver == "pymysql":
        return code in _LOST
    return not isinstance(code, str) or code[:2] in ("08", "53") or code[:3] == "57P"


def _connect(url: str, create: bool) -> Any:
    dialect = dialect_of(url)
    try:
        if dialect == "postgresql":
            from onward.outbox import postgresql

            return postgresql.connect(url)
        return _sqlite(url, create) if dialect == "sqlite" else _mariadb(url)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the outbox needs {error.name}, which is not installed: pip install 'onward[outbox]'"
        ) from error
    except Exception as error:
        if _driver(error) is None:
            raise
        raise OutboxUnreachable(
            f"the outbox's database {redacted(url)} cannot be opened: {_text(error)}; is it running, is the URL right?"
        ) from error


def _mariadb(url: str) -> Any:
    import pymysql

    parts = urlsplit(url)
    try:
        port = parts.port or 3306
    except ValueError as error:
        raise BadSetting(f"the outbox's database {redacted(url)}: {error}; correct the port") from None
    query = dict(parse_qsl(parts.query))
    files: dict[str, Any] = {name: query[name] for name in _MARIADB_FILES if name in query}
    return pymysql.connect(
        host=parts.hostname or "localhost",
        port=port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.lstrip("/")),
        charset="utf8mb4",
        autocommit=True,
        sql_mode="STRICT_ALL_TABLES",  # procedures remember it
        connect_timeout=_CONNECT_S,
        **files,
    )


def sqlite_path(url: str) -> Path:
    """The file of a SQLite database. BadSetting if there is none."""
    path = url.partition(":///")[2].partition("?")[0]
    if not path or path.startswith((":memory:", "file:")):
        raise BadSetting(f"the outbox's database {redacted(url)}: name a file. A relay cannot see a database in memory")
    return Path(path)


def _sqlite(url: str, create: bool) -> Any:
    path = sqlite_path(url)
    if not create and not path.exists():
        raise BadOutbox(f"the outbox's database {redacted(url)} does not exist; run `onward outbox init URL`")
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
