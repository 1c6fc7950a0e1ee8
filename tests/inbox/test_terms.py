"""What an inbox refuses, and which rows it deletes."""

import asyncio
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from onward import Onward, Retry, settings
from onward.errors import BadHandler, BadSetting, BadStore, BrokerError, Busy
from onward.inbox import SqlInbox
from onward.inbox.horizon import horizon_s, longest_redelivery_s
from tests.inbox.conftest import Open, opener
from tests.inbox.place import Gate, Place, delivery, ground


def sync_inbox() -> SqlInbox:
    return SqlInbox(create_engine("sqlite://"))


def async_inbox() -> SqlInbox:
    return SqlInbox(create_async_engine("sqlite+aiosqlite://"))


async def takes_async(value: dict[str, Any], connection: AsyncConnection) -> None: ...
async def takes_none(value: dict[str, Any]) -> None: ...
async def takes_sync(value: dict[str, Any], connection: Connection) -> None: ...
async def takes_two(value: dict[str, Any], one: AsyncConnection, two: AsyncConnection) -> None: ...
async def takes_no_event(connection: AsyncConnection) -> None: ...
def plain(value: dict[str, Any], connection: Connection) -> None: ...


@pytest.mark.parametrize(
    ("inbox", "function", "options", "why"),
    [
        (sync_inbox, takes_async, {}, "needs an AsyncEngine"),
        (async_inbox, plain, {}, "needs an Engine"),
        (async_inbox, takes_none, {}, "AsyncConnection or AsyncSession"),
        (async_inbox, takes_sync, {}, "AsyncConnection or AsyncSession"),
        (async_inbox, takes_two, {}, "only one parameter"),
        (async_inbox, takes_no_event, {}, "must take the value"),
        (async_inbox, takes_async, {"batch_size": 10}, r"must be a list"),
        (sync_inbox, plain, {"engine": "processes"}, "worker processes"),
    ],
)
def test_a_handler_that_does_not_fit_its_inbox_is_refused(
    inbox: Any, function: Any, options: dict[str, Any], why: str
) -> None:
    app = Onward("sqlite:///unused.db")
    with pytest.raises(BadHandler, match=why):
        app.handler("orders", inbox=inbox(), **options)(function)
    assert app.handlers == []


def test_a_value_that_is_not_an_engine_is_refused() -> None:
    with pytest.raises(BadSetting, match="Engine or an AsyncEngine"):
        SqlInbox("sqlite://")  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="table="):
        SqlInbox(create_engine("sqlite://"), table="inbox; drop table orders")


def test_a_batch_handler_is_refused_without_stable_positions_and_a_fence(sqlite_database: Open) -> None:
    async def scenario() -> None:
        async with sqlite_database() as place:
            await place.inbox.start(ground(stable=False))  # single events need neither
            with pytest.raises(BadSetting, match="stable positions and a fence"):
                await place.inbox.start(ground(batch=True, stable=False))

    asyncio.run(scenario())


def test_a_horizon_shorter_than_the_longest_redelivery_is_refused() -> None:
    longest_s = longest_redelivery_s(settings.Settings(retention_s=1_000), Retry(attempts=3, jitter=0), 30)
    assert longest_s == 1_000 + (1 + 2) + 3 * 30 + 10 + 1 + 40
    assert horizon_s("h", None, longest_s) > longest_s
    assert horizon_s("h", longest_s + 1, longest_s) == longest_s + 1
    with pytest.raises(BadSetting, match="would happen twice"):
        horizon_s("h", longest_s, longest_s)


def test_a_handler_without_time_limit_makes_the_longest_redelivery_longer() -> None:
    known = settings.Settings()
    assert longest_redelivery_s(known, Retry(), None) > longest_redelivery_s(known, Retry(), 30)


def test_without_its_tables_the_inbox_does_not_start(sqlite_database: Open) -> None:
    async def scenario() -> None:
        async with sqlite_database() as place:
            await place.sql("DROP TABLE onward_inbox_cursor")
            with pytest.raises(BadStore, match=re.escape("await inbox.create_async() once")):
                await place.inbox.start(ground())
            for statement in place.inbox.schema().split(";\n")[:-1]:
                await place.sql(statement)
            await place.inbox.start(ground())

    asyncio.run(scenario())


def test_the_error_of_missing_tables_names_the_call_that_creates_them(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/effects.db")
    with pytest.raises(BadStore, match=re.escape("call inbox.create() once")):
        asyncio.run(SqlInbox(engine).start(ground()))
    engine.dispose()


def test_the_tables_may_be_created_several_times_at_once(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:
            for _ in range(5):
                for table in ("onward_inbox", "onward_inbox_cursor"):
                    await place.sql(f"DROP TABLE {table}")
                await asyncio.gather(*(place.make_tables() for _ in range(6)))
                await place.inbox.start(ground())

    asyncio.run(scenario())


def test_a_database_that_does_not_roll_back_is_refused(database: Open) -> None:
    async def scenario() -> None:
        with pytest.raises(BadSetting, match="does not roll back"):
            async with database(isolation_level="AUTOCOMMIT"):
                pass

    asyncio.run(scenario())


def test_a_lock_that_is_not_free_in_time_is_busy(tmp_path: Path) -> None:
    """On SQLite with a short timeout: the event stays open, and the handler has not run."""

    async def scenario() -> None:
        async with opener("sqlite", f"sqlite:///{tmp_path}/effects.db")(connect_args={"timeout": 0.1}) as place:
            gate = Gate()
            first = asyncio.create_task(place.call(delivery("a"), gate=gate))
            await gate.until_reached()
            with pytest.raises(Busy):
                await place.call(delivery("a"))
            gate.open.set()
            await first
            assert await place.effects() == ["a"]

    asyncio.run(scenario())


def test_rows_older_than_the_horizon_are_deleted_in_pages(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:
            await _fill(place, 2_500, age_s=201)
            await _fill(place, 3, age_s=100)
            await place.call(delivery("new"))
            assert await place.inbox.sweep() == 2_500  # the horizon is twice the 100 s of ground()
            assert await place.marks() == 4

    asyncio.run(scenario())


async def _fill(place: Place, count: int, *, age_s: int) -> None:
    at = int(time.time()) - age_s
    for start in range(0, count, 500):
        rows = ", ".join(f"('g', 't', '{age_s}-{n}', {at})" for n in range(start, min(start + 500, count)))
        await place.sql(f"INSERT INTO onward_inbox (grp, topic, event_id, done_at) VALUES {rows}")


@pytest.mark.parametrize(("name", "client"), [("SqlInbox", "sqlalchemy"), ("RedisInbox", "redis")])
def test_the_error_of_a_missing_client_library_names_the_package_to_install(name: str, client: str) -> None:
    code = (
        f"import sys; sys.modules[{client!r}] = None\n"
        "from onward.errors import MissingExtra\n"
        f"try:\n from onward.inbox import {name}\nexcept MissingExtra as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'onward[inbox]'" in out.stdout


def test_a_database_that_is_locked_at_the_start_is_reported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/effects.db"
    engine = create_engine(url, connect_args={"timeout": 0.05})
    SqlInbox(engine).create()
    with closing(sqlite3.connect(tmp_path / "effects.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BrokerError, match=r"test: its inbox's database cannot be used: database is locked"):
            asyncio.run(SqlInbox(engine).start(ground()))
    asyncio.run(SqlInbox(engine).start(ground()))
    engine.dispose()
