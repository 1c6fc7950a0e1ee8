"""Publishing inside a transaction of the application: any connection, rollbacks, threads, killed processes."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from onward import clock
from onward.brokers.base import Broker, Progress, Subscription
from onward.brokers.sqlite import lock_holder, open_broker
from onward.errors import Backlogged, BadSetting, Closed, PublishError, TooLarge
from onward.event import Delivery, Event, Partition, new_id
from onward.settings import Settings

NEVER_LOOKS: dict[str, Any] = {"lease_s": 900.0, "max_poll_gap_s": 1_800.0}  # a renewal is a look, too
PUBLISHER = """
import asyncio, sys
from onward.brokers.sqlite import open_broker
from onward.event import Event, new_id
from onward.settings import Settings

async def main(path, calls):
    broker = open_broker(f"sqlite:///{path}", Settings(partitions=4))
    for n in range(int(calls)):
        await broker.publish([Event(new_id(), "orders", f"process-{k}", b"%d" % n) for k in range(2)])
    await broker.close()

asyncio.run(main(*sys.argv[1:]))
"""
VICTIM = """
import asyncio, os, signal, sqlite3, sys
from onward.brokers.sqlite import open_broker
from onward.event import Event, new_id
from onward.settings import Settings

async def main(path, when):
    broker = open_broker(f"sqlite:///{path}", Settings(partitions=4))
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO sales VALUES (1)")
    wake = broker.append_in(connection, [Event(new_id(), "orders", "k", b"1")])
    if when == "after the commit":
        connection.commit()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


def event(n: int, key: str | None = "k", *, topic: str = "orders", size: int = 0) -> Event:
    return Event(new_id(), topic, key, str(n).encode().ljust(size, b"."))


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[Broker]:
    options = {"partitions": 4, "lease_s": 3.0, "takeover_grace_s": 0.1} | options
    broker = open_broker(f"sqlite:///{path}", Settings(**options))
    try:
        yield broker
    finally:
        await broker.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database in which the application has a table."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE sales (n INTEGER)")
    return path


@pytest.fixture
def only_the_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members with NEVER_LOOKS do not look for events by themselves, so a lost ring would stop them."""
    monkeypatch.setattr("onward.brokers.sqlite.subscription._LOOK_S", 600.0)


async def join(broker: Broker, topic: str = "orders", *, group: str = "billing") -> Subscription:
    return await broker.subscribe([topic], group=group, member="m", ordering="key", start="earliest")


async def take(subscription: Subscription, count: int, *, wait_s: float = 1.0) -> list[Delivery]:
    """Receive this many events, and make sure that there are no more."""
    found: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            messages = await subscription.receive(1_000, 1 << 24, wait_s)
            found += [message for message in messages if isinstance(message, Delivery)]
    assert len(found) == count, "more events than expected"
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(40):
        while not condition():
            await asyncio.to_thread(time.sleep, 0.02)


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    return [int((each.event.value or b"").rstrip(b".")) for each in deliveries]


def by_key(deliveries: Sequence[Delivery]) -> dict[str | None, list[int]]:
    keys = dict.fromkeys(each.event.key for each in deliveries)
    return {key: numbers([each for each in deliveries if each.event.key == key]) for key in keys}


def check_positions(deliveries: Sequence[Delivery]) -> None:
    """Positions count up without a gap in each partition: none was given twice, and a rollback left no hole."""
    partitions: dict[Partition, list[int]] = {}
    for each in deliveries:
        partitions.setdefault(each.partition, []).append(each.position)
    assert partitions == {partition: [*range(len(found))] for partition, found in partitions.items()}


def sales(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as db:
        return [n for (n,) in db.execute("SELECT n FROM sales ORDER BY n")]


def wake_all(rings: Sequence[Callable[[], None] | None]) -> None:
    for ring in rings:
        assert ring is not None
        ring()


def test_an_event_is_stored_with_the_data_or_not_at_all(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            with closing(sqlite3.connect(path)) as db:
                for n in range(20):
                    db.execute("INSERT INTO sales VALUES (?)", (n,))
                    assert broker.append_in(db, [event(n)])
                    if n % 3:
                        db.commit()
                    else:
                        db.rollback()
            kept = [n for n in range(20) if n % 3]
            found = await take(await join(broker), len(kept))
            assert numbers(found) == kept == sales(path)
            check_positions(found)

    asyncio.run(scenario())


def test_events_of_a_savepoint_that_was_rolled_back_are_not_stored(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            with closing(sqlite3.connect(path)) as db:
                broker.append_in(db, [event(0), event(0, "a"), event(0, "b")])
                for n in range(1, 9):
                    db.execute("SAVEPOINT one")
                    broker.append_in(db, [event(n), event(n, f"new-{n}")])
                    if n % 2:
                        db.execute("ROLLBACK TO one")
                    db.execute("RELEASE one")
                db.commit()
            await broker.publish([event(9)])
            found = await take(await join(broker), 3 + 4 * 2 + 1)
            assert by_key(found)["k"] == [0, 2, 4, 6, 8, 9]
            check_positions(found)

    asyncio.run(scenario())


def immediate(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level="IMMEDIATE")


def by_hand(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN")
    return db


def with_row_objects(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    return db


def with_dicts(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    db.row_factory = lambda cursor, row: dict(zip([column[0] for column in cursor.description], row, strict=True))
    return db


def with_bytes(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    db.text_factory = bytes
    return db


def by_link(path: Path) -> sqlite3.Connection:
    link = path.with_name("link.db")
    link.symlink_to(path)
    return sqlite3.connect(link)


def by_relative_path(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(os.path.relpath(path))


def by_uri(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)


class OwnConnection(sqlite3.Connection):
    pass


def of_own_class(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, factory=OwnConnection)


@pytest.mark.parametrize(
    "connect",
    [
        sqlite3.connect,
        immediate,
        by_hand,
        with_row_objects,
        with_dicts,
        with_bytes,
        by_link,
        by_relative_path,
        by_uri,
        of_own_class,
    ],
)
def test_any_connection_to_the_file_may_be_used(path: Path, connect: Callable[[Path], sqlite3.Connection]) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            member = await join(broker)
            with closing(connect(path)) as db:
                before = db.row_factory, db.text_factory
                db.execute("INSERT INTO sales VALUES (1)")
                ring = broker.append_in(db, [event(1), event(1, None)])
                assert (db.row_factory, db.text_factory) == before
                db.commit()
            wake_all([ring])
            assert numbers(await take(member, 2)) == [1, 1]
        assert sales(path) == [1]

    asyncio.run(scenario())


@pytest.mark.parametrize("rolled_back", [False, True])
def test_an_async_session_of_sqlalchemy_may_be_used(path: Path, rolled_back: bool) -> None:
    async def scenario() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        async with opened(path) as broker, AsyncSession(engine) as session:
            await session.execute(text("INSERT INTO sales VALUES (1)"))
            adapter = (await (await session.connection()).get_raw_connection()).dbapi_connection
            assert await session.run_sync(lambda _: broker.append_in(adapter, [event(1)]))
            await (session.rollback() if rolled_back else session.commit())
            assert len(await take(await join(broker), 0 if rolled_back else 1)) == len(sales(path))
        await engine.dispose()

    asyncio.run(scenario())


@pytest.mark.parametrize("rows", [0, 1])
def test_a_connection_in_autocommit_is_refused_and_nothing_is_stored(path: Path, rows: int) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                for n in range(rows):
                    db.execute("INSERT INTO sales VALUES (?)", (n,))
                with pytest.raises(BadSetting, match=r"autocommit.*BEGIN IMMEDIATE"):
                    broker.append_in(db, [event(0)])
                assert not db.in_transaction
            await broker.publish([event(1)])
            assert numbers(await take(await join(broker), 1)) == [1]

    asyncio.run(scenario())


def test_a_connection_to_another_database_is_left_alone(path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            for place in (":memory:", "", tmp_path / "other.db"):
                with closing(sqlite3.connect(place)) as db:
                    db.execute("ATTACH ? AS shop", (str(path),))  # commits in two files are not atomic
                    assert broker.append_in(db, [event(0)]) is None
                    assert not db.in_transaction
            await broker.publish([event(1)])
            assert numbers(await take(await join(broker), 1)) == [1]

    asyncio.run(scenario())


def test_a_hard_link_to_the_file_is_refused(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            os.link(path, path.with_name("twin.db"))
            twin = closing(sqlite3.connect(path.with_name("twin.db")))
            with twin as db, pytest.raises(BadSetting, match=r"twin\.db and .*shop\.db are two names"):
                broker.append_in(db, [event(0)])

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["mode=ro", "query_only"])
def test_the_error_for_a_read_only_connection_says_how_to_open_it(path: Path, how: str) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            uri = f"{path.as_uri()}?{how if how == 'mode=ro' else 'mode=rw'}"
            with closing(sqlite3.connect(uri, uri=True)) as db:
                db.execute("PRAGMA query_only = ON" if how == "query_only" else "SELECT 1")
                with pytest.raises(PublishError, match=r"this connection cannot write .*readonly.*mode=ro") as raised:
                    broker.append_in(db, [event(0)])
            assert len(raised.value.refused) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("ended", [True, False])
def test_a_transaction_that_read_before_another_one_wrote_learns_to_begin_immediate(path: Path, ended: bool) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            with closing(by_hand(path)) as db, closing(sqlite3.connect(path)) as other:
                db.execute("SELECT count(*) FROM sales").fetchall()
                other.execute("INSERT INTO sales VALUES (1)")
                if ended:
                    other.commit()
                with pytest.raises(PublishError, match=r"has written since this one.*BEGIN IMMEDIATE.*SQLAlchemy"):
                    broker.append_in(db, [event(0)])
                other.commit()
                db.rollback()
                db.execute("BEGIN IMMEDIATE")
                broker.append_in(db, [event(1)])
                db.commit()
            assert numbers(await take(await join(broker), 1)) == [1]

    asyncio.run(scenario())


def test_a_full_backlog_is_an_error_and_the_rest_of_the_transaction_can_be_committed(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path, max_backlog_bytes=2_000) as broker:
            with closing(sqlite3.connect(path)) as db:
                db.execute("INSERT INTO sales VALUES (1)")
                broker.append_in(db, [event(0, size=900)])
                with pytest.raises(Backlogged, match="max_backlog_bytes=2,000") as raised:
                    broker.append_in(db, [event(1, "a", size=600), event(1, "b", size=600)])
                assert len(raised.value.refused) == 2
                broker.append_in(db, [event(2, size=100)])
                db.commit()
            assert numbers(await take(await join(broker), 2)) == [0, 2]
        assert sales(path) == [1]

    asyncio.run(scenario())


def test_an_event_that_is_too_large_is_refused_before_the_transaction_begins(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path, max_event_bytes=100) as broker:
            with closing(sqlite3.connect(path)) as db:
                with pytest.raises(TooLarge):
                    broker.append_in(db, [event(0), event(1, size=101)])
                assert not db.in_transaction

    asyncio.run(scenario())


def test_a_topic_is_not_created_if_auto_declare_is_off(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path, auto_declare=False) as broker:
            with closing(sqlite3.connect(path)) as db:
                with pytest.raises(PublishError, match="topic orders does not exist and auto_declare is off"):
                    broker.append_in(db, [event(0)])
                db.commit()
            assert not await broker.topics()

    asyncio.run(scenario())


def test_a_topic_that_was_created_in_a_rolled_back_transaction_is_created_again(path: Path) -> None:
    """Its ids go to the topics that are created next. Events must not be stored in the partitions of those."""

    async def scenario() -> None:
        async with opened(path) as broker, opened(path) as other:
            with closing(sqlite3.connect(path)) as db:
                broker.append_in(db, [event(0), event(0, topic="second")])
                db.rollback()
                await other.publish([event(1, topic="second")])
                broker.append_in(db, [event(2), event(2, topic="second")])
                db.commit()
            await broker.publish([event(3), event(3, topic="second")])
            await other.publish([event(4), event(4, topic="second")])
            assert numbers(await take(await join(broker), 3)) == [2, 3, 4]
            second = await take(await join(broker, "second"), 4)
            assert numbers(second) == [1, 2, 3, 4]
            check_positions(second)

    asyncio.run(scenario())


def test_a_topic_with_the_id_of_a_rolled_back_one_has_its_own_partitions(path: Path) -> None:
    keys = [f"key-{n}" for n in range(20)]

    async def scenario() -> None:
        async with opened(path) as broker, opened(path) as other, opened(path, partitions=2) as small:
            with closing(sqlite3.connect(path)) as db:
                broker.append_in(db, [event(0, topic="first"), event(0)])
                db.rollback()
                await small.publish([event(1, topic="first")])
                await other.publish([event(1, key) for key in keys])  # same id, but its partitions have other ids
                broker.append_in(db, [event(2, key) for key in keys])
                db.commit()
            await broker.publish([event(3, key) for key in keys])
            assert by_key(await take(await join(other), 60)) == {key: [1, 2, 3] for key in keys}

    asyncio.run(scenario())


def test_positions_are_right_if_the_bytes_of_a_rolled_back_event_were_stored_elsewhere(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker, opened(path) as other:
            await broker.publish([event(0, "a"), event(0, "b")])
            with closing(sqlite3.connect(path)) as db:
                broker.append_in(db, [event(1, "a")])
                db.rollback()
                await other.publish([event(1, "c")])  # the topic has as many bytes as before the rollback
                broker.append_in(db, [event(2, "a"), event(2, "c")])
                db.commit()
            found = await take(await join(broker), 5)
            assert by_key(found) == {"a": [0, 2], "b": [0], "c": [1, 2]}
            check_positions(found)

    asyncio.run(scenario())


def test_the_ring_after_the_commit_wakes_a_waiting_member(path: Path, only_the_bell: None) -> None:
    async def scenario() -> None:
        async with opened(path, **NEVER_LOOKS) as broker, opened(path) as other:
            member = await join(broker)
            for n in range(5):
                writing = asyncio.create_task(asyncio.to_thread(later, other, n))
                assert numbers(await take(member, 1, wait_s=60.0)) == [n]
                await writing

    def later(other: Broker, n: int) -> None:
        time.sleep(0.05)
        with closing(sqlite3.connect(path)) as db:
            ring = other.append_in(db, [event(n)])
            db.commit()
        wake_all([ring])

    asyncio.run(scenario())


def test_a_member_without_a_bell_is_woken_by_the_lock_file(path: Path, only_the_bell: None) -> None:
    async def scenario() -> None:
        async with opened(path, **NEVER_LOOKS) as broker:
            member = await join(broker)
            await member.receive(1, 1, 0.1)
            for bell in os.scandir(f"{path}-bells"):
                os.unlink(bell)
            asyncio.get_running_loop().call_later(0.3, write, broker)
            assert numbers(await take(member, 1, wait_s=60.0)) == [1]

    def write(broker: Broker) -> None:
        with closing(sqlite3.connect(path)) as db:
            ring = broker.append_in(db, [event(1)])
            db.commit()
        wake_all([ring])

    asyncio.run(scenario())


def test_threads_publishers_and_processes_write_at_the_same_time(path: Path) -> None:
    """Nothing is lost, no position is given twice, and each key has its order."""
    threads, each, calls = 4, 500, 300

    def writing(broker: Broker, name: str) -> None:
        with closing(sqlite3.connect(path, timeout=60, isolation_level="IMMEDIATE")) as db:
            for n in range(each):
                db.execute("INSERT INTO sales VALUES (?)", (n,))
                ring = broker.append_in(db, [event(n, name), event(n, f"{name}-twin")])
                if n % 10 == 9:
                    db.rollback()
                else:
                    db.commit()
                    wake_all([ring])

    async def publishing(broker: Broker, name: str) -> None:
        for n in range(calls):
            await broker.publish([event(n, name)])

    async def scenario() -> None:
        async with opened(path) as broker, opened(path) as other:
            member = await join(broker)
            arguments = [sys.executable, "-c", PUBLISHER, str(path), str(calls)]
            with subprocess.Popen(arguments) as process:  # noqa: ASYNC220
                kept = [n for n in range(each) if n % 10 != 9]
                work = [
                    *[asyncio.to_thread(writing, (broker, other)[at % 2], f"thread-{at}") for at in range(threads)],
                    *[publishing((broker, other)[at % 2], f"publisher-{at}") for at in range(4)],
                ]
                writers = asyncio.gather(*work)
                found = await take(member, 2 * threads * len(kept) + 4 * calls + 2 * calls)
                await writers
                assert process.wait(60) == 0
            orders = {f"thread-{at}{twin}": kept for at in range(threads) for twin in ("", "-twin")}
            orders |= {f"publisher-{at}": [*range(calls)] for at in range(4)}
            orders |= {f"process-{at}": [*range(calls)] for at in range(2)}
            assert by_key(found) == orders
            check_positions(found)

    asyncio.run(scenario())
    assert len(sales(path)) == threads * (each - each // 10)


def test_retention_beside_transactions_removes_only_finished_events(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.brokers.sqlite.retention._INTERVAL_S", 0.005)

    async def settled(member: Subscription, count: int) -> list[Delivery]:
        found: list[Delivery] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                messages = await member.receive(50, 1 << 20, 1.0)
                new = [message for message in messages if isinstance(message, Delivery)]
                ends = {each.partition: Progress(each.partition, each.epoch, each.position + 1) for each in new}
                assert not new or not await member.settle(list(ends.values()))
                found += new
        return found

    def writing(broker: Broker) -> None:
        with closing(sqlite3.connect(path, timeout=60)) as db:
            for n in range(300):
                broker.append_in(db, [event(n, "a"), event(n, "b")])
                (db.rollback if n % 5 == 4 else db.commit)()

    async def scenario() -> None:
        async with opened(path, retention_bytes=0, retention_s=0.0) as broker:
            member = await join(broker)
            kept = [n for n in range(300) if n % 5 != 4]
            found, _ = await asyncio.gather(settled(member, 2 * len(kept)), asyncio.to_thread(writing, broker))
            assert by_key(found) == {"a": kept, "b": kept}
            check_positions(found)
            with closing(sqlite3.connect(path)) as db:
                await until(lambda: db.execute("SELECT count(*) FROM onward_log").fetchone() == (0,))
                broker.append_in(db, [event(1_000, "a")])
                db.commit()
            (last,) = await take(member, 1)
            assert last.position == 1 + max(each.position for each in found if each.partition == last.partition)

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
def test_a_process_killed_around_its_commit_leaves_both_or_none(path: Path, when: str) -> None:
    """After the commit, it dies before it can wake the members. They look by themselves once a second."""

    async def scenario() -> None:
        async with opened(path) as broker:
            member = await join(broker)
            arguments = [sys.executable, "-c", VICTIM, str(path), when]
            assert await asyncio.to_thread(subprocess.call, arguments) == -9
            died = time.monotonic()
            if when == "after the commit":
                assert numbers(await take(member, 1, wait_s=20.0)) == [1]
                assert time.monotonic() - died < 10.0  # one second, on a busy machine
            await broker.publish([event(2)])
            (found,) = await take(member, 1)
            assert (numbers([found]), found.position) == ([2], int(when == "after the commit"))

    asyncio.run(scenario())
    assert sales(path) == [1] * (when == "after the commit")


def test_a_transaction_of_another_program_is_a_trouble_until_it_ends(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path, lease_s=1.5) as broker:
            member = await join(broker)
            await broker.publish([event(0)])
            await take(member, 1)
            assert not member.troubles()
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                receiving = asyncio.create_task(take(member, 1))
                await until(lambda: "lease_s / 3" in str(member.troubles()))
                (trouble,) = member.troubles()
                db.execute("ROLLBACK")
            await until(lambda: not member.troubles())
            await broker.publish([event(1)])
            assert numbers(await receiving) == [1]
        program = "this process" if sys.platform == "linux" else "another program"
        assert f"leases cannot be renewed: a transaction of {program} has locked {path} for " in trouble
        assert "longer than lease_s / 3 = 0.5 s; make such transactions shorter" in trouble

    asyncio.run(scenario())


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux's list of locks")
def test_the_trouble_names_the_process_with_the_long_transaction(path: Path) -> None:
    holder = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('DELETE FROM sales'); input()"

    async def scenario() -> None:
        async with opened(path, lease_s=1.5) as broker, opened(path, lease_s=1.5) as other:
            members = [await join(broker), await join(other, group="stock")]
            arguments = [sys.executable, "-c", holder, str(path)]
            with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:  # noqa: ASYNC220
                said = f"a transaction of process {process.pid} (python"
                await until(lambda: all(said in str(member.troubles()) for member in members))
                process.kill()
            await until(lambda: not any(member.troubles() for member in members))

    asyncio.run(scenario())


def test_a_transaction_that_outlasts_the_lease_is_delivered_after_its_commit(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path, lease_s=0.9) as broker:
            member = await join(broker)
            await broker.publish([event(0)])
            found = await take(member, 1)
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                rings = [broker.append_in(db, [event(1)])]
                receiving = asyncio.create_task(take(member, 2))
                await until(lambda: member.sure_until() < clock.now())
                await until(lambda: "longer than lease_s / 3" in str(member.troubles()))
                rings.append(broker.append_in(db, [event(2)]))
                db.execute("COMMIT")
            wake_all(rings)
            found += await receiving
            assert numbers(found) == [0, 1, 2]
            check_positions(found)

    asyncio.run(scenario())


def test_commits_and_rollbacks_of_the_application_are_not_taken_for_a_lost_store(path: Path) -> None:
    """The watch of the file compares totals and ids that only grow. What was rolled back must never count."""

    async def scenario() -> None:
        async with opened(path, lease_s=0.9) as broker:
            member = await join(broker)
            received = 0
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                for n in range(60):
                    db.execute("BEGIN IMMEDIATE")
                    broker.append_in(db, [event(n, size=500), event(n, topic=f"topic-{n}")])
                    if n % 4 == 3:
                        db.execute(f"CREATE TABLE own_{n} (a)")
                    db.execute("ROLLBACK" if n % 2 else "COMMIT")
                    if n % 5 == 0:
                        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    await broker.publish([event(n, "published")])
                    received += (n % 2 == 0) + 1
            assert len(await take(member, received)) == 90
            assert not member.troubles()

    asyncio.run(scenario())


def test_an_event_is_refused_if_the_file_was_replaced(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            with closing(sqlite3.connect(path)) as db:
                db.execute("INSERT INTO sales VALUES (1)")
                os.rename(path, f"{path}-moved")
                with pytest.raises(PublishError, match="was deleted or moved while it was in use"):
                    broker.append_in(db, [event(1)])
                os.rename(f"{path}-moved", path)

    asyncio.run(scenario())


def test_a_closed_broker_stores_nothing(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            pass
        with closing(sqlite3.connect(path)) as db, pytest.raises(Closed):
            broker.append_in(db, [event(1)])

    asyncio.run(scenario())


def test_a_call_without_events_takes_no_lock(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            with closing(sqlite3.connect(path)) as db:
                wake_all([broker.append_in(db, [])])
                assert not db.in_transaction

    asyncio.run(scenario())


def test_many_events_may_be_stored_in_one_call(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            with closing(sqlite3.connect(path)) as db:
                broker.append_in(db, [event(n, f"key-{n % 3}") for n in range(70_000)])
                db.commit()
            found = await take(await join(broker), 70_000)
            assert by_key(found) == {f"key-{k}": [*range(k, 70_000, 3)] for k in range(3)}

    asyncio.run(scenario())


def test_events_without_a_key_are_spread_over_the_partitions(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            with closing(sqlite3.connect(path)) as db:
                for n in range(8):
                    broker.append_in(db, [event(n, None)])
                db.commit()
            found = await take(await join(broker), 8)
            assert len({each.partition for each in found}) == 4

    asyncio.run(scenario())


def test_a_transaction_does_not_wait_for_a_writer_that_waits_for_it(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                publishing = asyncio.create_task(broker.publish([event(0, "p")]))
                await until(lambda: lock_holder(path))  # the writer has the lock file, and waits for SQLite's lock
                broker.append_in(db, [event(1)])
                db.execute("COMMIT")
            await publishing
            assert by_key(await take(await join(broker), 2)) == {"k": [1], "p": [0]}

    asyncio.run(scenario())
