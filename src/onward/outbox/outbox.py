"""Outbox: adds events to the transaction of the application's own database."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypedDict

from onward.errors import BadSetting
from onward.event import Event
from onward.outbox.bell import OutboxBell
from onward.outbox.connections import SUPPORTED, driver_of, write, write_async
from onward.outbox.databases import check_table, dialect_of
from onward.outbox.inserts import OutboxEntry
from onward.outbox.rows import values_of
from onward.outbox.schema import TABLE
from onward.outbox.trace import with_trace

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from onward.app import Onward

_MOST_RINGS = 16


class AddOptions(TypedDict, total=False):
    """The options of `Outbox.add`, for methods that pass them on."""

    key: str | None
    type: str | None
    headers: Mapping[str, str] | None
    expires_s: float | None
    lock: bool


class Outbox:
    """Adds events to a database transaction: they are published if it commits, and never if it does not.

    `database`: where the relay finds the events, as a URL, an Engine or an AsyncEngine of SQLAlchemy, or a function
    that returns the URL. The default is the setting `outbox_url`. A session with several databases writes to the one of
    this engine.
    """

    def __init__(
        self,
        app: "Onward",
        database: "str | URL | Engine | AsyncEngine | Callable[[], str | None] | None" = None,
        *,
        table: str = TABLE,
    ) -> None:
        self.app = app
        self.table = check_table(table)
        self._url, self.engine = _place(app.settings.outbox_url if database is None else database)
        self._bell = OutboxBell(lambda: self.url, table)
        # For plain connections that wrote to the broker's own file. The oldest are dropped if `ring` is never called.
        self._broker_rings: deque[Callable[[], None]] = deque(maxlen=_MOST_RINGS)
        app.outboxes.append(self)

    @property
    def url(self) -> str | None:
        """The database, with its password. None: it is not known, so no relay can read it."""
        return self._url() if callable(self._url) else self._url

    def add(
        self,
        target: Any,
        topic: str,
        value: Any,
        *,
        key: str | None = None,
        type: str | None = None,  # noqa: A002
        headers: Mapping[str, str] | None = None,
        expires_s: float | None = None,
        lock: bool = False,
    ) -> Event:
        """Add an event to the transaction of `target`: a session or a connection. The event is checked at once.

        A session of SQLAlchemy writes its events when it commits, after everything else. A connection writes the event
        now, so first write what the event is about: this keeps the order of the key. Where the key has no row that all
        its writers update or lock, use `lock=True`.
        """
        entry = self.entry(topic, value, key=key, type=type, headers=headers, expires_s=expires_s, lock=lock)
        driver = driver_of(target)
        if driver is not None:
            ring = write(target, driver, self, [entry])
            self._broker_rings.extend([] if ring is None else [ring])
        elif _is_sqlalchemy(target):
            from onward.outbox import session

            session.add(target, self, entry)
        else:
            raise _unknown(target)
        return entry.event

    async def add_async(
        self,
        target: Any,
        topic: str,
        value: Any,
        *,
        key: str | None = None,
        type: str | None = None,  # noqa: A002
        headers: Mapping[str, str] | None = None,
        expires_s: float | None = None,
        lock: bool = False,
    ) -> Event:
        """`add` for async connections: of asyncpg and psycopg, and SQLAlchemy's AsyncConnection."""
        entry = self.entry(topic, value, key=key, type=type, headers=headers, expires_s=expires_s, lock=lock)
        driver = driver_of(target)
        if driver is not None:
            await write_async(target, driver, self, [entry])
        elif _is_sqlalchemy(target):
            from onward.outbox import session

            await session.add_async(target, self, entry)
        else:
            raise _unknown(target)
        return entry.event

    def ring(self, *, only_here: bool = False) -> None:
        """Wake the relay. Sessions do this after a commit. After the commit of a plain connection you may call it, so
        that the relay need not poll. `only_here`: only relays of this process."""
        self._bell.ring(only_here=only_here)
        with suppress(IndexError):  # threads share the queue
            while True:
                self._broker_rings.popleft()()

    def on_ring(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call this at each ring, in the thread that rings. Returns a function that ends it."""
        return self._bell.subscribe(callback)

    def entry(
        self,
        topic: str,
        value: Any,
        *,
        key: str | None = None,
        type: str | None = None,  # noqa: A002
        headers: Mapping[str, str] | None = None,
        expires_s: float | None = None,
        lock: bool = False,
    ) -> OutboxEntry:
        """The event as a row to write, checked."""
        if lock and key is None:
            raise BadSetting(f"lock=True for an event of topic {topic!r} without a key: the lock belongs to a key")
        event = self.app.event(topic, value, key=key, type=type, headers=with_trace(headers), expires_s=expires_s)
        return OutboxEntry(event, values_of(event), lock)


def _place(database: Any) -> "tuple[str | Callable[[], str | None] | None, Engine | None]":
    """The URL, and the Engine if one was given."""
    if database is None or callable(database):
        return database, None
    if isinstance(database, str):
        dialect_of(database)
        return database, None
    if not _is_sqlalchemy(database):
        raise BadSetting(f"Outbox(app, {database!r}): give a URL, or an Engine or AsyncEngine of SQLAlchemy")
    from onward.outbox.session import place_of

    url, engine = place_of(database)
    dialect_of(url)
    return url, engine


def _is_sqlalchemy(target: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "sqlalchemy" for kind in type(target).__mro__)


def _unknown(target: Any) -> BadSetting:
    kind = f"{type(target).__module__}.{type(target).__name__}"
    return BadSetting(f"the outbox cannot write with an object of type {kind}; it knows {SUPPORTED}")
