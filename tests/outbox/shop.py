"""A database with an outbox and a table of orders, with the same methods for sync and async engines."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from onward import Onward
from onward.event import Event
from onward.outbox import Outbox, schema
from onward.outbox.rows import COLUMNS, row_of

DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}  # of the sync engines

QUICK: dict[str, Any] = {  # PyMySQL would read all certificates of the machine for each connection
    "postgresql": {},
    "mysql": {"connect_args": {"ssl_disabled": True}},
    "sqlite": {},
}
_tables: dict[str, str] = {}  # by URL


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    total: Mapped[int] = mapped_column(default=0)


async def maybe(result: Any) -> Any:
    """The result of a method that is async in one kind of session, and plain in the other."""
    return await result if inspect.isawaitable(result) else result


class Shop:
    """`url` names the driver of the engine that is tested. `plain` is a sync engine, with which the test looks."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.url = make_url(url)
        backend = self.url.get_backend_name()
        self.plain = create_engine(self.url.set(drivername=f"{backend}+{DRIVERS[backend]}"), **QUICK[backend])
        self.table = self._table()
        self.engine = self.new_engine()
        self.app = Onward(f"sqlite:///{folder}/events.db", outbox_relay=False, **settings)
        self.outbox = Outbox(self.app, self.engine, table=self.table)

    def _table(self) -> str:
        """An empty outbox, and an empty table of orders. The tests of one process use the same tables, one by one:
        creating them takes longer than most tests."""
        url = self.plain.url.render_as_string(hide_password=False)
        if url not in _tables:
            _tables[url] = f"outbox_{uuid4().hex[:12]}"
            schema.init(url, table=_tables[url])
            Base.metadata.create_all(self.plain)
        with self.plain.begin() as connection:
            connection.execute(text(f"DELETE FROM {_tables[url]}"))
            connection.execute(text("DELETE FROM shop_order"))
        return _tables[url]

    def new_engine(self, **options: Any) -> Engine | AsyncEngine:
        if self.is_async:
            return create_async_engine(self.url, **options)
        return create_engine(self.url, **{**QUICK[self.backend], **options})

    @property
    def is_async(self) -> bool:
        return self.url.drivername.endswith(("asyncpg", "asyncmy", "aiosqlite", "_async"))

    @property
    def backend(self) -> str:
        return self.url.get_backend_name()

    @property
    def sync_engine(self) -> Engine:
        return self.engine.sync_engine if isinstance(self.engine, AsyncEngine) else self.engine

    def session(self, **options: Any) -> Any:
        options = {"bind": self.engine, **options}
        return AsyncSession(**options) if self.is_async else Session(**options)

    def add(self, target: Any, *names: str, **options: Any) -> None:
        """Add an event for each name, with the name as its value and its key."""
        for name in names:
            self.outbox.add(target, "orders", name, **{"key": name, **options})

    def play(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def played() -> None:
            async with asyncio.timeout(60):
                try:
                    await scenario()
                finally:
                    if isinstance(self.engine, AsyncEngine):
                        await self.engine.dispose()

        asyncio.run(played())

    def stored(self) -> list[Event]:
        """The events that were committed, in the order of their ids."""
        statement = f"SELECT id, shard, {', '.join(COLUMNS)} FROM {self.table} ORDER BY id"
        with self.plain.begin() as connection:
            return [row_of(*row).event for row in connection.execute(text(statement))]

    def names(self) -> list[str]:
        return [(each.value or b"").decode() for each in self.stored()]

    def orders(self) -> list[int]:
        with self.plain.begin() as connection:
            return [row[0] for row in connection.execute(text("SELECT id FROM shop_order ORDER BY id"))]

    def statements(self) -> list[str]:
        """Collects the statements of the engine that is tested, from now on."""
        found: list[str] = []

        def record(connection: Connection, cursor: Any, statement: str, *others: Any) -> None:
            found.append(statement)

        event.listen(self.sync_engine, "before_cursor_execute", record)
        event.listen(self.sync_engine, "commit", lambda connection: found.append("COMMIT"))
        return found

    def close(self) -> None:
        self.plain.dispose()
        if isinstance(self.engine, Engine):
            self.engine.dispose()


def inserts(statements: Sequence[str], table: str) -> list[str]:
    return [each for each in statements if f"INSERT INTO {table} " in each]
