"""Events of SQLAlchemy sessions: they commit with the data, or not at all."""

import asyncio
import gc
import weakref
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, Insert, create_engine, event, text
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.util import await_only

from onward.errors import BadOutbox, BadSetting
from onward.outbox import Outbox
from tests.outbox.shop import Order, Shop, inserts, maybe


def test_events_are_written_with_the_data_in_one_statement_just_before_the_commit(shop: Shop) -> None:
    statements = shop.statements()

    async def scenario() -> None:
        session = shop.session()
        shop.add(session, "a", "b")
        session.add(Order(id=1))
        shop.add(session, "c")
        assert shop.names() == []
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["a", "b", "c"]
    assert shop.orders() == [1]
    (insert,) = inserts(statements, shop.table)
    assert statements[1:] == [insert, "COMMIT"]  # no other statement: checks ask the driver, not the database
    assert "INSERT INTO shop_order" in statements[0]


def test_a_transaction_with_nothing_but_an_event_writes_it(shop: Shop) -> None:
    async def scenario() -> None:
        session = shop.session()
        shop.add(session, "alone")
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["alone"]


@pytest.mark.parametrize("ending", ["rollback", "close"])
def test_without_a_commit_nothing_is_written_then_or_later(shop: Shop, ending: str) -> None:
    async def scenario() -> None:
        session = shop.session()
        session.add(Order(id=1))
        shop.add(session, "gone")
        await maybe(session.flush())
        await maybe(getattr(session, ending)())
        session.add(Order(id=2))
        shop.add(session, "kept")
        await maybe(session.commit())
        session.add(Order(id=3))
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["kept"]
    assert shop.orders() == [2, 3]


def test_the_events_of_a_savepoint_share_its_fate(shop: Shop) -> None:
    async def scenario() -> None:
        session = shop.session()
        shop.add(session, "1")
        outer = await maybe(session.begin_nested())
        shop.add(session, "2")
        inner = await maybe(session.begin_nested())
        shop.add(session, "lost")
        await maybe(inner.rollback())
        inner = await maybe(session.begin_nested())
        session.add(Order(id=1))
        shop.add(session, "3")
        await maybe(inner.commit())
        await maybe(outer.commit())
        shop.add(session, "4")
        outer = await maybe(session.begin_nested())
        inner = await maybe(session.begin_nested())
        session.add(Order(id=2))
        shop.add(session, "lost too")
        await maybe(inner.commit())
        await maybe(outer.rollback())
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["1", "2", "3", "4"]
    assert shop.orders() == [1]


def test_a_savepoint_that_is_open_at_the_commit_commits_its_events(shop: Shop) -> None:
    async def scenario() -> None:
        session = shop.session()
        whole = await maybe(session.begin())
        await maybe(session.begin_nested())
        shop.add(session, "inside")
        await maybe(whole.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["inside"]


def test_a_failed_flush_in_a_savepoint_drops_its_events_only(shop: Shop) -> None:
    async def scenario() -> None:
        session = shop.session()
        session.add(Order(id=1))
        shop.add(session, "kept")
        inner = await maybe(session.begin_nested())
        shop.add(session, "dropped")
        await maybe(session.execute(text("SELECT 1")))
        with pytest.raises(IntegrityError):
            await maybe(session.execute(Insert(Order.__table__).values(id=1, total=0)))  # type: ignore[arg-type]
        await maybe(inner.rollback())
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["kept"]
    assert shop.orders() == [1]


def test_after_a_failed_flush_no_event_can_be_added_before_the_rollback(shop: Shop) -> None:
    async def scenario() -> None:
        with Session(shop.plain) as other, other.begin():
            other.add(Order(id=1))
        session = shop.session()
        shop.add(session, "dropped")
        session.add(Order(id=1))
        with pytest.raises(IntegrityError):
            await maybe(session.flush())
        with pytest.raises((BadSetting, InvalidRequestError)):
            shop.add(session, "refused")
        await maybe(session.rollback())
        shop.add(session, "kept")
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["kept"]


def test_a_session_that_begins_only_explicitly_refuses_events_outside_of_a_transaction(shop: Shop) -> None:
    async def scenario() -> None:
        session = shop.session(autobegin=False)
        with pytest.raises((BadSetting, InvalidRequestError), match="begin"):
            shop.add(session, "refused")
        await maybe(session.begin())
        shop.add(session, "kept")
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["kept"]


@pytest.mark.parametrize("moment", ["before_commit", "before_flush", "after_flush"])
@pytest.mark.parametrize("own_events", [False, True])
def test_listeners_may_add_events_while_the_session_commits(file_shop: Shop, moment: str, own_events: bool) -> None:
    shop = file_shop

    async def scenario() -> None:
        session = shop.session()
        plain = session.sync_session if shop.is_async else session
        if own_events:
            event.listen(plain, moment, lambda *_: None)  # so that the session has listeners of its own
        event.listen(plain, moment, lambda *_: shop.add(session, "by the listener"), once=True)
        session.add(Order(id=1))
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["by the listener"]


def test_a_listener_may_change_data_after_the_outbox_has_seen_the_commit(file_shop: Shop) -> None:
    shop, statements = file_shop, file_shop.statements()

    async def scenario() -> None:
        session = shop.session()
        shop.add(session, "a")
        plain = session.sync_session if shop.is_async else session
        event.listen(plain, "before_commit", lambda session: session.add(Order(id=1)))
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert "shop_order" in statements[-3]
    assert inserts(statements[-2:-1], shop.table)


def test_an_event_that_another_task_adds_too_late_is_reported(async_shop: Shop) -> None:
    shop = async_shop

    async def scenario() -> None:
        flushing, added = asyncio.Event(), asyncio.Event()

        def pause(*_: Any) -> None:
            flushing.set()
            await_only(added.wait())

        session = shop.session()
        session.add(Order(id=1))
        event.listen(session.sync_session, "before_flush", pause)
        commit = asyncio.create_task(session.commit())
        await flushing.wait()
        shop.add(session, "late")
        added.set()
        with pytest.raises(BadOutbox, match="1 events were added while the session was committing"):
            await commit
        await session.close()

    shop.play(scenario)
    assert shop.names() == []


def test_a_session_can_be_used_for_thousands_of_transactions(file_shop: Shop) -> None:
    shop = file_shop

    async def scenario() -> None:
        session = shop.session()
        for number in range(1_000):
            shop.add(session, str(number))
            await maybe(session.rollback() if number % 10 else session.commit())
        assert session.info == {}
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == [str(number) for number in range(0, 1_000, 10)]


def test_a_forgotten_session_is_collected_and_gives_its_connection_back(plain_shop: Shop) -> None:
    shop = plain_shop
    session = shop.session()
    shop.add(session, "gone")
    session.execute(text("SELECT 1"))
    forgotten = weakref.ref(session)
    del session
    gc.collect()
    assert forgotten() is None
    with shop.sync_engine.connect() as connection:  # it is the same connection, and its commit writes nothing
        connection.execute(text("SELECT 1"))
        connection.commit()
    assert shop.names() == []
    assert shop.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_the_events_of_one_session_are_not_written_by_another(plain_shop: Shop) -> None:
    shop = plain_shop
    with shop.session() as one, shop.session() as other:
        shop.add(one, "one")
        shop.add(other, "other")
        other.commit()
        assert shop.names() == ["other"]
        one.commit()
    assert shop.names() == ["other", "one"]


def test_scoped_sessions_are_their_sessions(shop: Shop) -> None:
    async def scenario() -> None:
        if shop.is_async:
            makers = async_sessionmaker(shop.engine)  # type: ignore[arg-type]
            scoped: Any = async_scoped_session(makers, scopefunc=asyncio.current_task)
        else:
            scoped = scoped_session(sessionmaker(shop.engine))  # type: ignore[arg-type]
        shop.add(scoped, "scoped")
        await maybe(scoped.commit())
        await maybe(scoped.remove())

    shop.play(scenario)
    assert shop.names() == ["scoped"]


def test_a_large_transaction_is_written_in_few_statements(shop: Shop) -> None:
    statements = shop.statements()
    names = [f"name-{number}" for number in range(1_200)]

    async def scenario() -> None:
        session = shop.session()
        shop.add(session, *names)
        for number in range(5):
            shop.outbox.add(session, "orders", bytes([number]) * 1_000_000)
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    stored = shop.stored()
    assert [(each.value or b"").decode() for each in stored[:1_200]] == names
    assert [each.value for each in stored[1_200:]] == [bytes([number]) * 1_000_000 for number in range(5)]
    assert len(inserts(statements, shop.table)) == 5  # of 500, 500, 202, 2 and 1 rows


# -- sessions that join the transaction of a connection ---------------------------------------------------------------


async def joined(shop: Shop, connection: Any, steps: list[str], **options: Any) -> None:
    """A session in the transaction of this connection."""
    session = shop.session(bind=connection, **options)
    session.add(Order(id=len(steps)))
    shop.add(session, "joined")
    for step in steps:
        await maybe(getattr(session, step)())


async def in_transaction(shop: Shop, connection: Any) -> int:
    found = await maybe(connection.execute(text(f"SELECT count(*) FROM {shop.table}")))
    count: int = found.scalar_one()
    return count


JOINED = [
    ("rollback_only", ["commit", "close"], 1),
    ("rollback_only", ["flush", "close"], 1),
    ("rollback_only", ["flush"], 0),
    ("conditional_savepoint", ["flush", "close"], 1),
    ("create_savepoint", ["commit", "close"], 1),
    ("create_savepoint", ["flush", "close"], 0),
    ("create_savepoint", ["rollback", "close"], 0),
]


@pytest.mark.parametrize(("mode", "steps", "events"), JOINED)
def test_a_session_in_the_transaction_of_a_connection_writes_when_it_ends(
    shop: Shop, mode: str, steps: list[str], events: int
) -> None:
    """As in test suites, and in handlers with an inbox: the session does not commit the transaction."""

    async def scenario() -> None:
        connection = await maybe(shop.engine.connect())
        transaction = await maybe(connection.begin())
        await joined(shop, connection, steps, join_transaction_mode=mode)
        assert await in_transaction(shop, connection) == events
        await maybe(transaction.commit())
        await maybe(connection.close())

    shop.play(scenario)
    assert len(shop.names()) == events


def test_a_session_in_the_transaction_of_a_connection_writes_its_data_first(shop: Shop) -> None:
    statements = shop.statements()

    async def scenario() -> None:
        connection = await maybe(shop.engine.connect())
        await maybe(connection.begin())
        await joined(shop, connection, ["commit", "close"], autoflush=False)
        await maybe(connection.commit())
        await maybe(connection.close())

    shop.play(scenario)
    written = [each for each in statements if each.startswith("INSERT")]
    assert "shop_order" in written[0]
    assert inserts(written[1:], shop.table)


def test_the_rollback_of_the_connection_removes_the_events_of_its_sessions(shop: Shop) -> None:
    async def scenario() -> None:
        connection = await maybe(shop.engine.connect())
        transaction = await maybe(connection.begin())
        await joined(shop, connection, ["commit", "close"])
        assert await in_transaction(shop, connection) == 1
        await maybe(transaction.rollback())
        await maybe(connection.begin())
        await joined(shop, connection, ["rollback", "close"])
        await maybe(connection.commit())
        await maybe(connection.close())

    shop.play(scenario)
    assert shop.names() == []


def test_a_session_with_a_connection_that_has_no_transaction_commits_its_own(shop: Shop) -> None:
    async def scenario() -> None:
        connection = await maybe(shop.engine.connect())
        await joined(shop, connection, ["commit", "close"])
        await joined(shop, connection, ["flush", "close", "close"])
        await maybe(connection.close())

    shop.play(scenario)
    assert shop.names() == ["joined"]


def test_two_phase_commits_write_before_the_transaction_is_prepared(mariadb_shop: Shop) -> None:
    with mariadb_shop.session(twophase=True) as session:
        session.add(Order(id=1))
        mariadb_shop.add(session, "a")
        session.prepare()
        session.commit()
    assert mariadb_shop.names() == ["a"]


# -- sessions that are refused ----------------------------------------------------------------------------------------


def test_a_session_with_two_databases_needs_an_outbox_with_one_of_their_engines(plain_shop: Shop) -> None:
    shop = plain_shop
    other = create_engine(f"sqlite:///{shop.folder}/other.db")
    binds: dict[Any, Any] = {Order: shop.sync_engine, Shop: other}
    unknown = Outbox(shop.app, "sqlite:///third.db", table=shop.table)
    foreign = Outbox(shop.app, create_engine(f"sqlite:///{shop.folder}/fourth.db"), table=shop.table)
    with Session(binds=binds) as session:
        for outbox in (unknown, foreign):
            with pytest.raises(BadSetting, match=r"several databases.*Outbox\(app, engine\)"):
                outbox.add(session, "orders", "refused")
        session.add(Order(id=1))
        shop.add(session, "a")
        session.commit()
    assert shop.names() == ["a"]
    other.dispose()


def test_a_session_that_chooses_its_database_by_itself_needs_an_outbox_with_an_engine(plain_shop: Shop) -> None:
    shop = plain_shop

    class RoutingSession(Session):
        def get_bind(self, *_: Any, **options: Any) -> Engine | Connection:
            return options.get("bind") or shop.sync_engine

    for bind in (None, create_engine(f"sqlite:///{shop.folder}/other.db")):
        with RoutingSession(bind) as session:
            with pytest.raises(BadSetting, match="several databases"):
                Outbox(shop.app, table=shop.table).add(session, "orders", "refused")
            shop.add(session, "a")
            session.commit()
    with Session() as unbound, pytest.raises(BadSetting, match="no database"):
        shop.add(unbound, "refused")
    assert shop.names() == ["a", "a"]


def test_an_outbox_without_an_engine_uses_the_database_of_the_session(shop: Shop) -> None:
    async def scenario() -> None:
        session = shop.session()
        Outbox(shop.app, table=shop.table).add(session, "orders", "a")
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["a"]


def test_autocommit_is_refused(shop: Shop) -> None:
    async def add_and_commit(session: Any) -> None:
        shop.add(session, "refused")
        await maybe(session.commit())  # an async session connects only now

    async def scenario() -> None:
        session = shop.session(bind=shop.engine.execution_options(isolation_level="AUTOCOMMIT"))
        with pytest.raises(BadSetting, match="autocommit mode"):
            await add_and_commit(session)
        await maybe(session.rollback())
        await maybe(session.close())
        session = shop.session()
        shop.add(session, "kept")
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["kept"]


def test_on_sqlite_transactions_may_be_begun_by_a_listener(file_shop: Shop) -> None:
    """As SQLAlchemy's documentation shows it: sqlite3 begins no transactions, a listener executes BEGIN."""
    shop = file_shop

    def set_up(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    event.listen(shop.sync_engine, "connect", set_up)
    event.listen(shop.sync_engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))

    async def scenario() -> None:
        session = shop.session()
        shop.add(session, "a")
        session.add(Order(id=1))
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["a"]


def test_another_database_is_refused(plain_shop: Shop) -> None:
    from sqlalchemy.dialects.oracle import dialect

    engine = create_engine("sqlite://")
    engine.dialect = dialect()  # type: ignore[no-untyped-call]  # a stand-in: no Oracle driver is installed
    with Session(engine) as session, pytest.raises(BadSetting, match="cannot write to oracle"):
        plain_shop.add(session, "refused")


def test_a_commit_that_failed_is_not_repeated_by_the_next_user_of_the_connection(plain_shop: Shop) -> None:
    shop = plain_shop
    outbox = Outbox(shop.app, shop.engine, table="no_such_outbox")
    with shop.session() as session:
        outbox.add(session, "orders", "a")
        with pytest.raises(BadOutbox) as caught:
            session.commit()
    with shop.sync_engine.begin() as connection:
        connection.execute(text("INSERT INTO shop_order VALUES (1, 0)"))
    assert caught.value is not None  # its traceback holds what the session had
    assert shop.orders() == [1]


# -- databases that refuse ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["rollback", "close"])
def test_a_missing_table_is_reported_and_the_data_is_not_committed(shop: Shop, ending: str) -> None:
    outbox = Outbox(shop.app, shop.engine, table="no_such_outbox")

    async def scenario() -> None:
        session = shop.session()
        session.add(Order(id=1))
        outbox.add(session, "orders", "a")
        with pytest.raises(BadOutbox, match=r"no_such_outbox does not exist.*onward outbox init"):
            await maybe(session.commit())
        await maybe(getattr(session, ending)())
        session.add(Order(id=2))
        shop.add(session, "b")
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.orders() == [2]
    assert shop.names() == ["b"]


def test_a_table_that_is_not_an_outbox_is_reported(shop: Shop) -> None:
    outbox = Outbox(shop.app, shop.engine, table="shop_order")

    async def scenario() -> None:
        session = shop.session()
        outbox.add(session, "orders", "a")
        with pytest.raises(BadOutbox, match="shop_order is not an outbox"):
            await maybe(session.commit())
        await maybe(session.rollback())
        await maybe(session.close())

    shop.play(scenario)


def test_a_missing_right_is_reported_with_the_grant(server_shop: Shop) -> None:
    shop = server_shop
    host = "" if shop.backend == "postgresql" else "@'127.0.0.1'"
    user = f"clerk_{uuid4().hex[:8]}"
    with shop.plain.begin() as connection:
        password = "PASSWORD" if shop.backend == "postgresql" else "IDENTIFIED BY"
        connection.execute(text(f"CREATE USER {user}{host} {password} 'clerk'"))
        connection.execute(text(f"GRANT ALL ON shop_order TO {user}{host}"))
    shop.url = shop.url.set(username=user, password="clerk")
    clerk = shop.new_engine()

    async def scenario() -> None:
        session = shop.session(bind=clerk)
        session.add(Order(id=1))
        shop.add(session, "a")
        with pytest.raises(BadOutbox, match=f"GRANT INSERT ON {shop.table} TO"):
            await maybe(session.commit())
        await maybe(session.close())
        with shop.plain.begin() as connection:
            connection.execute(text(f"GRANT INSERT ON {shop.table} TO {user}{host}"))
        session = shop.session(bind=clerk)
        shop.add(session, "b")
        await maybe(session.commit())
        await maybe(session.close())
        await maybe(clerk.dispose())

    shop.play(scenario)
    assert shop.names() == ["b"]


def test_a_read_only_transaction_is_reported(postgres_shop: Shop) -> None:
    with postgres_shop.session() as session:
        session.execute(text("SET TRANSACTION READ ONLY"))
        postgres_shop.add(session, "a")
        with pytest.raises(BadOutbox, match="cannot be written"):
            session.commit()


# -- locks -------------------------------------------------------------------------------------------------------------


def test_locked_keys_are_written_in_the_order_of_their_commits(server_shop: Shop) -> None:
    """The second transaction waits before it takes an id, until the first has committed."""
    shop = server_shop

    async def scenario() -> None:
        first = await maybe(shop.engine.connect())
        add = shop.outbox.add_async if shop.is_async else shop.outbox.add
        await maybe(add(first, "orders", "first", key="k", lock=True))
        async with AsyncOrThread(shop) as second:
            shop.add(second.session, "other", lock=True)
            await second.commit()
        async with AsyncOrThread(shop) as second:
            shop.outbox.add(second.session, "orders", "second", key="k", lock=True)
            commit = asyncio.create_task(second.commit())
            done, _ = await asyncio.wait([commit], timeout=0.3)
            assert not done
            await maybe(first.commit())
            await commit
        await maybe(first.close())

    shop.play(scenario)
    assert sorted(shop.names()) == ["first", "other", "second"]
    assert shop.names().index("first") < shop.names().index("second")


class AsyncOrThread:
    """A session whose commit may wait: a sync one commits in a thread."""

    def __init__(self, shop: Shop) -> None:
        self.session = shop.session()

    async def commit(self) -> None:
        if isinstance(self.session, AsyncSession):
            await self.session.commit()
        else:
            await asyncio.to_thread(self.session.commit)

    async def __aenter__(self) -> "AsyncOrThread":
        return self

    async def __aexit__(self, *_: object) -> None:
        await maybe(self.session.close())


def test_several_locked_keys_are_locked_in_one_order(server_shop: Shop) -> None:
    shop, statements = server_shop, server_shop.statements()

    async def scenario() -> None:
        session = shop.session()
        shop.add(session, "b", "a", "c", "a", lock=True)
        shop.add(session, "z")
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert shop.names() == ["b", "a", "c", "a", "z"]
    locks = [each for each in statements if "_lock" in each]
    assert len(locks) == 1


def test_a_lock_table_without_rows_is_reported(mariadb_shop: Shop) -> None:
    with mariadb_shop.plain.begin() as connection:
        connection.execute(text("CREATE OR REPLACE TABLE half_outbox_lock (slot SMALLINT PRIMARY KEY)"))
    outbox = Outbox(mariadb_shop.app, table="half_outbox")
    with mariadb_shop.session() as session:
        outbox.add(session, "orders", "a", key="k", lock=True)
        with pytest.raises(BadOutbox, match=r"half_outbox_lock has not all.*onward outbox init"):
            session.commit()


def test_lock_needs_a_key(plain_shop: Shop) -> None:
    with plain_shop.session() as session, pytest.raises(BadSetting, match="lock=True"):
        plain_shop.outbox.add(session, "orders", "a", lock=True)
