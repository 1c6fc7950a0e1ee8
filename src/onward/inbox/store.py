"""Marks in a database: rows by event id, cursors by position. The caller opens the transaction."""

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
    """The group and the partition log of a cursor, and the fence of the owner that uses it."""

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
    """Raised to roll a transaction back."""


class Statement:
    """A statement compiled once for its driver. Executing it through SQLAlchemy would double its cost."""

    def __init__(self, dialect: Dialect, statement: str) -> None:
        compiled: Any = text(statement).compile(dialect=dialect)
        self._sql = str(compiled)
        self._order: Sequence[str] | None = compiled.positiontup

    def __call__(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[Any]:
        return connection.exec_driver_sql(
            self._sql, dict(values) if self._order is None else tuple(values[name] for name in self._order)
        )


class CursorMemory:
    """The cursors as this process wrote them last. Threads share it."""

    def __init__(self) -> None:
        self._settled: dict[tuple[str, Partition], int] = {}
        self._left: dict[tuple[str, Partition], Left] = {}
        self._guard = threading.Lock()

    def settled(self, group: str, progress: Sequence[Progress]) -> None:
        with self._guard:
            for each in progress:
                self._settled[group, each.partition] = each.watermark

    def leave(self, place: CursorPlace, done: cursor.Done) -> None:
        with self._guard:
            self._left[place.group, place.partition] = Left(place.fence, place.log_id, done, cursor.encode(done))

    def left(self, place: CursorPlace) -> Left | None:
        """The cursor as we last wrote it in this ownership."""
        with self._guard:
            left = self._left.get((place.group, place.partition))
        same = left is not None and (left.fence, left.log_id) == (place.fence, place.log_id)
        return left if same else None

    def extended(self, place: CursorPlace, done: cursor.Done, positions: Sequence[int]) -> cursor.Done:
        """The cursor with these positions, without what lies below the settled watermark."""
        with self._guard:
            settled = self._settled.get((place.group, place.partition), 0)
        return cursor.pruned(cursor.add(done, positions), settled)


class InboxStore:
    """The marks of every group in one database."""

    def __init__(self, dialect: Dialect, statements: Statements) -> None:
        self._schema = statements
        self._insert, self._lock = Statement(dialect, statements.insert), Statement(dialect, statements.lock)
        self._begin, self._write = Statement(dialect, statements.begin), Statement(dialect, statements.write)
        self._overwrite = Statement(dialect, statements.overwrite)
        self._forget = Statement(dialect, statements.forget)
        self._drop_old = Statement(dialect, statements.drop_old)
        self._memory = CursorMemory()

    def create(self, connection: Connection) -> None:
        for statement in self._schema.create:
            connection.execute(text(statement))

    def probe(self, connection: Connection) -> None:
        """Check that the tables exist with the columns we use; BadStore if not."""
        try:
            for statement in self._schema.probe:
                connection.execute(text(statement))
        except DBAPIError as error:
            if is_conflict(error):
                raise
            call = "await inbox.create_async()" if connection.dialect.is_async else "call inbox.create()"
            raise BadStore(
                f"the inbox's tables are missing or have other columns ({error.orig}): "
                f"{call} once, or run the SQL that inbox.schema() returns"
            ) from error

    def try_rollback(self, connection: Connection, name: str) -> None:
        """Write a row, then fail: the rollback must remove it."""
        self._insert(connection, {"grp": "onward", "topic": "probe", "event_id": name, "now": int(time.time())})
        raise Undo

    def remains(self, connection: Connection, name: str) -> bool:
        """Did that row survive the rollback? Deletes it."""
        return self._forget(connection, {"grp": "onward", "topic": "probe", "event_id": name}).rowcount > 0

    def settled(self, group: str, progress: Sequence[Progress]) -> None:
        self._memory.settled(group, progress)

    def mark(self, connection: Connection, group: str, delivery: Delivery) -> bool:
        """Mark one event as done; False if it is already. Waits while another transaction marks it."""
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
        """Mark a partition's events as done. Returns those that were not done before."""
        place = _place(group, work[0])
        if self._mark_next(connection, place, work):
            return work
        return self._mark_any(connection, place, work)

    def _mark_next(self, connection: Connection, place: CursorPlace, work: Sequence[Delivery]) -> bool:
        """Mark all in one statement, if the cursor is as we left it and all positions lie behind it.

        Our memory of the cursor may be wrong: our transaction may have been rolled back, or another one wrote. The
        statement compares the cursor with it, so a wrong memory costs one statement and no more.
        """
        left = self._memory.left(place)
        if left is None or any(each.drawn or each.position < left.end for each in work):
            return False
        done = self._memory.extended(place, left.done, [each.position for each in work])
        values = {**place.key, "fence": place.fence, "known": left.text, "done": cursor.encode(done)}
        if self._overwrite(connection, values).rowcount != 1:
            return False
        self._memory.leave(place, done)
        return True

    def _mark_any(self, connection: Connection, place: CursorPlace, work: Sequence[Delivery]) -> Sequence[Delivery]:
        """Mark events of the log in the cursor, and events drawn from the aside by a row: they may lie far below it.

        The cursor may contain a drawn event too: if a commit's answer was lost, its event was set aside afterwards.
        """
        done = self._locked(connection, place)
        fresh = [each for each in work if not cursor.contains(done, each.position)]
        fresh = [each for each in fresh if not each.drawn or self.mark(connection, place.group, each)]
        logged = [each.position for each in fresh if not each.drawn]
        if logged:
            done = self._memory.extended(place, done, logged)
            values = {**place.key, "fence": place.fence, "done": cursor.encode(done)}
            if self._write(connection, values).rowcount != 1:
                raise Superseded(f"{place.partition}: an owner with a newer fence than {place.fence} wrote the cursor")
            self._memory.leave(place, done)
        return tuple(fresh)

    def drop_old(self, connection: Connection, before: float, page: int) -> int:
        """Delete one page of rows that are older. Returns how many it deleted."""
        return self._drop_old(connection, {"before": int(before), "page": page}).rowcount

    def _locked(self, connection: Connection, place: CursorPlace) -> cursor.Done:
        """The cursor, locked until the transaction ends. Superseded if a newer owner has written it."""
        row = self._lock(connection, place.key).one_or_none()
        if row is None:
            try:
                self._begin(connection, {**place.key, "fence": place.fence})
            except IntegrityError as error:
                if not _is_duplicate(error):
                    raise
            row = self._lock(connection, place.key).one()
        if row.fence > place.fence:
            raise Superseded(f"{place.partition}: fence {place.fence} is outdated, fence {row.fence} has written since")
        return cursor.decode(row.done)


def is_conflict(error: DBAPIError) -> bool:
    """Did the database roll this transaction back in favour of another? The caller may run it again."""
    return _code(error) in _POSTGRESQL_CONFLICTS | _MARIADB_CONFLICTS or is_timeout(error)


def is_timeout(error: DBAPIError) -> bool:
    """Did the database wait for a lock until its lock timeout?"""
    orig: Any = error.orig
    primary = getattr(orig, "sqlite_errorcode", 0) & 0xFF
    return primary in _SQLITE_CONFLICTS or _code(error) in _LOCK_TIMEOUTS


def _code(error: DBAPIError) -> Any:
    """PostgreSQL's state, or MariaDB's number."""
    orig: Any = error.orig
    return getattr(orig, "sqlstate", None) or (orig.args[0] if orig is not None and orig.args else None)


def _is_duplicate(error: IntegrityError) -> bool:
    """MariaDB raises an error for a duplicate row, and its transaction goes on."""
    return error.orig is not None and error.orig.args[:1] == (_MARIADB_DUPLICATE,)


def _place(group: str, delivery: Delivery) -> CursorPlace:
    partition, fence = delivery.partition, delivery.fence
    if fence is None or not delivery.log_id:
        raise BadStore(f"{partition}: the broker gives no fence or no log id, which the inbox of a batch handler needs")
    return CursorPlace(group, partition, delivery.log_id, fence)
