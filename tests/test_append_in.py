"""`app.append_in`: events in a transaction of the application, also if the application is not open."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from onward import Onward
from onward.brokers.base import TopicSpec
from onward.errors import BrokerError, PublishError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database in which the application has a table."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE sales (n INTEGER)")
    return path


@pytest.fixture
def app(path: Path) -> Onward:
    return Onward(f"sqlite:///{path}", partitions=2)


@pytest.fixture
def db(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, check_same_thread=False)) as db:
        yield db


def append(app: Onward, db: sqlite3.Connection, *numbers: int) -> Callable[[], None]:
    wake = app.append_in(db, [app.event("orders", n, key="k") for n in numbers])
    assert wake is not None
    return wake


def handled(path: Path, count: int) -> list[int]:
    """The first events that a new application with a handler gets."""
    app, found = Onward(f"sqlite:///{path}"), list[int]()

    @app.handler("orders")
    async def bill(n: int) -> None:
        found.append(n)

    async def running() -> None:
        async with app.running(), asyncio.timeout(40):
            while len(found) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(running())
    return found


def test_events_are_stored_with_the_commit_while_the_application_is_open(app: Onward, db: sqlite3.Connection) -> None:
    found: list[int] = []

    @app.handler("orders")
    async def bill(n: int) -> None:
        found.append(n)

    async def scenario() -> None:
        async with app.running(), asyncio.timeout(40):
            append(app, db, 1)
            db.rollback()
            wake = append(app, db, 2, 3)
            db.commit()
            wake()
            while len(found) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert found == [2, 3]


def test_a_plain_script_needs_no_open_application(app: Onward, path: Path, db: sqlite3.Connection) -> None:
    for n in range(3):
        wake = append(app, db, n)
        db.execute("INSERT INTO sales VALUES (?)", (n,))
        db.commit()
        wake()
    assert handled(path, 3) == [0, 1, 2]


def test_it_may_be_called_on_an_event_loop_while_the_application_is_not_open(
    app: Onward, path: Path, db: sqlite3.Connection
) -> None:
    async def scenario() -> None:
        append(app, db, 1)
        db.commit()

    asyncio.run(scenario())
    assert handled(path, 1) == [1]


def test_the_application_can_open_inside_a_transaction_that_has_written(path: Path, db: sqlite3.Connection) -> None:
    """It has its tables and topics, so it needs no lock to open."""
    first, second = Onward(f"sqlite:///{path}"), Onward(f"sqlite:///{path}")
    for app in (first, second):
        app.topology(TopicSpec("orders", 3))
    first.publish_sync("orders", 1, key="k")
    db.execute("INSERT INTO sales VALUES (1)")
    append(second, db, 2)
    db.commit()
    assert handled(path, 2) == [1, 2]


def test_tables_that_cannot_be_created_inside_a_transaction_are_an_error_with_its_cure(
    app: Onward, path: Path, db: sqlite3.Connection
) -> None:
    db.execute("INSERT INTO sales VALUES (1)")
    with pytest.raises(BrokerError, match=r"tables of Onward cannot be created now.*open the application before"):
        append(app, db, 1)
    db.rollback()
    append(app, db, 2)
    db.commit()
    assert handled(path, 1) == [2]


def test_topics_that_cannot_be_created_inside_a_transaction_are_an_error_with_its_cure(
    path: Path, db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.door._OPEN_S", 0.3)
    Onward(f"sqlite:///{path}").publish_sync("other", 1)  # creates the tables
    app = Onward(f"sqlite:///{path}")
    app.topology(TopicSpec("orders", 3))
    db.execute("INSERT INTO sales VALUES (1)")
    with pytest.raises(PublishError, match=r"could not be opened within 0\.3 s.*onward topology apply"):
        append(app, db, 1)
    db.rollback()
    deadline = time.monotonic() + 40
    while True:  # now it can open
        try:
            append(app, db, 2)
            break
        except PublishError:
            assert time.monotonic() < deadline
    db.commit()
    assert handled(path, 1) == [2]


def test_several_threads_may_be_the_first_at_the_same_time(app: Onward, path: Path) -> None:
    def write(n: int) -> None:
        with closing(sqlite3.connect(path, timeout=40)) as db:
            append(app, db, n)
            db.commit()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(handled(path, 8)) == [*range(8)]


def test_another_database_is_left_alone_and_the_broker_is_not_opened(tmp_path: Path, db: sqlite3.Connection) -> None:
    app = Onward(f"sqlite:///{tmp_path}/events.db")
    assert app.append_in(db, [app.event("orders", 1)]) is None
    assert app.append_in(object(), [app.event("orders", 1)]) is None
    assert not (tmp_path / "events.db").exists()


def test_a_broker_that_is_a_server_is_not_reached(db: sqlite3.Connection) -> None:
    for url in ("kafka://localhost:1", "redis://localhost:1"):
        app = Onward(url)
        assert app.append_in(db, [app.event("orders", 1)]) is None


def test_a_script_that_has_appended_ends(path: Path) -> None:
    script = f"""
import sqlite3
from onward import Onward
app, db = Onward("sqlite:///{path}"), sqlite3.connect("{path}")
wake = app.append_in(db, [app.event("orders", 1, key="k")])
db.commit()
wake()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert handled(path, 1) == [1]
