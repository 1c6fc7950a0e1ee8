"""Writes events on a plain connection of a database driver, at once and in the transaction that is open there.

The kind of a connection is known by the name of its class, so that no driver has to be installed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from onward.errors import BadSetting
from onward.outbox.inserts import Dialect, Marks, OutboxEntry, WriteStep, incomplete_locks, refusal, steps

if TYPE_CHECKING:
    from onward.outbox.outbox import Outbox

_IDLE = 0  # psycopg's and psycopg2's status of a connection without a transaction
_IN_TRANSACTION = 1  # a bit of the status that MariaDB sends with each answer
SUPPORTED = (
    "SQLAlchemy's Session, AsyncSession, scoped_session, async_scoped_session, Connection and AsyncConnection, and "
    "connections of psycopg, psycopg2, asyncpg, PyMySQL, mysqlclient and sqlite3; with Django use onward.django"
)


class Driver(NamedTuple):
    """`is_open`: a transaction is open, or the next statement opens one."""

    dialect: Dialect
    marks: Marks
    is_open: Callable[[Any], bool]
    cure: str
    is_async: bool = False


def _psycopg_open(connection: Any) -> bool:
    return not connection.autocommit or connection.info.transaction_status != _IDLE


def _asyncpg_open(connection: Any) -> bool:
    return bool(connection.is_in_transaction())


def _pymysql_open(connection: Any) -> bool:
    return not connection.get_autocommit() or bool(connection.server_status & _IN_TRANSACTION)


def _mysqlclient_open(connection: Any) -> bool:
    return not connection.get_autocommit()


def sqlite_open(connection: Any) -> bool:
    autocommit = getattr(connection, "autocommit", -1)  # since Python 3.12; -1: isolation_level decides
    automatic = connection.isolation_level is not None if autocommit == -1 else not autocommit
    return automatic or connection.in_transaction


_psycopg = Driver("postgresql", "%s", _psycopg_open, "use `with connection.transaction():`, or autocommit=False")
_asyncpg = Driver("postgresql", "$", _asyncpg_open, "use `async with connection.transaction():`", is_async=True)
_pymysql = Driver("mariadb", "%s", _pymysql_open, "call connection.begin(), or connect with autocommit=False")
_sqlite3 = Driver("sqlite", "?", sqlite_open, "execute BEGIN first, or connect without isolation_level=None")
_DRIVERS = {
    ("psycopg", "Connection"): _psycopg,
    ("psycopg", "AsyncConnection"): _psycopg._replace(
        is_async=True, cure="use `async with connection.transaction():`, or autocommit=False"
    ),
    ("psycopg2", "connection"): _psycopg._replace(cure="set connection.autocommit = False"),
    ("psycopg2cffi", "connection"): _psycopg._replace(cure="set connection.autocommit = False"),
    ("asyncpg", "Connection"): _asyncpg,
    ("asyncpg", "PoolConnectionProxy"): _asyncpg,
    ("pymysql", "Connection"): _pymysql,
    ("MySQLdb", "Connection"): _pymysql._replace(is_open=_mysqlclient_open, cure="call connection.autocommit(False)"),
    ("sqlite3", "Connection"): _sqlite3,
}


def driver_of(connection: Any) -> Driver | None:
    """None: it is not a connection of a driver that we know."""
    names = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(connection).__mro__)
    return next((_DRIVERS[name] for name in names if name in _DRIVERS), None)


def write(
    connection: Any, driver: Driver, outbox: "Outbox", entries: Sequence[OutboxEntry]
) -> Callable[[], None] | None:
    """Returns a function to call after the commit, if the database is the broker itself."""
    _check(connection, driver, is_async=False)
    if driver.dialect == "sqlite":
        ring = outbox.app.append_in(connection, [entry.event for entry in entries])
        if ring is not None:
            return ring
    cursor = connection.cursor()
    try:
        for step in steps(driver.dialect, driver.marks, outbox.table, entries):
            with refusals(driver.dialect, outbox.table):
                cursor.execute(step.sql, step.values)
            if step.rows is not None:
                check_rows(step, cursor.fetchall(), outbox.table)
    finally:
        cursor.close()
    return None


async def write_async(connection: Any, driver: Driver, outbox: "Outbox", entries: Sequence[OutboxEntry]) -> None:
    _check(connection, driver, is_async=True)
    for step in steps(driver.dialect, driver.marks, outbox.table, entries):
        values = (step.values,) if driver.marks == "%s" else step.values
        with refusals(driver.dialect, outbox.table):
            await connection.execute(step.sql, *values)


@contextmanager
def refusals(dialect: Dialect, table: str) -> Iterator[None]:
    """Turns an error of a driver into BadOutbox, if the table or the rights are its cause. SQLAlchemy and Django put
    their own errors around those of drivers."""
    try:
        yield
    except Exception as error:
        known = refusal(getattr(error, "orig", None) or error.__cause__ or error, dialect, table)
        if known is None:
            raise
        raise known from error


def check_rows(step: WriteStep, found: Sequence[Any], table: str) -> None:
    if step.rows is not None and len(found) != step.rows:
        raise incomplete_locks(table)


def _check(connection: Any, driver: Driver, *, is_async: bool) -> None:
    kind = f"{type(connection).__module__.partition('.')[0]}.{type(connection).__name__}"
    if driver.is_async != is_async:
        call = "await outbox.add_async(...)" if driver.is_async else "outbox.add(...)"
        raise BadSetting(f"a connection of type {kind} needs {call}")
    if not driver.is_open(connection):
        raise BadSetting(f"this {kind} has no open transaction, so the event would be committed alone: {driver.cure}")
