"""Making an outbox, what an event carries, and where it goes when the broker is the same SQLite file."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from opentelemetry import trace
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from onward import Event, Onward, Retry
from onward.errors import BadName, BadSetting, TooLarge, Unserialisable
from onward.inbox import SqlInbox
from onward.outbox import Outbox
from tests.examples import said_by
from tests.outbox.shop import Base, Order, Shop, maybe

SECRET = "postgresql+psycopg://ann:p%40ss@db.example:5433/shop?sslmode=require"
PATIENCE_S = 30.0


@pytest.fixture
def app(tmp_path: Path) -> Onward:
    return Onward(f"sqlite:///{tmp_path}/events.db", outbox_url="postgresql://db.example/shop")


@pytest.mark.parametrize(
    "database", [SECRET, make_url(SECRET), create_engine(SECRET), create_async_engine(SECRET)], ids=type
)
def test_an_outbox_knows_the_url_of_its_database_with_the_password(app: Onward, database: Any) -> None:
    outbox = Outbox(app, database)
    assert outbox.url == SECRET
    assert outbox.table == "onward_outbox"
    assert app.outboxes == [outbox]


def test_the_default_database_is_the_setting(app: Onward, tmp_path: Path) -> None:
    assert Outbox(app).url == "postgresql://db.example/shop"
    assert Outbox(Onward(f"sqlite:///{tmp_path}/events.db")).url is None


@pytest.mark.parametrize(
    ("database", "table", "why"),
    [
        ("oracle://db/shop", "outbox", "PostgreSQL, MariaDB, MySQL and SQLite"),
        (create_engine("sqlite://").pool, "outbox", "give a URL"),
        (7, "outbox", "give a URL"),
        (None, "out box", "letters"),
        (None, "a.b.c", "letters"),
        (None, "outbox; DROP TABLE shop", "letters"),
    ],
)
def test_a_wrong_database_or_table_is_refused(app: Onward, database: Any, table: str, why: str) -> None:
    with pytest.raises(BadSetting, match=why):
        Outbox(app, database, table=table)
    assert app.outboxes == []


def test_a_bad_event_is_refused_when_it_is_added(sqlite_shop: Shop) -> None:
    outbox = sqlite_shop.outbox
    with sqlite_shop.session() as session:
        with pytest.raises(BadName):
            outbox.add(session, "no topic", "a")
        with pytest.raises(TooLarge):
            outbox.add(session, "orders", "a" * 2_000_000)
        with pytest.raises(Unserialisable):
            outbox.add(session, "orders", object())
        with pytest.raises(Unserialisable, match="NUL"):
            outbox.add(session, "orders", "a", key="a\0b")
        with pytest.raises(BadSetting):
            outbox.add(session, "orders", "a", headers={"a": 1})  # type: ignore[dict-item]
        assert not session.in_transaction()
        kept = outbox.add(session, "orders", {"id": 1}, key="k", type="placed", headers={"a": "b"}, expires_s=60)
        session.commit()
    assert sqlite_shop.stored() == [kept]
    assert kept.headers["a"] == "b"
    assert len(kept.headers) == 2


def test_the_outbox_works_without_sqlalchemy_and_without_any_driver(tmp_path: Path) -> None:
    program = """
import sqlite3, sys
for name in ("sqlalchemy", "psycopg", "pymysql", "asyncpg", "opentelemetry"):
    sys.modules[name] = None
from onward import Onward
from onward.outbox import Outbox
from onward.outbox.schema import init

init("sqlite:///shop.db")
outbox = Outbox(Onward("sqlite:///events.db"), "postgresql://127.0.0.1:1/none")
connection = sqlite3.connect("shop.db")
outbox.add(connection, "orders", "a")
connection.commit()
outbox.ring()
print(connection.execute("SELECT topic, payload FROM onward_outbox").fetchall())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[('orders', b'a')]", done.stderr


# -- trace context -----------------------------------------------------------------------------------------------------

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def handle_one(shop: Shop, published: dict[str, str], added: list[Event], **options: Any) -> None:
    """Publish an event with these headers. Its handler adds an event to the outbox."""
    app, done = shop.app, threading.Event()

    @app.handler("orders", group="billing")
    def bill(order: str) -> None:
        with shop.session() as session:
            added.append(shop.outbox.add(session, "invoices", order, **options))
            session.commit()
        done.set()

    async def run() -> None:
        async with app.running():
            await app.publish("orders", "1", headers=published)
            assert await asyncio.to_thread(done.wait, PATIENCE_S)

    asyncio.run(run())


def test_an_event_that_a_handler_adds_carries_the_trace_of_the_handled_event(sqlite_shop: Shop) -> None:
    added: list[Event] = []
    handle_one(sqlite_shop, {"traceparent": PARENT, "tracestate": "a=1", "other": "stays"}, added)
    assert added[0].headers == {"traceparent": PARENT, "tracestate": "a=1"}
    assert sqlite_shop.stored() == added


def test_headers_that_are_given_win_over_those_of_the_trace(sqlite_shop: Shop) -> None:
    added: list[Event] = []
    handle_one(sqlite_shop, {"traceparent": PARENT}, added, headers={"traceparent": "mine", "x": "y"})
    assert added[0].headers == {"traceparent": "mine", "x": "y"}


def test_the_active_span_of_opentelemetry_is_carried(sqlite_shop: Shop) -> None:
    context = trace.SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False, trace.TraceFlags(1))
    with sqlite_shop.session() as session:
        with trace.use_span(trace.NonRecordingSpan(context)):
            inside = sqlite_shop.outbox.add(session, "orders", "a")
        outside = sqlite_shop.outbox.add(session, "orders", "a")
    assert inside.headers == {"traceparent": PARENT}
    assert outside.headers == {}


# -- the same file is the broker ---------------------------------------------------------------------------------------


class SameFile:
    """An application whose broker is the SQLite file of its own tables. It has no outbox table."""

    def __init__(self, folder: Path, *, is_async: bool) -> None:
        self.path = folder / "all.db"
        self.app = Onward(f"sqlite:///{self.path}", partitions=2)
        self.engine: Any = (
            create_async_engine(f"sqlite+aiosqlite:///{self.path}", connect_args={"timeout": 30})
            if is_async
            else create_engine(f"sqlite:///{self.path}", connect_args={"timeout": 30})
        )
        self.outbox = Outbox(self.app, self.engine)
        self._handled: Queue[str] = Queue()
        self.app.handler("orders", group="billing")(self._bill)

    def _bill(self, order: str) -> None:
        self._handled.put(order)

    def create(self) -> None:
        engine = create_engine(f"sqlite:///{self.path}")
        Base.metadata.create_all(engine)
        engine.dispose()

    async def handled(self, count: int) -> list[str]:
        """Waits until this many events were handled."""
        return [await asyncio.to_thread(self._handled.get, True, PATIENCE_S) for _ in range(count)]


def test_events_go_to_the_broker_in_the_same_file_in_the_transaction_of_the_session(file_shop: Shop) -> None:
    same = SameFile(file_shop.folder, is_async=file_shop.is_async)
    session_of = file_shop.session
    same.create()

    async def scenario() -> None:
        async with same.app.running():
            session = session_of(bind=same.engine)
            same.outbox.add(session, "orders", "gone", key="k")
            session.add(Order(id=1))
            await maybe(session.flush())
            await maybe(session.rollback())
            session.add(Order(id=2))
            same.outbox.add(session, "orders", "a", key="k")
            nested = await maybe(session.begin_nested())
            same.outbox.add(session, "orders", "gone", key="k")
            await maybe(nested.rollback())
            same.outbox.add(session, "orders", "b", key="k")
            await maybe(session.commit())
            await maybe(session.close())
            assert await same.handled(2) == ["a", "b"]
        await maybe(same.engine.dispose())

    asyncio.run(scenario())


def test_a_script_without_an_event_loop_may_add_to_the_broker_in_the_same_file(tmp_path: Path) -> None:
    same = SameFile(tmp_path, is_async=False)
    same.create()
    with Session(same.engine) as session:
        session.add(Order(id=1))
        same.outbox.add(session, "orders", "a")
        session.commit()
    with same.engine.connect() as connection:
        connection.execute(text("INSERT INTO shop_order VALUES (2, 0)"))
        same.outbox.add(connection, "orders", "b")
        connection.commit()
    raw = same.engine.raw_connection()
    same.outbox.add(raw.driver_connection, "orders", "c")
    raw.commit()
    raw.close()
    same.outbox.ring()
    same.engine.dispose()

    async def scenario() -> None:
        async with same.app.running():
            assert sorted(await same.handled(3)) == ["a", "b", "c"]

    asyncio.run(scenario())


def test_the_example_bills_each_order_once(tmp_path: Path) -> None:
    said = said_by("outbox.py", tmp_path, lambda out: out.count("pays") >= 3)
    assert sorted(said.splitlines()) == ["ann pays", "bob pays", "cleo pays"]


# -- an inbox and an outbox --------------------------------------------------------------------------------------------


def test_a_handler_with_an_inbox_adds_events_in_its_transaction(file_shop: Shop) -> None:
    """The session of the inbox does not commit; the inbox commits its connection."""
    shop, done = file_shop, threading.Event()
    failed: list[str] = []
    shop.outbox.on_ring(done.set)
    inbox = SqlInbox(shop.engine)

    def work(session: Any, order: str) -> None:
        session.add(Order(id=int(order)))
        shop.add(session, f"billed {order}")
        if not failed:
            failed.append(order)
            raise ValueError("at first")

    if shop.is_async:

        @shop.app.handler("orders", inbox=inbox, retry=Retry(first_delay_s=0.01))
        async def bill(order: str, session: AsyncSession) -> None:
            work(session, order)
    else:

        @shop.app.handler("orders", inbox=inbox, retry=Retry(first_delay_s=0.01))
        def bill_sync(order: str, session: Session) -> None:
            work(session, order)

    async def scenario() -> None:
        await (inbox.create_async() if shop.is_async else asyncio.to_thread(inbox.create))
        async with shop.app.running():
            await shop.app.publish("orders", "1")
            while shop.names() == []:
                assert await asyncio.to_thread(done.wait, PATIENCE_S)
                done.clear()  # a rollback rings too

    shop.play(scenario)
    assert failed == ["1"]
    assert shop.names() == ["billed 1"]
    assert shop.orders() == [1]
