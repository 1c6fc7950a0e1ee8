"""An inbox that cannot be reached: events wait for it, and no attempt is charged."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from onward import Onward, Retry
from onward.errors import Unreachable
from onward.flow.outage import Outage
from onward.inbox import SqlInbox
from tests.inbox.conftest import SERVERS, everywhere, url_of
from tests.inbox.place import Place, delivery
from tests.servers.server import Server

PATIENCE_S = 60.0


def test_a_file_that_cannot_be_opened_is_unreachable(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Place(create_engine(f"sqlite:///{tmp_path}/nowhere/effects.db"))
        with pytest.raises(Unreachable, match="unable to open database file"):
            await place.call(delivery("a"))
        await place.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", everywhere(SERVERS))
def test_a_server_that_is_down_is_unreachable(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = url_of(name, request, tmp_path)
    server: Server = request.getfixturevalue("postgres_server" if "postgres" in name else "mariadb_server")
    make: Callable[[str], Any] = create_async_engine if "async" in name else create_engine

    async def scenario() -> None:
        with server.proxy() as proxy:
            place = Place(make(url.replace(f":{server.port}", f":{proxy.port}")))
            await place.prepare()
            await place.call(delivery("a"))
            proxy.cut()
            for _ in range(2):  # first with the broken connection of the pool, then with a new one that is refused
                with pytest.raises(Unreachable):
                    await place.call(delivery("b"))
            proxy.mend()
            await place.call(delivery("b"))
            assert await place.effects() == ["a", "b"]
            await place.close()

    asyncio.run(scenario())


class Database:
    """A SQLite file that can be made unreachable."""

    def __init__(self, path: Path) -> None:
        self.away = False
        self.calls = 0
        self._path = path
        self.engine = create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE effect (id INTEGER NOT NULL)"))

    def _connect(self) -> sqlite3.Connection:
        self.calls += 1
        if self.away:
            raise sqlite3.OperationalError("unable to open database file")
        return sqlite3.connect(self._path, timeout=30, check_same_thread=False)

    def made(self) -> list[int]:
        with self.engine.begin() as connection:
            return [row[0] for row in connection.execute(text("SELECT id FROM effect ORDER BY id"))]


async def until(running: asyncio.Task[None], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition() and not running.done():
            await asyncio.wait([running], timeout=0.02)


def test_an_outage_charges_no_attempt_is_reported_by_readiness_and_ends_by_itself(tmp_path: Path) -> None:
    database, app = Database(tmp_path / "effects.db"), Onward(f"sqlite:///{tmp_path}/events.db", partitions=2)
    inbox = SqlInbox(database.engine)
    inbox.create()

    @app.handler("orders", group="billing", inbox=inbox, retry=Retry(attempts=1))
    def bill(order: dict[str, int], connection: Connection) -> None:
        connection.execute(text("INSERT INTO effect VALUES (:id)"), order)

    async def scenario() -> None:
        async with app:
            running = asyncio.create_task(app.run())
            await app.publish("orders", {"id": -1})
            await until(running, lambda: database.made() == [-1])
            database.away = True
            await app.publish_many("orders", [(f"k-{n % 5}", {"id": n}) for n in range(20)])
            await until(running, lambda: any("cannot be used" in trouble for trouble in app.health().troubles))
            assert not app.health().ready
            calls, began = database.calls, time.monotonic()
            await asyncio.sleep(1.0)
            rounds = (time.monotonic() - began) / 0.2 + 1
            assert database.calls - calls <= 5 * rounds, "it is tried again and again without a pause"
            database.away = False
            await until(running, lambda: database.made() == list(range(-1, 20)))
            await until(running, lambda: app.health().ready)
            assert await app.dead.count() == 0
            app.stop()
            await running

    asyncio.run(scenario())
    database.engine.dispose()


def test_a_statement_of_the_handler_that_fails_is_charged(tmp_path: Path) -> None:
    database, app = Database(tmp_path / "effects.db"), Onward(f"sqlite:///{tmp_path}/events.db", partitions=1)
    inbox = SqlInbox(database.engine)
    inbox.create()

    @app.handler("orders", group="billing", inbox=inbox, retry=Retry(attempts=1))
    def bill(order: dict[str, int], connection: Connection) -> None:
        connection.execute(text("INSERT INTO nowhere VALUES (:id)"), order)

    async def scenario() -> None:
        async with app:
            running = asyncio.create_task(app.run())
            await app.publish("orders", {"id": 1})
            async with asyncio.timeout(PATIENCE_S):
                while not await app.dead.count() and not running.done():
                    await asyncio.wait([running], timeout=0.02)
            app.stop()
            await running
            (letter,) = (await app.dead.list()).letters
            assert letter.failure is not None
            assert letter.failure.error == "OperationalError"

    asyncio.run(scenario())
    database.engine.dispose()


def test_the_pause_grows_with_the_outage_and_not_with_the_number_of_failures() -> None:
    outage = Outage()
    assert [outage.met("away", 100.0) for _ in range(50)] == [0.2] * 50
    assert outage.met("away", 100.2) == pytest.approx(0.2)
    assert outage.met("away", 103.0) == pytest.approx(3.0)
    assert outage.met("away", 200.0) == 10.0
    outage.over()
    assert (outage.why, outage.met("away", 300.0)) == ("", 0.2)
