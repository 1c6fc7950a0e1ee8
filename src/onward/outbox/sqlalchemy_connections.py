"""Writes events on a Connection of SQLAlchemy, and watches the engines on which it does so."""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy import Dialect as SqlalchemyDialect

from onward.errors import BadSetting
from onward.outbox.connections import check_rows, refusals, sqlite_open
from onward.outbox.inserts import Dialect, Marks, OutboxEntry, steps

if TYPE_CHECKING:
    from onward.outbox.outbox import Outbox

Ring = Callable[[], None]

_DIALECTS: dict[str, Dialect] = {
    "postgresql": "postgresql",
    "mysql": "mariadb",
    "mariadb": "mariadb",
    "sqlite": "sqlite",
}
_MARKS: dict[str, Marks] = {"qmark": "?", "format": "%s", "pyformat": "%s", "numeric_dollar": "$", "numeric": ":"}
_RINGS = "onward.outbox.rings"


def write(connection: Connection, outbox: "Outbox", entries: Sequence[OutboxEntry]) -> Ring:
    """Returns a function to call after the commit."""
    dialect, marks = check_dialect(connection.dialect)
    if dialect == "sqlite":
        ring = outbox.app.append_in(connection.connection.dbapi_connection, [entry.event for entry in entries])
        if ring is not None:
            return ring
    for step in steps(dialect, marks, outbox.table, entries):
        with refusals(dialect, outbox.table):
            result = connection.exec_driver_sql(step.sql, step.values)
        if step.rows is not None:
            check_rows(step, result.all(), outbox.table)
    return outbox.ring


def add(connection: Connection, outbox: "Outbox", entry: OutboxEntry) -> None:
    """Write now. Rings when the connection returns to its pool, because its commit is not announced."""
    check_autocommit(connection)
    ring_later(connection, write(connection, outbox, [entry]))


def open_broker(connection: Connection, outbox: "Outbox") -> None:
    """If the database is the broker itself, open the broker before this transaction writes. Afterwards the broker could
    not create its tables, because SQLite has one writer at a time."""
    if connection.dialect.name == "sqlite" and outbox not in _with_open_broker:
        outbox.app.append_in(connection.connection.dbapi_connection, ())
        _with_open_broker.add(outbox)


_with_open_broker: "weakref.WeakSet[Outbox]" = weakref.WeakSet()


def ring_later(connection: Connection, ring: Ring) -> None:
    """Ring when the connection returns to its pool."""
    rings = connection.info.setdefault(_RINGS, [])
    if ring not in rings:
        rings.append(ring)
    if connection.engine not in _rung:
        event.listen(connection.engine, "checkin", _on_checkin)
        _rung.add(connection.engine)


_rung: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _on_checkin(dbapi_connection: Any, record: Any) -> None:
    for ring in record.info.pop(_RINGS, ()):
        ring()


def check_dialect(dialect: SqlalchemyDialect) -> tuple[Dialect, Marks]:
    if dialect.name not in _DIALECTS or dialect.paramstyle not in _MARKS:
        raise BadSetting(
            f"the outbox cannot write to {dialect.name} with {dialect.driver}: an outbox works on PostgreSQL, MariaDB, "
            "MySQL and SQLite"
        )
    return _DIALECTS[dialect.name], _MARKS[dialect.paramstyle]


def check_autocommit(connection: Connection) -> None:
    """BadSetting if each statement would be a transaction of its own. Asks the driver, not the database."""
    if not _is_transactional(check_dialect(connection.dialect)[0], connection):
        raise BadSetting(
            "this session or connection is in autocommit mode, so the event would be committed alone: use an engine "
            "without isolation_level='AUTOCOMMIT'"
        )


def _is_transactional(dialect: Dialect, connection: Connection) -> bool:
    pooled = connection.connection
    raw: Any = pooled.dbapi_connection
    if dialect == "sqlite":
        return sqlite_open(pooled.driver_connection)
    if dialect == "mariadb" and hasattr(pooled.driver_connection, "get_autocommit"):
        raw = pooled.driver_connection
        return not raw.get_autocommit()
    return getattr(raw, "autocommit", False) is not True
