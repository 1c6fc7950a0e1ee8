"""The bell of an outbox: relays are woken after a commit, and no writer waits for it or fails because of it."""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from onward import Onward
from onward.outbox import Outbox
from tests.outbox.shop import Order, Shop, maybe
from tests.servers.postgres import PostgresServer

PATIENCE_S = 30.0


@contextmanager
def listening(server: PostgresServer, channel: str) -> Iterator[Any]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f'LISTEN "{channel}"')
        yield connection


def heard(connection: Any, within_s: float = PATIENCE_S) -> int:
    """Waits for a notification. Returns how many have arrived."""
    found = list(connection.notifies(timeout=within_s, stop_after=1))
    return len(found) + len(list(connection.notifies(timeout=0)))


def test_a_commit_rings_after_the_rows_are_visible_and_a_rollback_does_not(shop: Shop) -> None:
    rings: list[int] = []
    end = shop.outbox.on_ring(lambda: rings.append(len(shop.names())))

    async def scenario() -> None:
        session = shop.session()
        shop.add(session, "gone")
        await maybe(session.rollback())
        session.add(Order(id=1))
        await maybe(session.commit())
        shop.add(session, "a")
        nested = await maybe(session.begin_nested())
        shop.add(session, "b")
        await maybe(nested.commit())
        assert rings == []
        await maybe(session.commit())
        assert rings == [2]
        end()
        shop.add(session, "c")
        await maybe(session.commit())
        await maybe(session.close())

    shop.play(scenario)
    assert rings == [2]


def test_a_connection_rings_when_it_returns_to_its_pool(shop: Shop) -> None:
    add = shop.outbox.add_async if shop.is_async else shop.outbox.add
    rings: list[int] = []
    shop.outbox.on_ring(lambda: rings.append(len(shop.names())))

    async def scenario() -> None:
        connection = await maybe(shop.engine.connect())
        await maybe(add(connection, "orders", "a"))
        session = shop.session(bind=connection)
        shop.add(session, "b")
        await maybe(session.commit())
        await maybe(session.close())
        await maybe(connection.commit())
        assert rings == []
        await maybe(connection.close())
        assert rings == [2]
        connection = await maybe(shop.engine.connect())
        await maybe(connection.execute(text("SELECT 1")))
        await maybe(connection.close())

    shop.play(scenario)
    assert rings == [2]


def test_a_relay_that_cannot_be_woken_does_not_fail_the_commit(sqlite_shop: Shop) -> None:
    rings: list[int] = []

    def broken() -> None:
        raise RuntimeError("the event loop is closed")

    sqlite_shop.outbox.on_ring(broken)
    sqlite_shop.outbox.on_ring(lambda: rings.append(1))
    with sqlite_shop.session() as session:
        sqlite_shop.add(session, "a")
        session.commit()
    assert rings == [1]


def test_a_commit_notifies_the_relays_of_other_processes(postgres_shop: Shop, postgres_server: PostgresServer) -> None:
    shop = postgres_shop
    with listening(postgres_server, shop.table) as listener, shop.session() as session:
        shop.add(session, "gone")
        session.rollback()
        assert heard(listener, 0.2) == 0
        shop.add(session, "a")
        session.commit()
        assert heard(listener) == 1


def test_many_commits_are_few_notifications(postgres_shop: Shop, postgres_server: PostgresServer) -> None:
    shop = postgres_shop
    with listening(postgres_server, shop.table) as listener:
        shop.outbox.ring()
        assert heard(listener) == 1  # the bell has its connection now
        begun = time.monotonic()
        while time.monotonic() < begun + 0.5:
            shop.outbox.ring()
            time.sleep(0.0005)
        took_s = time.monotonic() - begun
        time.sleep(0.1)
        count = heard(listener, 0)
    assert 1 <= count <= took_s / 0.01 + 2


def test_the_bell_survives_a_restart_of_the_database(postgres_shop: Shop, postgres_server: PostgresServer) -> None:
    shop = postgres_shop
    with listening(postgres_server, shop.table) as listener:
        shop.outbox.ring()
        assert heard(listener) == 1
    postgres_server.restart()
    with listening(postgres_server, shop.table) as listener:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            shop.outbox.ring()
            if heard(listener, 0.1):
                return
    pytest.fail("no ring after the restart")


def test_the_bell_works_in_a_forked_process(postgres_shop: Shop, postgres_server: PostgresServer) -> None:
    shop = postgres_shop
    with listening(postgres_server, shop.table) as listener:
        shop.outbox.ring()
        assert heard(listener) == 1
        with warnings.catch_warnings(action="ignore"):  # newer Pythons warn of threads
            pid = os.fork()
        if pid == 0:
            shop.outbox.ring()
            time.sleep(PATIENCE_S)
            os._exit(0)
        try:
            assert heard(listener) == 1
            shop.outbox.ring()  # the connection of the parent still works
            assert heard(listener) == 1
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_a_program_with_a_bell_ends_at_once_and_quietly(postgres_shop: Shop, tmp_path: Path) -> None:
    program = f"""
import sqlalchemy, sqlalchemy.orm
from onward import Onward
from onward.outbox import Outbox
engine = sqlalchemy.create_engine("{postgres_shop.url.render_as_string(hide_password=False)}")
outbox = Outbox(Onward("sqlite:///events.db"), engine, table="{postgres_shop.table}")
with sqlalchemy.orm.Session(engine) as session:
    outbox.add(session, "orders", "a")
    session.commit()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert postgres_shop.names() == ["a"]


def test_an_unreachable_bell_is_mentioned_once_and_only_to_those_who_debug(
    sqlite_shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(Onward(f"sqlite:///{sqlite_shop.folder}/events.db"), "postgresql://127.0.0.1:1/none")
    with caplog.at_level("DEBUG", "onward"):
        outbox.ring()
        deadline = time.monotonic() + PATIENCE_S
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        outbox.ring()
        time.sleep(0.1)
    (record,) = caplog.records
    assert record.levelname == "DEBUG"
    assert "cannot wake" in record.getMessage()


def test_the_bell_never_notifies_inside_the_transaction(postgres_shop: Shop) -> None:
    statements = postgres_shop.statements()
    with postgres_shop.session() as session:
        postgres_shop.add(session, "a")
        session.commit()
    assert not [each for each in statements if "NOTIFY" in each.upper()]
