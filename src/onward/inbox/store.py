"""Marks in a database: rows by event id, cursors by position. All within a transaction that the caller opened."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, CursorResult, Dialect, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from onward.brokers.base import Progress
from onward.errors import BadStore, Superseded
from onward.event import Delivery, Partition
from onward.inbox import cursor
from onward.inbox.horizon import stored_id
from onward.inbox.statements import Statements

_LOCK_TIMEOUTS = {"55P03", 1205}
_POSTGRESQL_CONFLICTS = {"40001", "40P01"}
_MARIADB_CONFLICTS = {1020, 1213}  # the record changed, a deadlock
_MARIADB_DUPLICATE = 1062
_SQLITE_CONFLICTS = {5, 6}  # busy, locked


class CursorPlace(NamedTuple):
    """Whose cursor, and under which ownership."""

    group: str
    partition: Partition
    log_id: str
    fence: int

    @property
    def key(self) -> dict[str, Any]:
        topic, part = self.partition
        return {"grp": self.group, "topic": topic, "part": part, "log_id": self.log_id}


class Left(NamedTuple):
    """A cursor as this process wrote it last."""

    fence: int
    log_id: str
    done: cursor.Done
    text: str

    @property
    def end(self) -> int:
        return self.done[-1][1]


class Undo(Exception):
    """Raised to have a transaction rolled back."""


class Statement:
    """A statement in its driver's own words: nothing of SQLAlchemy's is between, which would cost as much again."""

    def __init__(self, dialect: Dialect, statement: str) -> None:
        compiled: Any = text(statement).compile(dialect=dialect)
        self._sql = str(compiled)
        self._order: Sequence[str] | None = compiled.positiontup

    def __call__(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[Any]:
        return connection.exec_driver_sql(
            self._sql, dict(values) if self._order is None else tuple(values[name] for name in self._order)
        )


class InboxStore:
    """The marks of every group in one database."""

    def __init__(self, dialect: Dialect, statements: Statements) -> None:
        self._schema = statements
        self._insert, self._lock = Statement(dialect, statements.insert), Statement(dialect, statements.lock)
        self._begin, self._write = Statement(dialect, statements.begin), Statement(dialect, statements.write)
        self._overwrite = Statement(dialect, statements.overwrite)
        self._forget = Statement(dialect, statements.forget)
        self._drop_old = Statement(dialect, statements.drop_old)
        self._settled: dict[tuple[str, Partition], int] = {}
        self._left: dict[tuple[str, Partition], Left] = {}
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
            if is_conflict(error):
                raise
            raise BadStore(
                f"the inbox's tables are not there, or not as they should be ({error.orig}): "
                "call inbox.create() once, or run what inbox.schema() says"
            ) from error

    def try_rollback(self, connection: Connection, name: str) -> None:
        """Write a row and fail: it must be gone afterwards."""
        self._insert(connection, {"grp": "onward", "topic": "probe", "event_id": name, "now": int(time.time())})
        raise Undo

    def remains(self, connection: Connection, name: str) -> bool:
        """Is that row still there? Not any more."""
        return self._forget(connection, {"grp": "onward", "topic": "probe", "event_id": name}).rowcount > 0

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
            return self._insert(connection, values).rowcount == 1
        except IntegrityError as error:
            if not _is_duplicate(error):
                raise
            return False

    def mark_batch(self, connection: Connection, group: str, work: Sequence[Delivery]) -> Sequence[Delivery]:
        """Mark a partition's events as done; answers those that were not."""
        place = _place(group, work[0])
        if self._mark_next(connection, place, work):
            return work
        return self._mark_any(connection, place, work)

    def _mark_next(self, connection: Connection, place: CursorPlace, work: Sequence[Delivery]) -> bool:
        """In one statement, if the cursor stands as we left it, and all of this comes after.

        What we believe of the cursor may be wrong: that transaction may have been rolled back, or another wrote. The
        statement compares, so belief costs a statement and no more.
        """
        with self._guard:
            left = self._left.get((place.group, place.partition))
        if left is None or (left.fence, left.log_id) != (place.fence, place.log_id):
            return False
        if any(each.drawn or each.position < left.end for each in work):
            return False
        done = self._with(place, left.done, [each.position for each in work])
        values = {**place.key, "fence": place.fence, "known": left.text, "done": cursor.encode(done)}
        if self._overwrite(connection, values).rowcount != 1:
            return False
        self._leave(place, done)
        return True

    def _mark_any(self, connection: Connection, place: CursorPlace, work: Sequence[Delivery]) -> Sequence[Delivery]:
        """The cursor speaks for what the log brings. What comes from the aside may be far below it and is marked by a
        row, but the cursor may know it still: from a commit whose answer was lost before the event was set aside.
        """
        done = self._locked(connection, place)
        fresh = [each for each in work if not cursor.contains(done, each.position)]
        fresh = [each for each in fresh if not each.drawn or self.mark(connection, place.group, each)]
        logged = [each.position for each in fresh if not each.drawn]
        if logged:
            done = self._with(place, done, logged)
            values = {**place.key, "fence": place.fence, "done": cursor.encode(done)}
            if self._write(connection, values).rowcount != 1:
                raise Superseded(f"{place.partition}: its cursor was written by a newer owner than {place.fence}")
            self._leave(place, done)
        return tuple(fresh)

    def _with(self, place: CursorPlace, done: cursor.Done, positions: Sequence[int]) -> cursor.Done:
        with self._guard:
            settled = self._settled.get((place.group, place.partition), 0)
        return cursor.pruned(cursor.add(done, positions), settled)

    def _leave(self, place: CursorPlace, done: cursor.Done) -> None:
        with self._guard:
            self._left[place.group, place.partition] = Left(place.fence, place.log_id, done, cursor.encode(done))

    def drop_old(self, connection: Connection, before: float, page: int) -> int:
        """Forget one page of rows that are older; answers how many they were."""
        return self._drop_old(connection, {"before": int(before), "page": page}).rowcount

    def _locked(self, connection: Connection, place: CursorPlace) -> cursor.Done:
        """The cursor, locked until the transaction ends; Superseded when a newer owner has written it."""
        row = self._lock(connection, place.key).one_or_none()
        if row is None:
            try:
                self._begin(connection, {**place.key, "fence": place.fence})
            except IntegrityError as error:
                if not _is_duplicate(error):
                    raise
            row = self._lock(connection, place.key).one()
        if row.fence > place.fence:
            raise Superseded(f"{place.partition}: fence {place.fence} is over, {row.fence} has written since")
        return cursor.decode(row.done)


def is_conflict(error: DBAPIError) -> bool:
    """Did the database give way to another transaction? All of this one is undone, and it may be tried again."""
    return _code(error) in _POSTGRESQL_CONFLICTS | _MARIADB_CONFLICTS or is_timeout(error)


def is_timeout(error: DBAPIError) -> bool:
    """Did the database wait for a lock for as long as it is set to?"""
    orig: Any = error.orig
    primary = getattr(orig, "sqlite_errorcode", 0) & 0xFF
    return primary in _SQLITE_CONFLICTS or _code(error) in _LOCK_TIMEOUTS


def _code(error: DBAPIError) -> Any:
    """PostgreSQL's state, or MariaDB's number."""
    orig: Any = error.orig
    return getattr(orig, "sqlstate", None) or (orig.args[0] if orig is not None and orig.args else None)


def _is_duplicate(error: IntegrityError) -> bool:
    """On MariaDB, where that is an error and the transaction goes on."""
    return error.orig is not None and error.orig.args[:1] == (_MARIADB_DUPLICATE,)


def _place(group: str, delivery: Delivery) -> CursorPlace:
    partition, fence = delivery.partition, delivery.fence
    if fence is None or not delivery.log_id:
        raise BadStore(f"{partition}: the broker names no fence or no log: a batch handler cannot have an inbox on it")
    return CursorPlace(group, partition, delivery.log_id, fence)
