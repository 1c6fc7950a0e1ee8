"""Publishing inside a transaction of the application, which has its own connection to the file.

The application may roll the transaction back, or a part of it, and we do not learn of that. So nothing of it is
remembered. Positions are read from the store each time, while the transaction holds SQLite's write lock.

The lock file is never taken here. The application may already hold SQLite's lock, and the writer takes the two locks in
the other order.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from onward import clock
from onward.brokers.core.publishing import check_events
from onward.brokers.sqlite import leases
from onward.brokers.sqlite.backlog import Backlog
from onward.brokers.sqlite.bells import Bells
from onward.brokers.sqlite.callers_connection import CallersConnection, borrowed
from onward.brokers.sqlite.outgoing import Appender, Bundle, Packer
from onward.brokers.sqlite.store import Store, error_code
from onward.errors import BadSetting, PublishError, StoreLost
from onward.event import Event

# It changes nothing, but it takes SQLite's write lock. It must be the first statement: sqlite3 begins a transaction
# before a statement that writes, and not before one that reads.
_LOCK = "UPDATE onward_meta SET value = value WHERE 0"
_AUTOCOMMIT = (
    "this connection commits each statement by itself (autocommit), so an event would be stored even if your own data "
    "is not. Begin a transaction first: connection.execute('BEGIN IMMEDIATE') with sqlite3; transaction.atomic() with "
    "Django; no isolation_level='AUTOCOMMIT' with SQLAlchemy"
)
_IMMEDIATE = (
    "Run the transaction again. To prevent this, begin it with BEGIN IMMEDIATE, so that SQLite waits for its turn. "
    "sqlite3: connection.execute('BEGIN IMMEDIATE'). SQLAlchemy: set isolation_level = None in a 'connect' event, and "
    "execute BEGIN IMMEDIATE in a 'begin' event. Django: the option transaction_mode = 'IMMEDIATE'"
)


class TransactionPublisher:
    """Called by any thread. Between the first statement and the end of a call the thread holds SQLite's write lock, so
    the shared catalogue and backlog are changed by one thread at a time."""

    def __init__(self, store: Store, packer: Packer, backlog: Backlog, bells: Bells, lock: Path) -> None:
        self._store = store
        self._packer = packer
        self._backlog = backlog
        self._bells = bells
        self._lock = lock

    def append(self, connection: Any, events: Sequence[Event]) -> Callable[[], None] | None:
        """Append inside the caller's transaction; see `Broker.append_in`."""
        with borrowed(connection) as caller:
            if caller is None or not caller.is_on(self._store.path):
                return None
            if not events:
                return lambda: None
            check_events(events)
            bundles = self._packer.bundles(events)
            try:
                caller.execute(_LOCK)
                if not caller.in_transaction:
                    raise BadSetting(f"{self._store.path}: {_AUTOCOMMIT}")
                owners = self._append(caller, bundles, events)
            except sqlite3.Error as error:
                raise PublishError(self._explained(error), refused=events) from error
            except StoreLost as lost:
                raise PublishError(str(lost), refused=events) from lost
        return lambda: self._wake(owners)

    def _append(self, caller: CallersConnection, bundles: Sequence[Bundle], events: Sequence[Event]) -> Collection[str]:
        """Returns the owners to wake. No other transaction can change the owners before this one is committed."""
        # A savepoint, because the caller may catch an error and commit the rest of its transaction.
        caller.execute("SAVEPOINT onward_append")
        try:
            # A new appender knows no ends of partitions, so it reads them.
            appender = Appender(self._packer.catalogue, self._packer, self._backlog)
            appended = appender.append(caller, bundles, time.time())
            for error in appended.refused.values():
                raise type(error)(str(error), refused=events) if isinstance(error, PublishError) else error
            self._store.check(caller)
        except BaseException:
            if caller.in_transaction:  # SQLite ends a transaction by itself if the disk is full
                caller.execute("ROLLBACK TO onward_append")
                caller.execute("RELEASE onward_append")
            raise
        caller.execute("RELEASE onward_append")
        return leases.live_owners(caller, appended.parts, clock.now())

    def _wake(self, owners: Collection[str]) -> None:
        if not self._bells.ring(owners):
            with contextlib.suppress(OSError):  # readers look for commits by themselves every second
                os.utime(self._lock)

    def _explained(self, error: sqlite3.Error) -> str:
        path, code = self._store.path, error_code(error)
        if code == sqlite3.SQLITE_BUSY:
            return (
                f"{path}: this transaction cannot write now ({error}), because another one is writing, or has written "
                f"since this one began to read. {_IMMEDIATE}"
            )
        if code == sqlite3.SQLITE_READONLY:
            return (
                f"{path}: this connection cannot write ({error}); open it without mode=ro and immutable=1, and turn "
                "PRAGMA query_only off"
            )
        return str(self._store.explained(error))
