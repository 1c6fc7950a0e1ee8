"""Events of a SQLAlchemy session: they wait in the session and are written in one INSERT, just before the COMMIT.

By then the session has flushed everything, so what an event is about is locked before its row gets an id. That keeps
the order of the key. The events of a savepoint share its fate.

A session that begins its own transactions writes when SQLAlchemy announces the commit of its connection. A session that
joins the transaction of a connection it was given does not commit it. It writes at its own commit, or when it is closed
if closing it does not roll back.
"""

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session
from sqlalchemy.util.concurrency import in_greenlet

from onward.errors import BadOutbox, BadSetting
from onward.outbox import open_transactions, sqlalchemy_connections
from onward.outbox.connections import SUPPORTED
from onward.outbox.inserts import OutboxEntry
from onward.outbox.sqlalchemy_connections import Ring, check_autocommit, check_dialect, open_broker, ring_later, write

if TYPE_CHECKING:
    from onward.outbox.outbox import Outbox

_KEY = "onward.outbox"


def add(target: Any, outbox: "Outbox", entry: OutboxEntry) -> None:
    """Write now on a Connection. On a session, keep the event until the session commits."""
    if isinstance(target, AsyncConnection):
        raise BadSetting("an AsyncConnection needs `await outbox.add_async(...)`")
    if isinstance(target, Connection):
        return sqlalchemy_connections.add(target, outbox, entry)
    session = _session(target)
    bind = _bind(session, outbox)
    check_dialect(bind.dialect)
    if (events := _events(session)) is None:
        events = session.info[_KEY] = SessionEvents()
    if not bind.dialect.is_async or in_greenlet():
        open_broker(events.enlist(session, bind), outbox)
    else:
        _begin(session)
    events.add(_innermost(session), WaitingEvent(outbox, bind, entry))


async def add_async(target: Any, outbox: "Outbox", entry: OutboxEntry) -> None:
    if not isinstance(target, AsyncConnection):
        raise BadSetting(f"a {type(target).__name__} of SQLAlchemy needs `outbox.add(...)`, without await")
    await target.run_sync(sqlalchemy_connections.add, outbox, entry)


def count_waiting(target: Any) -> int:
    """The events of the session's open transaction that are not written yet."""
    events = _events(_session(target))
    return 0 if events is None else events.count()


def place_of(database: Any) -> tuple[str, Engine | None]:
    """The URL with its password, and the Engine if one was given. An Engine is watched from now on: a listener that is
    added while another thread commits may disturb that commit."""
    engine = database.sync_engine if isinstance(database, AsyncEngine) else database
    url = engine.url if isinstance(engine, Engine) else engine
    if not isinstance(url, URL):
        raise BadSetting(f"Outbox(app, {database!r}): give a URL, or an Engine or AsyncEngine of SQLAlchemy")
    if not isinstance(engine, Engine):
        return url.render_as_string(hide_password=False), None
    watch_engine(engine)
    return url.render_as_string(hide_password=False), engine


class WaitingEvent(NamedTuple):
    outbox: "Outbox"
    bind: Engine | Connection
    entry: OutboxEntry


class SessionEvents:
    """The events of a session's open transaction. The session holds it until the transaction ends."""

    def __init__(self) -> None:
        self._waiting: dict[SessionTransaction, list[WaitingEvent]] = {}  # by transaction or savepoint
        self._connections: set[Connection] = set()  # of this transaction
        self._rings: list[Ring] = []
        self._written = False
        self._committed = False
        self._opened: open_transactions.OpenTransaction | None = None

    def add(self, transaction: SessionTransaction, waiting: WaitingEvent) -> None:
        self._waiting.setdefault(transaction, []).append(waiting)
        if self._opened is None and waiting.outbox.app.settings.debug:
            self._opened = open_transactions.opened(open_transactions.caller())

    def enlist(self, session: Session, bind: Engine | Connection) -> Connection:
        """Connect the session, if it is not yet, and let the connection announce its commit."""
        connection = session.connection(bind_arguments={"bind": bind})
        if connection not in self._connections:
            check_autocommit(connection)
            self._connections.add(connection)
            if not isinstance(bind, Connection):
                _watch(connection, self)
        return connection

    def prepare(self, session: Session) -> None:
        """The session, or a savepoint of it, is about to commit."""
        for bind in {each.bind for each in self._all()}:
            self.enlist(session, bind)
            if isinstance(bind, Connection) and session.get_nested_transaction() is None:
                session.flush()
                self._write(bind)

    def commit(self, connection: Connection) -> None:
        """This connection is about to commit."""
        if connection in self._connections:
            self._write(connection)

    def committed(self, session: Session) -> None:
        """The session has committed, or has released its innermost savepoint: then its events go to the parent."""
        nested = session.get_nested_transaction()
        if nested is None:
            self._committed = True
            for ring in self._rings:
                ring()
        elif nested in self._waiting:
            self._waiting.setdefault(_boundary(nested), []).extend(self._waiting.pop(nested))

    def drop(self, transaction: SessionTransaction | None) -> None:
        """This transaction or savepoint has ended, and was not committed."""
        if transaction is not None:
            self._waiting.pop(transaction, None)
        if not self._waiting and not self._written:
            self._close()

    def end(self, session: Session) -> None:
        """The session's transaction has ended. What still waits was neither written nor rolled back."""
        self._close()
        for bind in {each.bind for each in self._all()}:
            if isinstance(bind, Connection) and (self._committed or _survives(session, bind)):
                self._write(bind)
        if self._committed and (lost := [each.entry.event for each in self._all()]):
            raise BadOutbox(
                f"{len(lost)} events were added while the session was committing, and were not stored (the first is "
                f"{lost[0].id} for topic {lost[0].topic!r}): add events before the commit, and use a session in one "
                "task or thread at a time"
            )

    def _write(self, connection: Connection) -> None:
        """Write the events that belong to the transaction of this connection."""
        mine = [each for each in self._all() if each.bind.engine is connection.engine]
        for outbox in dict.fromkeys(each.outbox for each in mine):
            ring = write(connection, outbox, [each.entry for each in mine if each.outbox is outbox])
            if isinstance(mine[0].bind, Connection):
                ring_later(connection, ring)
            else:
                self._rings.append(ring)
        for events in self._waiting.values():
            events[:] = [each for each in events if each.bind.engine is not connection.engine]
        self._written = self._written or bool(mine)

    def count(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _all(self) -> Iterator[WaitingEvent]:
        return chain.from_iterable(self._waiting.values())

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _session(target: Any) -> Session:
    if isinstance(target, scoped_session | async_scoped_session):
        target = target()
    if isinstance(target, AsyncSession):
        target = target.sync_session
    if not isinstance(target, Session):
        raise BadSetting(f"the outbox cannot write with a {type(target).__name__}; it knows {SUPPORTED}")
    return target


def _bind(session: Session, outbox: "Outbox") -> Engine | Connection:
    """The database of the session. If it has several, it is the one with which the outbox was made."""
    binds: Any = getattr(session, "binds", None) or vars(session).get("_Session__binds") or {}
    found: dict[Engine, Engine | Connection] = {
        bind.engine: bind for bind in (session.bind, *binds.values()) if bind is not None
    }
    chooses = type(session).get_bind is not Session.get_bind
    if len(found) == 1 and not chooses:
        return next(iter(found.values()))
    if outbox.engine is not None and (chooses or outbox.engine in found):
        return found.get(outbox.engine, outbox.engine)
    if not found and not chooses:
        raise BadSetting("this session has no database: create it with Session(engine)")
    raise BadSetting(
        "this session may use several databases: make the outbox with the engine of the one in which its table is and "
        "the event's data is written, as in Outbox(app, engine)"
    )


def _begin(session: Session) -> None:
    if session.in_transaction():
        return
    if not session.autobegin:
        raise BadSetting("this session has no open transaction: add events within `async with session.begin():`")
    session.begin()


def _innermost(session: Session) -> SessionTransaction:
    transaction = session.get_nested_transaction() or session.get_transaction()
    if transaction is None or not transaction.is_active:
        raise BadSetting("this session's transaction has failed or has ended: call session.rollback() first")
    return transaction


def _boundary(nested: SessionTransaction) -> SessionTransaction:
    """The transaction or savepoint around a savepoint. While SQLAlchemy flushes, there are others in between."""
    parent = nested.parent
    while parent is not None and parent.parent is not None and not parent.nested:
        parent = parent.parent
    assert parent is not None, "a savepoint is inside a transaction"
    return parent


def _survives(session: Session, connection: Connection) -> bool:
    """Whether closing a session that joined the transaction of this connection has left that transaction as it is."""
    mode = session.join_transaction_mode
    if mode == "conditional_savepoint":
        mode = "create_savepoint" if connection.in_nested_transaction() else "rollback_only"
    transaction = None if connection.closed else connection.get_transaction()
    return mode == "rollback_only" and transaction is not None and transaction.is_active


def _watch(connection: Connection, events: SessionEvents) -> None:
    """Tell `events` before this connection commits. The pool must not hold the session, so this is a weak reference."""
    connection.info[_KEY] = weakref.ref(events)
    watch_engine(connection.engine)


def watch_engine(engine: Engine) -> None:
    """Listen to the commits of an engine. Several threads may call it at once: SQLAlchemy adds a listener only once."""
    if engine not in _watched:
        event.listen(engine, "commit", _on_connection_commit)
        event.listen(engine, "prepare_twophase", _on_connection_prepare)
        _watched.add(engine)


_watched: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _on_connection_commit(connection: Connection) -> None:
    try:
        _write_on(connection)
    except BaseException:
        _roll_back(connection)
        raise


def _on_connection_prepare(connection: Connection, xid: Any) -> None:
    _write_on(connection)


def _write_on(connection: Connection) -> None:
    reference = connection.info.get(_KEY)
    events = None if reference is None else reference()
    if events is not None:
        events.commit(connection)


def _roll_back(connection: Connection) -> None:
    """If a commit raises and the session is closed, SQLAlchemy returns the connection to its pool as it is. The next
    user of the connection would then commit our transaction."""
    if connection.invalidated:
        return
    try:
        connection.dialect.do_rollback(connection.connection)
    except Exception:
        connection.invalidate()


def _events(session: Session) -> SessionEvents | None:
    events: SessionEvents | None = session.info.get(_KEY)
    return events


def _before_commit(session: Session) -> None:
    if (events := _events(session)) is not None:
        events.prepare(session)


def _after_commit(session: Session) -> None:
    if (events := _events(session)) is not None:
        events.committed(session)


def _after_rollback(session: Session) -> None:
    if (events := _events(session)) is not None:
        events.drop(session.get_nested_transaction() or session.get_transaction())


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if (events := _events(session)) is None:
        return
    if transaction.parent is None:
        del session.info[_KEY]
        events.end(session)
    elif transaction.nested:
        events.drop(transaction)


# On the class: a listener that is added to a session while it commits would come too late.
event.listen(Session, "before_commit", _before_commit)
event.listen(Session, "after_commit", _after_commit)
event.listen(Session, "after_rollback", _after_rollback)
event.listen(Session, "after_transaction_end", _after_transaction_end)
