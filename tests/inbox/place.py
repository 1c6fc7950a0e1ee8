"""A database with an inbox and a table of effects, with the same methods for sync and async engines."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from onward.event import Delivery, Event, Partition
from onward.inbox import SqlInbox
from onward.inbox.base import Asked, Ground

PATIENCE_S = 60.0

Effect = Callable[[Connection, Any], None]


def ground(**different: Any) -> Ground:
    return Ground(**{"name": "test", "batch": False, "stable": True, "longest_redelivery_s": 100.0, **different})


def delivery(name: str | int, *, position: int = 0, fence: int = 1, **different: Any) -> Delivery:
    event = Event(str(name), "orders", "key", b"{}")
    return Delivery(event, Partition("orders", 0), position, 1, 1, fence, different.pop("log_id", "log"), **different)


def batch(*positions: int, **different: Any) -> tuple[Delivery, ...]:
    return tuple(delivery(f"e{position}", position=position, **different) for position in positions)


class Gate:
    """A run waits in it until it is opened, also in another thread."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def stand(self) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE_S)

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE_S)


class Place:
    def __init__(self, engine: Engine | AsyncEngine) -> None:
        self.engine = engine
        self.inbox = SqlInbox(engine)

    @property
    def is_async(self) -> bool:
        return isinstance(self.engine, AsyncEngine)

    async def sql(self, statement: str, **values: Any) -> Sequence[Any]:
        def run(connection: Connection) -> Sequence[Any]:
            result = connection.execute(text(statement), values)
            return list(result) if result.returns_rows else []

        if isinstance(self.engine, AsyncEngine):
            async with self.engine.begin() as connection:
                return await connection.run_sync(run)
        return await asyncio.to_thread(self._in_transaction, run)

    def _in_transaction(self, run: Callable[[Connection], Any]) -> Any:
        assert isinstance(self.engine, Engine)
        with self.engine.begin() as connection:
            return run(connection)

    async def prepare(self) -> None:
        for table in ("onward_inbox", "onward_inbox_cursor", "effect"):
            await self.sql(f"DROP TABLE IF EXISTS {table}")
        await self.sql("CREATE TABLE effect (name VARCHAR(200) NOT NULL)")
        await self.make_tables()

    async def make_tables(self) -> None:
        if self.is_async:
            await self.inbox.create_async()
        else:
            await asyncio.to_thread(self.inbox.create)

    async def close(self) -> None:
        if isinstance(self.engine, AsyncEngine):
            await self.engine.dispose()
        else:
            self.engine.dispose()

    async def call(self, work: Any, *, gate: Gate | None = None, fails: bool = False, group: str = "billing") -> None:
        """Run a handler that stores its events as effects. It may wait in a gate, and it may fail."""

        def effect(connection: Connection, taken: Any) -> None:
            for each in taken if isinstance(taken, tuple) else (taken,):
                connection.execute(text("INSERT INTO effect VALUES (:name)"), {"name": each.event.id[:50]})

        def end() -> None:
            if gate is not None:
                gate.stand()
            if fails:
                raise ValueError("the handler fails")

        def plain(taken: Any, connection: Connection) -> None:
            effect(connection, taken)
            end()

        async def asynchronous(taken: Any, connection: AsyncConnection) -> None:
            await connection.run_sync(effect, taken)
            await asyncio.to_thread(end)

        await self.run(asynchronous if self.is_async else plain, work, group=group)

    async def run(self, handler: Any, work: Any, *, group: str = "billing", gives: Any = None) -> None:
        asked = Asked(
            name="test",
            group=group,
            engine="tasks" if self.is_async else "threads",
            is_async=self.is_async,
            batch=isinstance(work, tuple),
            gives=gives or (AsyncConnection if self.is_async else Connection),
        )
        call = self.inbox.around(handler, asked)
        if self.is_async:
            await call(work)
        else:
            await asyncio.to_thread(call, work)

    async def effects(self) -> list[str]:
        return [row[0] for row in await self.sql("SELECT name FROM effect ORDER BY name")]

    async def marks(self) -> int:
        count: int = (await self.sql("SELECT count(*) FROM onward_inbox"))[0][0]
        return count

    async def cursors(self) -> list[tuple[str, int, str]]:
        return [
            tuple(row) for row in await self.sql("SELECT log_id, fence, done FROM onward_inbox_cursor ORDER BY log_id")
        ]
