"""Marks in a database: rows by event id, cursors by position. All within a transaction that the caller opened."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from onward.brokers.base import Progress
from onward.errors import BadStore, Superseded
from onward.event import Delivery, Partition
from onward.inbox import cursor
from onward.inbox.horizon import stored_id
from onward.inbox.statements import Statements

_POSTGRESQL_CONFLICTS = {"40001", "40P01", "55P03"}
_MARIADB_CONFLICTS = {1020, 1205, 1213}  # the record changed, the lock wait is over, a deadlock
_MARIADB_DUPLICATE = 1062
_SQLITE_CONFLICTS = {5, 6}  # busy, locked


class Store:
    """The marks of every group in one database."""

    def __init__(self, statements: Statements) -> None:
        self._schema = statements
        self._insert, self._lock = text(statements.insert), text(statements.lock)
        self._begin, self._write = text(statements.begin), text(statements.write)
        self._drop_old = text(statements.drop_old)
        self._settled: dict[tuple[str, Partition], int] = {}
        self._guard = threading.Lock()

    def create(self, connection: Connection) -> None:
        for statement in self._schema.create:
            connection.execute(text(statement))

    def probe(self, connection: Connection) -> None:
        """Are the tables there, as we know them?"""
        try:
            for statement in self._schema.probe:
                connection.execute(text(statement))
        except DBAPIError as error:
            raise BadStore(
                f"the inbox's tables are not there, or not as they should be ({error.orig}): "
                "call inbox.create() once, or run what inbox.schema() says"
            ) from error

    def settled(self, group: str, progress: Sequence[Progress]) -> None:
        with self._guard:
            for each in progress:
                self._settled[group, each.partition] = each.watermark

    def mark(self, connection: Connection, group: str, delivery: Delivery) -> bool:
        """Mark one event as done, unless it is already. Waits for a run of it that is under way."""
        values = {
            "grp": group,
            "topic": delivery.event.topic,
            "event_id": stored_id(delivery.event.id),
            "now": int(time.time()),
        }
        try:
            return connection.execute(self._insert, values).rowcount == 1
        except IntegrityError as error:
            if not _is_duplicate(error):
                raise
            return False

    def mark_batch(self, connection: Connection, group: str, work: Sequence[Delivery]) -> tuple[Delivery, ...]:
        """Mark a partition's events as done; answers those that were not.

        The cursor speaks for what the log brings. What comes from the aside may be far below it and is marked by a
        row, but the cursor may know it still: from a commit whose answer was lost before the event was set aside.
        """
        fence, key = _cursor_key(group, work[0])
        done = self._locked(connection, fence, key)
        fresh = [each for each in work if not cursor.contains(done, each.position)]
        fresh = [each for each in fresh if not each.drawn or self.mark(connection, group, each)]
        logged = [each.position for each in fresh if not each.drawn]
        if logged:
            with self._guard:
                settled = self._settled.get((group, work[0].partition), 0)
            kept = cursor.encode(cursor.pruned(cursor.add(done, logged), settled))
            if connection.execute(self._write, {**key, "fence": fence, "done": kept}).rowcount != 1:
                raise Superseded(f"{work[0].partition}: its cursor was written by a newer owner than fence {fence}")
        return tuple(fresh)

    def drop_old(self, connection: Connection, before: float, page: int) -> int:
        """Forget one page of rows that are older; answers how many they were."""
        return connection.execute(self._drop_old, {"before": int(before), "page": page}).rowcount

    def _locked(self, connection: Connection, fence: int, key: Mapping[str, Any]) -> cursor.Done:
        """The cursor, locked until the transaction ends; Superseded when a newer owner has written it."""
        row = connection.execute(self._lock, key).one_or_none()
        if row is None:
            try:
                connection.execute(self._begin, {**key, "fence": fence})
            except IntegrityError as error:
                if not _is_duplicate(error):
                    raise
            row = connection.execute(self._lock, key).one()
        if row.fence > fence:
            raise Superseded(f"{key['topic']}/{key['part']}: fence {fence} is over, {row.fence} has written since")
        return cursor.decode(row.done)


def is_conflict(error: DBAPIError) -> bool:
    """Did the database give way to another transaction? All of this one is undone, and it may be tried again."""
    orig: Any = error.orig
    if getattr(orig, "sqlstate", None) in _POSTGRESQL_CONFLICTS:
        return True
    code = getattr(orig, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _SQLITE_CONFLICTS
    number = orig.args[0] if orig is not None and orig.args else None
    return number in _MARIADB_CONFLICTS or number == "database is locked"


def _is_duplicate(error: IntegrityError) -> bool:
    """On MariaDB, where that is an error and the transaction goes on."""
    return error.orig is not None and error.orig.args[:1] == (_MARIADB_DUPLICATE,)


def _cursor_key(group: str, delivery: Delivery) -> tuple[int, dict[str, Any]]:
    partition, fence = delivery.partition, delivery.fence
    if fence is None or not delivery.log_id:
        raise BadStore(f"{partition}: the broker names no fence or no log: a batch handler cannot have an inbox on it")
    return fence, {"grp": group, "topic": partition.topic, "part": partition.index, "log_id": delivery.log_id}
