"""An inbox in an application, on the SQLite broker, with effects in a SQLite file."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from onward import Event, Onward, Retry
from onward.brokers.base import Filter
from onward.errors import BadSetting, InDoubt
from onward.inbox import SqlInbox

PATIENCE_S = 30.0
HANDLERS_OWN = "DELETE FROM effect WHERE 1 = 0"


def application(folder: Path, **settings: Any) -> Onward:
    return Onward(f"sqlite:///{folder}/events.db", partitions=2, **settings)


def effects_at(folder: Path) -> Engine:
    engine = create_engine(f"sqlite:///{folder}/effects.db", connect_args={"timeout": 30})
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS effect (id INTEGER NOT NULL)"))
    return engine


def made(engine: Engine) -> list[int]:
    with engine.begin() as connection:
        return sorted(row[0] for row in connection.execute(text("SELECT id FROM effect")))


async def run_until(app: Onward, done: Callable[[], bool], *, publish: int = 0) -> None:
    async with app:
        if publish:
            await app.publish_many("orders", [(f"k-{n % 7}", {"id": n}) for n in range(publish)])
        running = asyncio.create_task(app.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not done() and not running.done():
                    await asyncio.wait([running], timeout=0.02)
        finally:
            app.stop()
            await running


def test_a_plain_handler_gets_the_connection_of_the_inbox(tmp_path: Path) -> None:
    engine, app = effects_at(tmp_path), application(tmp_path)
    inbox = SqlInbox(engine)
    inbox.create()
    failed: set[int] = set()

    @app.handler("orders", group="billing", inbox=inbox, retry=Retry(first_delay_s=0.01))
    def bill(order: dict[str, int], connection: Connection) -> None:
        connection.execute(text("INSERT INTO effect VALUES (:id)"), order)
        if order["id"] % 5 == 0 and order["id"] not in failed:
            failed.add(order["id"])
            raise ValueError("once")

    asyncio.run(run_until(app, lambda: len(made(engine)) == 40, publish=40))
    assert made(engine) == list(range(40))
    assert len(failed) == 8
    engine.dispose()


@pytest.mark.parametrize("session", [False, True], ids=["connection", "session"])
def test_an_async_handler_gets_the_async_connection_or_session(tmp_path: Path, session: bool) -> None:
    engine, app = effects_at(tmp_path), application(tmp_path)
    async_engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/effects.db", connect_args={"timeout": 30})
    inbox = SqlInbox(async_engine)
    keys: set[str] = set()

    if session:

        @app.handler("orders", group="billing", inbox=inbox)
        async def with_session(session: AsyncSession, order: dict[str, int]) -> None:
            await session.execute(text("INSERT INTO effect VALUES (:id)"), order)
    else:

        @app.handler("orders", group="billing", inbox=inbox)
        async def with_connection(order: dict[str, int], connection: AsyncConnection, event: Event) -> None:
            keys.add(app.idempotency_key(event))
            await connection.execute(text("INSERT INTO effect VALUES (:id)"), order)

    async def scenario() -> None:
        await inbox.create_async()
        await run_until(app, lambda: len(made(engine)) == 20, publish=20)
        await async_engine.dispose()

    asyncio.run(scenario())
    assert made(engine) == list(range(20))
    assert session or {key.split(":")[0] for key in keys} == {"billing"}
    engine.dispose()


def test_a_batch_handler_has_a_cursor(tmp_path: Path) -> None:
    engine, app = effects_at(tmp_path), application(tmp_path)
    inbox = SqlInbox(engine)
    inbox.create()
    failed = [0]

    @app.handler("orders", inbox=inbox, batch_size=20, batch_wait_s=0.05, retry=Retry(first_delay_s=0.01))
    def bill(orders: list[dict[str, int]], session: Session) -> None:
        session.execute(text("INSERT INTO effect VALUES (:id)"), orders)
        if failed[0] < 3:
            failed[0] += 1
            raise ValueError("at first")

    asyncio.run(run_until(app, lambda: len(made(engine)) == 100, publish=100))
    assert made(engine) == list(range(100))
    with engine.begin() as connection:
        rows = list(connection.execute(text("SELECT topic, part, done FROM onward_inbox_cursor")))
    assert {(row.topic, row.part) for row in rows} == {("orders", 0), ("orders", 1)}
    assert all(row.done.startswith("0-") and " " not in row.done for row in rows)
    engine.dispose()


def test_an_event_of_a_batch_handler_from_the_aside_is_marked_by_a_row(tmp_path: Path) -> None:
    engine, app = effects_at(tmp_path), application(tmp_path, park_after_s=0.01)
    inbox = SqlInbox(engine)
    inbox.create()
    failed: list[int] = []

    @app.handler("orders", inbox=inbox, batch_size=5, retry=Retry(attempts=100, first_delay_s=0.05, factor=1))
    def bill(orders: list[dict[str, int]], connection: Connection) -> None:
        if len(failed) < 20 and any(order["id"] == 3 for order in orders):
            failed.append(len(orders))
            raise ValueError("until it has been set aside")
        connection.execute(text("INSERT INTO effect VALUES (:id)"), orders)

    asyncio.run(run_until(app, lambda: len(made(engine)) == 30, publish=30))
    assert made(engine) == list(range(30))
    with engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM onward_inbox")).scalar_one() >= 1
    engine.dispose()


def test_an_event_that_was_done_but_not_settled_has_its_effect_once(tmp_path: Path) -> None:
    """The group's progress is deleted, as after a crash between commit and settle, for every event."""
    engine = effects_at(tmp_path)
    inbox = SqlInbox(engine)
    inbox.create()
    seen: list[int] = []

    def life(publish: int) -> Onward:
        app = application(tmp_path)

        @app.handler("orders", group="billing", inbox=inbox)
        def bill(order: dict[str, int], connection: Connection) -> None:
            seen.append(order["id"])
            connection.execute(text("INSERT INTO effect VALUES (:id)"), order)

        asyncio.run(run_until(app, lambda: len(made(engine)) == publish, publish=30))
        return app

    async def forget(app: Onward) -> None:
        async with app:
            await app.broker.drop_group("orders", "billing")

    asyncio.run(forget(life(30)))
    life(60)
    assert sorted(seen) == sorted([*range(30), *range(30)])  # 30 of the first run, 30 new ones
    assert len(made(engine)) == 60
    engine.dispose()


def test_after_a_commit_without_an_answer_the_mark_is_looked_up_and_no_attempt_is_charged(tmp_path: Path) -> None:
    engine, app = effects_at(tmp_path), application(tmp_path)
    inbox = SqlInbox(engine)
    inbox.create()
    runs: list[int] = []
    lost: list[Any] = []

    @app.handler("orders", inbox=inbox, retry=Retry(attempts=1))
    def bill(order: dict[str, int], connection: Connection) -> None:
        runs.append(order["id"])
        connection.execute(text("INSERT INTO effect VALUES (:id)"), order)

    handler = app.handlers[0]
    call = handler.call

    def answer_lost(work: Any) -> None:
        call(work)
        if not lost:
            lost.append(work)
            raise InDoubt("the connection broke during the commit")

    app.handlers[0] = msgspec.structs.replace(handler, call=answer_lost)

    async def scenario() -> None:
        await run_until(app, lambda: len(made(engine)) == 5, publish=5)
        async with app:
            assert not (await app.broker.aside(handler.group).scan(Filter(), None, 10)).records

    asyncio.run(scenario())
    assert (sorted(runs), made(engine), len(lost)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], 1)
    engine.dispose()


def test_an_unsafe_horizon_is_refused_before_the_first_event(tmp_path: Path) -> None:
    engine, app = effects_at(tmp_path), application(tmp_path)
    inbox = SqlInbox(engine, horizon_s=3_600)
    inbox.create()

    @app.handler("orders", inbox=inbox)
    def bill(order: dict[str, int], connection: Connection) -> None:
        connection.execute(text("INSERT INTO effect VALUES (:id)"), order)

    with pytest.raises(BadSetting, match="horizon_s=3600 is too short"):
        asyncio.run(run_until(app, lambda: False, publish=1))
    assert made(engine) == []
    engine.dispose()


def test_the_idempotency_key_depends_on_the_group_and_the_event(tmp_path: Path) -> None:
    app = application(tmp_path)

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    order = app.event("orders", {})
    assert app.idempotency_key(order) == f"billing:{order.id}"

    @app.handler("orders", group="shipping")
    async def ship(order: dict[str, int]) -> None: ...

    with pytest.raises(BadSetting, match="group="):
        app.idempotency_key(order)
    assert app.idempotency_key(order, group="shipping") == f"shipping:{order.id}"


def test_the_mark_is_the_first_statement_of_the_transaction(tmp_path: Path) -> None:
    """After an earlier read, SQLite would refuse the write lock at once instead of waiting for it."""
    engine, app = effects_at(tmp_path), application(tmp_path)
    inbox = SqlInbox(engine)
    inbox.create()
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))

    @app.handler("orders", inbox=inbox)
    def bill(order: dict[str, int], connection: Connection) -> None:
        connection.execute(text(HANDLERS_OWN))
        connection.execute(text("INSERT INTO effect VALUES (:id)"), order)

    asyncio.run(run_until(app, lambda: HANDLERS_OWN in statements, publish=1))
    assert statements[statements.index(HANDLERS_OWN) - 1].startswith("INSERT INTO onward_inbox ")
    engine.dispose()
