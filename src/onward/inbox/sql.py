"""SqlInbox: the mark and the handler's own writes are one transaction of the handler's database."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Engine, Transaction, event
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, AsyncTransaction
from sqlalchemy.orm import Session

from onward.brokers.base import Progress
from onward.engines.base import Call, Work
from onward.errors import BadHandler, BadSetting, BrokerError, Busy, InDoubt, Unreachable
from onward.event import Delivery
from onward.inbox.base import Asked, Ground, Run
from onward.inbox.horizon import horizon_s
from onward.inbox.statements import statements
from onward.inbox.store import InboxStore, Undo, is_conflict, is_timeout

log = logging.getLogger("onward")

_TRIES = 10  # of a transaction that the database rolls back in favour of another
_PAGE = 1_000  # rows deleted in one transaction
_SWEEP_S = 600.0
_FAULTS = (DBAPIError, PoolTimeout, OSError)  # some drivers raise the errors of their sockets
_OF_THE_STATEMENT = (DataError, IntegrityError, NotSupportedError, ProgrammingError)  # another try would fail too
_HANDLING = "onward.handling"  # set on a connection while a handler uses it


class SqlInbox:
    """An inbox in the database that a handler writes to: `@app.handler(..., inbox=SqlInbox(engine))`.

    A `def` handler needs an Engine and has a parameter of type Connection or Session. An `async def` handler needs an
    AsyncEngine and has an AsyncConnection or AsyncSession. The handler's writes are committed together with the event's
    mark, or not at all; the handler must not commit or close the connection. Rows are stored for `horizon_s`. The
    default is twice the longest time after which an event may come again. A batch handler has one row per partition.
    """

    def __init__(
        self, engine: Engine | AsyncEngine, *, table: str = "onward_inbox", horizon_s: float | None = None
    ) -> None:
        if not isinstance(engine, Engine | AsyncEngine):
            raise BadSetting(f"SqlInbox({engine!r}): give an Engine or an AsyncEngine of SQLAlchemy")
        self._engine = engine
        event.listen(engine.sync_engine if isinstance(engine, AsyncEngine) else engine, "commit", _refuse_commit)
        self._schema = statements(engine.dialect.name, table)
        self._store = InboxStore(engine.dialect, self._schema)
        self._given_s = horizon_s
        self._horizon_s = 0.0

    def schema(self) -> str:
        """The SQL that creates the tables, for your migrations."""
        return "".join(f"{statement};\n" for statement in self._schema.create)

    def create(self) -> None:
        """Create the tables that do not exist."""
        if isinstance(self._engine, AsyncEngine):
            raise BadSetting("this inbox has an AsyncEngine: use `await inbox.create_async()`")
        try:
            _in_transaction(self._engine, self._store.create)
        except DBAPIError:  # PostgreSQL's IF NOT EXISTS fails if another process creates them at the same time
            _in_transaction(self._engine, self._store.create)

    async def create_async(self) -> None:
        """`create`, with an AsyncEngine."""
        try:
            await self._work(self._store.create)
        except DBAPIError:
            await self._work(self._store.create)

    # -- the contract ---------------------------------------------------------------------------------------------

    def gives(self, annotation: Any) -> bool:
        return annotation in (Connection, Session, AsyncConnection, AsyncSession)

    def around(self, run: Run, asked: Asked) -> Call:
        engine = self._engine
        _check(engine, asked)
        if isinstance(engine, AsyncEngine):
            return _Async(engine, self._store, run, asked)
        return _Sync(engine, self._store, run, asked)

    async def start(self, ground: Ground) -> None:
        if ground.batch and not ground.stable:
            raise BadSetting(
                f"{ground.name}: an inbox for a batch handler needs stable positions and a fence, which this broker "
                "does not offer with this ordering. An event could be mistaken for another one and lost. Handle single "
                "events (batch_size=1)"
            )
        longest_s = max(self._horizon_s, horizon_s(ground.name, self._given_s, ground.longest_redelivery_s))
        await self._patiently(lambda: self._work(self._store.probe), ground.name)
        await self._patiently(self._check_rollback, ground.name)
        self._horizon_s = longest_s

    def settled(self, group: str, progress: Sequence[Progress]) -> None:
        self._store.settled(group, progress)

    async def upkeep(self) -> None:
        while True:
            try:
                await self.sweep()
            except DBAPIError:
                log.exception("the inbox cannot delete old rows now; trying again in %g s", _SWEEP_S)
            await asyncio.sleep(_SWEEP_S)

    async def close(self) -> None:
        """Nothing to do: the application disposes of its engine."""

    async def sweep(self) -> int:
        """Delete the rows that are older than the horizon, a page at a time. Returns how many."""
        if not self._horizon_s:
            raise BadSetting("the horizon is not known before the application runs")
        before, swept = time.time() - self._horizon_s, 0
        while True:
            count: int = await self._work(lambda connection: self._store.drop_old(connection, before, _PAGE))
            swept += count
            if count < _PAGE:
                return swept

    async def _patiently(self, step: Callable[[], Awaitable[None]], name: str) -> None:
        """Run a step of the start, again if other transactions have locked the database. BrokerError if it fails."""
        for left in reversed(range(_TRIES)):
            try:
                return await step()
            except DBAPIError as error:
                if not left or not is_conflict(error):
                    raise BrokerError(
                        f"{name}: its inbox's database cannot be used: {error.orig}; is it running, and is it locked?"
                    ) from error

    async def _check_rollback(self) -> None:
        """With autocommit, or tables without transactions, the mark of a failed effect would stay: a lost event."""
        name = uuid4().hex
        with suppress(Undo):
            await self._work(lambda connection: self._store.try_rollback(connection, name))
        if await self._work(lambda connection: self._store.remains(connection, name)):
            raise BadSetting(
                "the inbox's database does not roll back: use an engine without isolation_level='AUTOCOMMIT', and "
                "tables of a storage engine that has transactions"
            )

    async def _work(self, work: Callable[[Connection], Any]) -> Any:
        """Run this in a transaction, off the event loop."""
        if isinstance(self._engine, AsyncEngine):
            async with self._engine.begin() as connection:
                return await connection.run_sync(work)
        return await asyncio.to_thread(_in_transaction, self._engine, work)


class _Once:
    """A handler's call, and the marking before it."""

    def __init__(self, store: InboxStore, run: Run, asked: Asked) -> None:
        self._store = store
        self._run = run
        self._asked = asked
        self._session = asked.gives in (Session, AsyncSession)

    def _mark(self, connection: Connection, work: Work) -> Work | None:
        """Mark the work as done. Returns the part that was not done before; None if there is none."""
        group = self._asked.group
        if isinstance(work, Delivery):
            return work if self._store.mark(connection, group, work) else None
        return tuple(self._store.mark_batch(connection, group, work)) or None


class _Sync(_Once):
    def __init__(self, engine: Engine, store: InboxStore, run: Run, asked: Asked) -> None:
        super().__init__(store, run, asked)
        self._engine = engine

    def __call__(self, work: Work) -> None:
        for left in reversed(range(_TRIES)):
            try:
                return self._once(work, last=not left)
            except DBAPIError as error:
                if not left or not is_conflict(error):
                    raise

    def _once(self, work: Work, *, last: bool) -> None:
        claimed = False
        try:
            # However this block ends, what was not committed is rolled back.
            with self._engine.connect() as connection, connection.begin() as transaction:
                fresh = self._mark(connection, work)
                claimed = True
                if fresh is not None:
                    self._handle(connection, transaction, fresh)
                    self._commit(transaction)
                else:
                    transaction.rollback()
        except _FAULTS as error:
            if not claimed:
                _raise_unclaimed(error, last)
            raise

    def _commit(self, transaction: Transaction) -> None:
        try:
            transaction.commit()
        except DBAPIError as error:
            _raise_doubt(error)
            raise

    def _handle(self, connection: Connection, transaction: Transaction, work: Work) -> None:
        try:
            with _handling(connection):
                self._call(connection, work)
        finally:
            if not transaction.is_active:
                connection.invalidate()  # otherwise it would return to its pool with the transaction open
        _commit_is_ours(transaction)

    def _call(self, connection: Connection, work: Work) -> None:
        if not self._session:
            self._run(work, connection)
            return
        with Session(connection, join_transaction_mode="rollback_only") as session:
            self._run(work, session)
            session.flush()


class _Async(_Once):
    def __init__(self, engine: AsyncEngine, store: InboxStore, run: Run, asked: Asked) -> None:
        super().__init__(store, run, asked)
        self._engine = engine

    async def __call__(self, work: Work) -> None:
        for left in reversed(range(_TRIES)):
            try:
                return await self._once(work, last=not left)
            except DBAPIError as error:
                if not left or not is_conflict(error):
                    raise

    async def _once(self, work: Work, *, last: bool) -> None:
        claimed = False
        try:
            async with self._engine.connect() as connection, connection.begin() as transaction:
                fresh = await connection.run_sync(self._mark, work)
                claimed = True
                if fresh is not None:
                    await self._handle(connection, transaction, fresh)
                    await self._commit(transaction)
                else:
                    await transaction.rollback()
        except _FAULTS as error:
            if not claimed:
                _raise_unclaimed(error, last)
            raise

    async def _commit(self, transaction: AsyncTransaction) -> None:
        try:
            await transaction.commit()
        except DBAPIError as error:
            _raise_doubt(error)
            raise

    async def _handle(self, connection: AsyncConnection, transaction: AsyncTransaction, work: Work) -> None:
        assert connection.sync_connection is not None
        try:
            with _handling(connection.sync_connection):
                await self._call(connection, work)
        finally:
            if not transaction.is_active:
                await connection.invalidate()
        _commit_is_ours(transaction)

    async def _call(self, connection: AsyncConnection, work: Work) -> None:
        if not self._session:
            await self._run(work, connection)
            return
        async with AsyncSession(connection, join_transaction_mode="rollback_only") as session:
            await self._run(work, session)
            await session.flush()


def _in_transaction(engine: Engine, work: Callable[[Connection], Any]) -> Any:
    with engine.begin() as connection:
        return work(connection)


def _raise_unclaimed(error: Exception, last: bool) -> None:
    """The handler has not run yet, so the error is not its failure."""
    if isinstance(error, DBAPIError):
        if is_timeout(error) or (last and is_conflict(error)):
            # A transaction that holds the lock for so long handles the same event, or its partition.
            raise Busy(f"another transaction has locked this event's mark ({error.orig})") from error
        if is_conflict(error) or isinstance(error, _OF_THE_STATEMENT):
            return
    raise Unreachable(f"the inbox's database cannot be used ({_message(error)}); is it running?") from error


def _message(error: Exception) -> str:
    orig = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(orig).split())


def _raise_doubt(error: DBAPIError) -> None:
    if error.connection_invalidated:
        raise InDoubt(f"the connection broke during the commit ({error.orig})") from error


@contextmanager
def _handling(connection: Connection) -> Iterator[None]:
    info = connection.info
    info[_HANDLING] = True
    try:
        yield
    finally:
        info.pop(_HANDLING, None)  # the connection returns to its pool


def _commit_is_ours(transaction: Transaction | AsyncTransaction) -> None:
    if not transaction.is_active:
        raise BadHandler("the handler ended the transaction of its inbox; the inbox commits when the handler returns")


def _refuse_commit(connection: Connection) -> None:
    """If a handler commits by itself and then fails, the mark stays without the rest of the effect."""
    if connection.info.get(_HANDLING):
        raise BadHandler("a handler with an inbox must not commit: the inbox commits when the handler returns")


def _check(engine: Engine | AsyncEngine, asked: Asked) -> None:
    if asked.engine == "processes":
        raise BadHandler(f"{asked.name}: an inbox cannot reach into worker processes; use engine 'threads' or 'tasks'")
    kinds = (AsyncConnection, AsyncSession) if isinstance(engine, AsyncEngine) else (Connection, Session)
    if asked.is_async != isinstance(engine, AsyncEngine):
        cure = "an AsyncEngine (create_async_engine)" if asked.is_async else "an Engine (create_engine)"
        raise BadHandler(
            f"{asked.name}: its inbox needs {cure}, because it is a{'n async' if asked.is_async else ''} def"
        )
    if asked.gives is None or asked.gives not in kinds:
        raise BadHandler(
            f"{asked.name}: to write in the inbox's transaction it needs a parameter annotated "
            f"{kinds[0].__name__} or {kinds[1].__name__}"
        )
