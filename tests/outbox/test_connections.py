"""Events on plain connections: they are written at once, in the transaction that is open there."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pymysql
import pytest
from sqlalchemy import text

from onward.errors import BadOutbox, BadSetting, TooLarge
from onward.outbox import Outbox
from tests.outbox.shop import Shop, maybe


class Plain:
    """The part of a connection that all drivers have."""

    def __init__(self, shop: Shop, name: str) -> None:
        self.shop, self.name = shop, name
        self.connection = CONNECT[name](shop)
        self.outbox = shop.outbox

    def close(self) -> None:
        self.connection.close()


def connect_psycopg(shop: Shop, **options: Any) -> Any:
    return psycopg.connect(shop.url.set(drivername="postgresql").render_as_string(hide_password=False), **options)


def connect_psycopg2(shop: Shop) -> Any:
    return psycopg2.connect(shop.url.set(drivername="postgresql").render_as_string(hide_password=False))


def connect_pymysql(shop: Shop, **options: Any) -> Any:
    url = shop.url
    return pymysql.connect(
        host=url.host,
        port=url.port or 0,
        user=url.username,
        password=url.password or "",
        database=url.database,
        **options,
    )


def connect_sqlite3(shop: Shop, **options: Any) -> Any:
    return sqlite3.connect(str(shop.url.database), **options)


CONNECT: dict[str, Callable[..., Any]] = {
    "psycopg": connect_psycopg,
    "psycopg2": connect_psycopg2,
    "pymysql": connect_pymysql,
    "sqlite3": connect_sqlite3,
}
SHOPS = {"psycopg": "postgres_shop", "psycopg2": "postgres_shop", "pymysql": "mariadb_shop", "sqlite3": "sqlite_shop"}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.servers] * (name != "sqlite3")) for name in CONNECT])
def plain(request: pytest.FixtureRequest) -> Iterator[Plain]:
    plain = Plain(request.getfixturevalue(SHOPS[request.param]), request.param)
    yield plain
    plain.close()


def execute(connection: Any, statement: str) -> None:
    with (
        connection.cursor() if not isinstance(connection, sqlite3.Connection) else closing_cursor(connection) as cursor
    ):
        cursor.execute(statement)


@contextmanager
def closing_cursor(connection: sqlite3.Connection) -> Iterator[sqlite3.Cursor]:
    cursor = connection.cursor()
    yield cursor
    cursor.close()


def test_an_event_commits_with_the_data_of_its_connection(plain: Plain) -> None:
    shop, connection = plain.shop, plain.connection
    execute(connection, "INSERT INTO shop_order VALUES (1, 0)")
    event = shop.outbox.add(connection, "orders", {"id": 1}, key="ann", type="placed", headers={"a": "b"})
    assert shop.stored() == []
    connection.commit()
    assert shop.stored() == [event]
    shop.add(connection, "gone")
    connection.rollback()
    assert shop.stored() == [event]


def test_events_that_are_hard_to_store_come_back_as_they_are(plain: Plain) -> None:
    shop, connection = plain.shop, plain.connection
    events = [
        shop.outbox.add(connection, "orders", None),
        shop.outbox.add(connection, "orders", b""),
        shop.outbox.add(connection, "orders", bytes(range(256)), key=""),
        shop.outbox.add(connection, "orders", "%s ? :1 $1 ' \" \\", key="%s ? ' \" \\ \U0001f600", type="größe"),
        shop.outbox.add(connection, "orders", 1, key="k" * 1_000, headers={"ü %s": "\x00\n", "e": ""}, expires_s=60),
    ]
    connection.commit()
    assert shop.stored() == events


def test_an_event_can_be_added_with_a_lock(plain: Plain) -> None:
    shop, connection = plain.shop, plain.connection
    shop.add(connection, "a", "b", lock=True)
    shop.add(connection, "a", lock=True)
    connection.commit()
    assert shop.names() == ["a", "b", "a"]


def test_a_missing_table_is_named_with_its_cure(plain: Plain) -> None:
    outbox = Outbox(plain.shop.app, table="no_such_outbox")
    with pytest.raises(BadOutbox, match=r"no_such_outbox does not exist.*onward outbox init"):
        outbox.add(plain.connection, "orders", "a")
    plain.connection.rollback()


def test_other_errors_of_the_driver_are_not_changed(plain: Plain) -> None:
    plain.close()
    with pytest.raises(Exception, match=r"(?i)closed|\(0, ''\)") as caught:
        plain.shop.add(plain.connection, "a")
    assert type(caught.value).__module__.partition(".")[0] == plain.name
    plain.connection = CONNECT[plain.name](plain.shop)


# -- autocommit --------------------------------------------------------------------------------------------------------


def test_psycopg_in_autocommit_needs_a_transaction_block(postgres_shop: Shop) -> None:
    with connect_psycopg(postgres_shop, autocommit=True) as connection:
        with pytest.raises(BadSetting, match=r"no open transaction.*connection\.transaction\(\)"):
            postgres_shop.add(connection, "refused")
        with connection.transaction():
            postgres_shop.add(connection, "a")
    assert postgres_shop.names() == ["a"]


def test_psycopg2_in_autocommit_is_refused(postgres_shop: Shop) -> None:
    connection = connect_psycopg2(postgres_shop)
    connection.autocommit = True
    with pytest.raises(BadSetting, match="no open transaction"):
        postgres_shop.add(connection, "refused")
    connection.close()
    assert postgres_shop.names() == []


@pytest.mark.parametrize("autocommit", [True, None])
def test_pymysql_in_autocommit_needs_begin(mariadb_shop: Shop, autocommit: bool | None) -> None:
    connection = connect_pymysql(mariadb_shop, autocommit=autocommit)
    with pytest.raises(BadSetting, match=r"no open transaction.*begin\(\)"):
        mariadb_shop.add(connection, "refused")
    connection.begin()
    mariadb_shop.add(connection, "a")
    connection.rollback()
    connection.begin()
    mariadb_shop.add(connection, "b")
    connection.commit()
    connection.close()
    assert mariadb_shop.names() == ["b"]


def test_sqlite3_in_autocommit_needs_begin(sqlite_shop: Shop) -> None:
    connection = connect_sqlite3(sqlite_shop, isolation_level=None)
    with pytest.raises(BadSetting, match=r"no open transaction.*BEGIN"):
        sqlite_shop.add(connection, "refused")
    connection.execute("BEGIN")
    sqlite_shop.add(connection, "a")
    connection.execute("COMMIT")
    connection.close()
    assert sqlite_shop.names() == ["a"]


# -- async drivers -----------------------------------------------------------------------------------------------------


def address(shop: Shop) -> str:
    return shop.url.set(drivername="postgresql").render_as_string(hide_password=False)


def test_asyncpg_writes_in_its_transaction(postgres_shop: Shop) -> None:
    shop = postgres_shop

    async def scenario() -> None:
        connection = await asyncpg.connect(address(shop))
        with pytest.raises(BadSetting, match=r"no open transaction.*async with connection\.transaction\(\)"):
            await shop.outbox.add_async(connection, "orders", "refused")
        with pytest.raises(BadSetting, match="add_async"):
            shop.outbox.add(connection, "orders", "refused")
        async with connection.transaction():
            await shop.outbox.add_async(connection, "orders", "a", key="k", lock=True, headers={"x": "y"})
        transaction = connection.transaction()
        await transaction.start()
        await shop.outbox.add_async(connection, "orders", "gone")
        await transaction.rollback()
        async with connection.transaction():
            with pytest.raises(BadOutbox, match="onward outbox init"):
                await Outbox(shop.app, table="none").add_async(connection, "orders", "refused")
            with pytest.raises(asyncpg.PostgresError, match="aborted"):
                await shop.outbox.add_async(connection, "orders", "refused")
        await connection.close()
        async with asyncpg.create_pool(address(shop)) as pool, pool.acquire() as pooled, pooled.transaction():
            await shop.outbox.add_async(pooled, "orders", "b")

    shop.play(scenario)
    assert shop.names() == ["a", "b"]


def test_an_async_connection_of_psycopg_writes_in_its_transaction(postgres_shop: Shop) -> None:
    shop = postgres_shop

    async def scenario() -> None:
        async with await psycopg.AsyncConnection.connect(address(shop)) as connection:
            with pytest.raises(BadSetting, match="add_async"):
                shop.outbox.add(connection, "orders", "refused")
            await shop.outbox.add_async(connection, "orders", "a", key="k", lock=True)
            await connection.commit()
            await shop.outbox.add_async(connection, "orders", "gone")
            await connection.rollback()
        async with await psycopg.AsyncConnection.connect(address(shop), autocommit=True) as connection:
            with pytest.raises(BadSetting, match=r"async with connection\.transaction\(\)"):
                await shop.outbox.add_async(connection, "orders", "refused")
            async with connection.transaction():
                await shop.outbox.add_async(connection, "orders", "b")

    shop.play(scenario)
    assert shop.names() == ["a", "b"]


# -- SQLAlchemy's connections ------------------------------------------------------------------------------------------


def test_a_connection_of_sqlalchemy_writes_at_once_in_its_transaction(shop: Shop) -> None:
    add = shop.outbox.add_async if shop.is_async else shop.outbox.add

    async def scenario() -> None:
        connection = await maybe(shop.engine.connect())
        await maybe(connection.execute(text("INSERT INTO shop_order VALUES (1, 0)")))
        await maybe(add(connection, "orders", "a", key="k", lock=True))
        found = await maybe(connection.execute(text(f"SELECT count(*) FROM {shop.table}")))
        assert found.scalar_one() == 1
        assert shop.names() == []
        await maybe(connection.commit())
        await maybe(add(connection, "orders", "gone"))
        await maybe(connection.rollback())
        nested = await maybe(connection.begin_nested())
        await maybe(add(connection, "orders", "gone too"))
        await maybe(nested.rollback())
        await maybe(add(connection, "orders", "b"))
        await maybe(connection.commit())
        await maybe(connection.close())

    shop.play(scenario)
    assert shop.names() == ["a", "b"]


def test_a_connection_of_sqlalchemy_in_autocommit_is_refused(shop: Shop) -> None:
    add = shop.outbox.add_async if shop.is_async else shop.outbox.add

    async def scenario() -> None:
        connection = await maybe(shop.engine.execution_options(isolation_level="AUTOCOMMIT").connect())
        with pytest.raises(BadSetting, match="autocommit"):
            await maybe(add(connection, "orders", "refused"))
        await maybe(connection.close())

    shop.play(scenario)
    assert shop.names() == []


def test_the_wrong_method_names_the_right_one(shop: Shop) -> None:
    async def scenario() -> None:
        connection = await maybe(shop.engine.connect())
        session = shop.session()
        if shop.is_async:
            with pytest.raises(BadSetting, match="add_async"):
                shop.outbox.add(connection, "orders", "refused")
        else:
            with pytest.raises(BadSetting, match=r"outbox\.add\("):
                await shop.outbox.add_async(connection, "orders", "refused")
        with pytest.raises(BadSetting, match=r"outbox\.add\("):
            await shop.outbox.add_async(session, "orders", "refused")
        await maybe(connection.close())
        await maybe(session.close())

    shop.play(scenario)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Cursor:
    """A class that the outbox does not know."""


def test_an_unknown_object_is_refused_with_all_that_is_known(sqlite_shop: Shop) -> None:
    for target in (Cursor(), None, "sqlite:///shop.db", sqlite_shop.engine):
        with pytest.raises(BadSetting, match=r"cannot write with .*Session.*psycopg.*sqlite3.*onward\.django"):
            sqlite_shop.add(target, "refused")

    async def scenario() -> None:
        with pytest.raises(BadSetting, match="cannot write with"):
            await sqlite_shop.outbox.add_async(Cursor(), "orders", "refused")

    asyncio.run(scenario())


def test_a_subclass_of_a_connection_is_a_connection(sqlite_shop: Shop) -> None:
    class Traced(sqlite3.Connection):
        pass

    connection = connect_sqlite3(sqlite_shop, factory=Traced)
    sqlite_shop.add(connection, "a")
    connection.commit()
    connection.close()
    assert sqlite_shop.names() == ["a"]


def test_a_bad_event_is_refused_before_anything_is_written(sqlite_shop: Shop, tmp_path: Path) -> None:
    connection = connect_sqlite3(sqlite_shop)
    for bad in ({"key": "a\0b"}, {"key": "\ud800"}, {"headers": {"a": 1}}, {"key": 7}):
        with pytest.raises(Exception, match=r"."):
            sqlite_shop.outbox.add(connection, "orders", "a", **bad)
    with pytest.raises(TooLarge):
        sqlite_shop.outbox.add(connection, "orders", "a" * 2_000_000)
    assert not connection.in_transaction
    connection.close()
