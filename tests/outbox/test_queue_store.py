"""The queue store on MariaDB, PostgreSQL and SQLite: locks, bounded reads, leases, restored tables and bad databases.

The suite for all stores is test_stores.py.
"""

import ctypes
import gc
import logging
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onward.errors import BadOutbox, BadSetting, MissingExtra, OutboxUnreachable
from onward.event import Event, new_id
from onward.outbox.base import LeasePlan, ParkedRow, RelaysView
from onward.outbox.queue_connections import QueueConnection, connect
from onward.outbox.queue_statements import PENDING, QueueSql
from onward.outbox.queue_store import fit
from onward.outbox.schema import TABLES, relay_grants
from onward.outbox.stores import open_store
from tests.outbox.store_kit import TOPIC, OutboxKit, StoreRelay, by_key, claim_all, event, keep, mode_of, url_of
from tests.servers.server import Server

PATIENCE_S = 60.0
NOBODY = 65534
MB = 1 << 20
SERVERS = ["mariadb", "postgresql-queue"]


def kit_of(name: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[OutboxKit]:
    kit = OutboxKit(url_of(name, request, folder), mode_of(name))
    yield kit
    kit.close()


def on(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.servers] if name in SERVERS else []) for name in names]


@pytest.fixture(params=on([*SERVERS, "sqlite"]))
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxKit]:
    yield from kit_of(request.param, request, tmp_path)


@pytest.fixture(params=on(SERVERS))
def server_kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxKit]:
    yield from kit_of(request.param, request, tmp_path)


@pytest.fixture
def mariadb(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxKit]:
    yield from kit_of("mariadb", request, tmp_path)


@pytest.fixture
def postgres(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxKit]:
    yield from kit_of("postgresql-queue", request, tmp_path)


@pytest.fixture
def sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxKit]:
    yield from kit_of("sqlite", request, tmp_path)


def sql(kit: OutboxKit, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements with {t} for the table, and commit. Returns the rows of the last one."""
    with kit.transaction() as connection:
        cursor = connection.cursor()
        for statement in statements:
            cursor.execute(statement.replace("{t}", kit.table))
        return list(cursor.fetchall()) if cursor.description else []


def outbox_sql(kit: OutboxKit) -> QueueSql:
    dialect = "sqlite" if kit.single else "mariadb" if kit.url.startswith("mysql") else "postgresql"
    return QueueSql(dialect, kit.table)


@contextmanager
def connected(kit: OutboxKit) -> Iterator[QueueConnection]:
    with closing(connect(kit.url, kit.table)) as db:
        db.limit_pauses(10.0)
        yield db


@contextmanager
def beside(work: Callable[..., Any], *args: Any) -> Iterator[Future[Any]]:
    """Run a call in another thread while the body runs."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work, *args)


# -- locks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [3, 700])
def test_rows_are_deleted_beside_an_uncommitted_one(server_kit: OutboxKit, others: int) -> None:
    """Also if they are most rows of the table: then MariaDB would like to scan it, and wait for the uncommitted row."""
    relay, writer = StoreRelay(server_kit), server_kit.connect()
    server_kit.write(writer, event("open", 1))
    server_kit.commit(*[event("k", n) for n in range(others)])
    server_kit.write(writer, event("open", 2))
    assert len(relay.drain(limit=1000)) == others
    writer.commit()
    assert by_key(relay.drain(), "open") == ["open:1", "open:2"]


@contextmanager
def isolation(kit: OutboxKit, level: str) -> Iterator[OutboxKit]:
    """The level that new connections have, if they do not choose one."""
    if kit.url.startswith("mysql"):
        ((before,),) = sql(kit, "SELECT @@GLOBAL.tx_isolation")
        sql(kit, f"SET GLOBAL TRANSACTION ISOLATION LEVEL {level}")
    else:
        sql(kit, f"ALTER ROLE onward SET default_transaction_isolation = '{level}'")
    try:
        yield kit
    finally:
        if kit.url.startswith("mysql"):
            sql(kit, f"SET GLOBAL TRANSACTION ISOLATION LEVEL {before.replace('-', ' ')}")
        else:
            sql(kit, "ALTER ROLE onward RESET default_transaction_isolation")


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_writers_do_not_wait_for_a_relay_that_reads_and_deletes(server_kit: OutboxKit, level: str) -> None:
    statements = outbox_sql(server_kit)
    with isolation(server_kit, level) as kit, connected(kit) as db, closing(kit.connect()) as writer:
        kit.commit(event("a", 1), event("a", 2))
        ids = [row[1] for row in db.rows(statements.read(None, 10, MB))]
        with db.transaction():
            db.rows(statements.read(None, 10, MB))
            db.run(statements.delete(PENDING, [*ids, ids[-1] + 1, ids[-1] + 100]))  # two of them do not exist
            cursor = writer.cursor()
            cursor.execute(
                "SET innodb_lock_wait_timeout = 1" if kit.url.startswith("mysql") else "SET lock_timeout = '1s'"
            )
            kit.write(writer, event("b", 1))
            writer.commit()
        assert by_key(StoreRelay(kit).drain(), "b") == ["b:1"]


def test_a_relay_has_its_own_isolation_level(postgres: OutboxKit) -> None:
    """At the level SERIALIZABLE its reads could make the transactions of writers fail."""
    with isolation(postgres, "SERIALIZABLE"), connected(postgres) as db:
        with db.reading():
            assert db.rows("SHOW transaction_isolation") == [("read committed",)]
        with db.transaction():
            assert db.rows("SHOW transaction_isolation") == [("read committed",)]


def test_relays_of_different_shards_do_not_wait_for_each_other(server_kit: OutboxKit) -> None:
    one = StoreRelay(server_kit, "one", lambda view: LeasePlan(claim=[0, 1, 2, 3]))
    two = StoreRelay(server_kit, "two", lambda view: LeasePlan(claim=[4, 5, 6, 7]))
    server_kit.commit(*[event(f"k{n}", n) for n in range(40)])
    with connected(server_kit) as db, db.transaction():
        db.rows(outbox_sql(server_kit).lock_shards(one.held), "one")
        published = two.drain()
    assert len(published) + len(one.drain()) == 40
    assert published


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_part_of_the_shards_is_read_from_the_lowest_id_on(server_kit: OutboxKit) -> None:
    relay = StoreRelay(server_kit)
    server_kit.commit(*[event(f"k{n % 40}", n) for n in range(300)])
    every = relay.read(limit=1000).rows
    for shards in ({5}, {0, 3, 6}, set(range(7))):
        part = {shard: relay.held[shard] for shard in shards}
        expected = [row for row in every if row.shard in shards][:50]
        batch = relay.store.read(part, limit=50, max_bytes=MB)
        assert list(batch.rows) == expected
        assert batch.more == (len(expected) == 50)
    assert not relay.store.read({}, limit=50, max_bytes=MB).rows


def test_large_and_small_rows_are_read_whole_and_in_order(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    long = {"h": "ü" * 40_000}
    written = [
        event("small", 1),
        Event(new_id(), TOPIC, "large", os.urandom(300_000), {}, "", 1.5),
        Event(new_id(), TOPIC, "tombstone", None),
        Event(new_id(), TOPIC, "ключ" * 3_000, b"long key", {}, "", 1.5),
        Event(new_id(), TOPIC, "headers", b"", long, "", 1.5),
        Event(new_id(), TOPIC, "all", b"x" * 5_000, long, "", 0.1 + 0.2),
        event("small", 2),
    ]
    kit.commit(*written)
    assert [row.event for row in relay.read(limit=100).rows] == written
    assert relay.drain(limit=2) == written


def test_a_batch_has_the_bytes_that_fit(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event("k", n, size=100) for n in range(10)])
    for limit in (3, 10, 1_000):
        for max_bytes, count in ((1, 1), (100, 1), (299, 2), (300, 3), (10_000, 10)):
            batch = relay.read(limit, max_bytes)
            assert len(batch.rows) == min(count, limit)
            assert batch.more == (len(batch.rows) < 10 or limit == 10)


def peak_mb(work: Callable[[], object]) -> float:
    """By how much the memory of this process grows at most while it works."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise it would use memory that was freed before
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@pytest.mark.skipif(sys.platform != "linux", reason="it reads the memory of the process from /proc")
def test_a_backlog_of_large_rows_is_read_in_bounded_memory(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event("k", n, size=MB) for n in range(30)])
    assert peak_mb(lambda: relay.read(limit=1_000, max_bytes=2 * MB)) < 20
    assert len(relay.read(limit=1_000, max_bytes=2 * MB).rows) == 2


def test_only_the_rows_that_fit_are_chosen() -> None:
    small, large = (None, b"x" * 100), (500, None)
    assert fit([], 10) == []
    assert fit([small, small], 200) == [small, small]
    assert fit([small, small], 199) == [small]
    assert fit([large, small], 10) == [large]
    assert fit([small, (None, None), large, small], 600) == [small, (None, None), large]


def test_times_are_exact(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    times = [0.1 + 0.2, 1_763_424_000.123456, 1 / 3, 1e-9, 4_102_444_800.000001]
    kit.commit(*[Event(f"e{n}", TOPIC, "k", b"", {}, "", each) for n, each in enumerate(times)])
    assert [each.time for each in relay.drain()] == times


def test_columns_of_sqlite_with_other_types_are_converted(sqlite: OutboxKit) -> None:
    relay = StoreRelay(sqlite)
    sql(
        sqlite,
        "INSERT INTO {t} (event_id, topic, event_key, event_time, payload) VALUES ('e1', 'orders', 7, '1.5', '[1]')",
        "INSERT INTO {t} (event_id, topic, event_key, event_time, headers) "
        "VALUES (x'6532', 'orders', x'61ff', 2, x'7b7d')",
        "INSERT INTO {t} (event_id, topic, event_key, event_time) "
        "VALUES ('e3', 'orders', CAST(x'62ff' AS TEXT), 'now')",
    )
    assert relay.drain() == [
        Event("e1", "orders", "7", b"[1]", {}, "", 1.5),
        Event("e2", "orders", "a\ufffd", None, {}, "", 2.0),
        Event("e3", "orders", "b\ufffd", None, {}, "", 0.0),
    ]


# -- leases -----------------------------------------------------------------------------------------------------------


def test_one_relay_at_a_time_takes_a_turn(server_kit: OutboxKit) -> None:
    one, two = StoreRelay(server_kit, "one", keep), StoreRelay(server_kit, "two", keep)
    within, go_on = threading.Event(), threading.Event()

    def slowly(view: RelaysView) -> LeasePlan:
        within.set()
        assert go_on.wait(PATIENCE_S)
        return claim_all(view)

    with beside(one.turn, slowly) as first:
        assert within.wait(PATIENCE_S)
        with beside(two.turn, claim_all) as second:
            time.sleep(0.2)
            assert not second.done()
            go_on.set()
            first.result()
            second.result()
    assert set(one.held.values()) == {1}
    assert set(two.held.values()) == {2}


def test_a_relay_that_stops_within_a_turn_holds_up_the_others_for_a_third_of_its_lease(server_kit: OutboxKit) -> None:
    stopped, other = server_kit.store(), StoreRelay(server_kit, "other")
    within, go_on = threading.Event(), threading.Event()

    def stop(view: RelaysView) -> LeasePlan:
        within.set()
        assert go_on.wait(PATIENCE_S)
        return claim_all(view)

    with beside(stopped.turn, "stopped", 3.0, stop) as turn:
        try:
            assert within.wait(PATIENCE_S)
            other.turn(claim_all)  # it waits for about 1 s
            assert len(other.held) == 8
        finally:
            go_on.set()
        with pytest.raises(OutboxUnreachable):
            turn.result()
    other.turn(keep)
    assert len(other.held) == 8


def test_a_lock_that_is_held_for_too_long_is_reported(server_kit: OutboxKit) -> None:
    store = server_kit.store()
    with connected(server_kit) as db, db.transaction():
        db.rows(outbox_sql(server_kit).lock_meta)
        with pytest.raises(OutboxUnreachable, match="lock"):
            store.turn("a", 0.5, keep)
    assert store.turn("a", 0.5, claim_all).held


def test_a_relay_that_leaves_owns_nothing_even_if_it_claims(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    relay.turn(lambda view: LeasePlan(claim=[0], leave=True))
    assert relay.held == {}
    assert sql(kit, "SELECT COUNT(*) FROM {t}_relay") == [(0,)]


def test_a_struck_relay_does_not_delete_the_rows_that_it_has_published(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    batch = relay.read()
    StoreRelay(kit, "b", lambda view: LeasePlan(strike=["a"]))
    assert set(relay.store.advance(batch, relay.held)) == relay.held.keys()
    assert len(StoreRelay(kit, "b").drain()) == 1


# -- restored and copied tables ---------------------------------------------------------------------------------------


def test_rows_of_a_restored_table_with_the_ids_of_published_rows_are_not_deleted(kit: OutboxKit) -> None:
    """An operator restores a backup while a relay publishes. Then a writer gets an id that was used before."""
    relay = StoreRelay(kit)
    backup = {name: sql(kit, f"SELECT * FROM {{t}}{name}") for name in ("_relay", "_shard")}
    relay.turn(keep)
    kit.commit(event("old", 1))
    batch = relay.read()
    sql(kit, "DELETE FROM {t}")
    for name, rows in backup.items():
        with kit.transaction() as connection:
            cursor = connection.cursor()
            cursor.execute(f"DELETE FROM {kit.table}{name}")
            mark = "?" if kit.single else "%s"
            for row in rows:
                cursor.execute(f"INSERT INTO {kit.table}{name} VALUES ({', '.join([mark] * len(row))})", row)
    kit.commit(event("new", 1))
    if kit.url.startswith("postgresql"):
        sql(kit, "ALTER TABLE {t} ALTER id SET GENERATED BY DEFAULT")
    sql(kit, f"UPDATE {{t}} SET id = {batch.rows[0].id}")
    assert set(relay.store.advance(batch, relay.held)) == relay.held.keys()
    relay.turn(keep)
    assert relay.held == {}
    relay.turn(claim_all)
    assert by_key(relay.drain(), "new") == ["new:1"]


@contextmanager
def copied(kit: OutboxKit, folder: Path) -> Iterator[OutboxKit]:
    """A copy of the outbox in another file, another database or, on PostgreSQL, another table with the same name."""
    copy = OutboxKit.__new__(OutboxKit)
    copy.__dict__.update(kit.__dict__)
    if kit.single:
        shutil.copy(kit.url.partition(":///")[2], folder / "copy.db")
        copy.url = f"sqlite:///{folder}/copy.db"
    elif kit.url.startswith("mysql"):
        home = f"copy_{uuid4().hex[:8]}"
        sql(kit, f"CREATE DATABASE {home}")
        for name in ("", "_meta", "_relay", "_shard", "_parked"):
            sql(kit, f"CREATE TABLE {home}.{{t}}{name} LIKE {{t}}{name}")
        names = "id, event_id, topic, event_key, event_type, event_time, headers, payload"
        sql(kit, f"INSERT INTO {home}.{{t}} ({names}) SELECT {names} FROM {{t}}")
        for name in ("_meta", "_relay", "_shard", "_parked"):
            sql(kit, f"INSERT INTO {home}.{{t}}{name} SELECT * FROM {{t}}{name}")
        copy.url = kit.url.removesuffix("onward") + home
    else:
        sql(kit, "CREATE TABLE {t}_new (LIKE {t} INCLUDING ALL)", "INSERT INTO {t}_new OVERRIDING SYSTEM VALUE SELECT "
            "id, event_id, topic, event_key, event_type, event_time, headers, payload FROM {t}")  # fmt: skip
        sql(kit, "DROP TABLE {t}", "ALTER TABLE {t}_new RENAME TO {t}")
    yield copy
    if copy.url.startswith("mysql"):
        sql(kit, f"DROP DATABASE {home}")


def test_a_copy_gets_a_new_id_and_publishes_its_rows(
    kit: OutboxKit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = StoreRelay(kit)
    kit.commit(event("a", 1), event("a", 2))
    original.step(limit=1)
    original.store.close()
    with copied(kit, tmp_path) as copy, caplog.at_level(logging.WARNING, "onward"):
        relay = StoreRelay(copy, "b", keep)
        first, held = relay.identity, relay.held
        relay.turn(claim_all)
        assert (first.rebaselined, held) == (True, {})
        assert "is a copy" in caplog.text
        assert first.outbox_id != original.identity.outbox_id
        assert relay.identity == first._replace(rebaselined=False)
        assert by_key(relay.drain(), "a") == ["a:2"]
        assert sql(copy, "SELECT name FROM {t}_relay") == [("b",)]
        relay.store.close()


def test_two_copies_of_an_outbox_that_no_relay_has_used_have_different_ids(sqlite: OutboxKit, tmp_path: Path) -> None:
    with copied(sqlite, tmp_path) as copy:
        one, two = StoreRelay(sqlite).identity, StoreRelay(copy).identity
    assert not one.rebaselined
    assert not two.rebaselined
    assert one.outbox_id != two.outbox_id


def test_a_file_that_is_replaced_under_a_relay_is_opened_again(sqlite: OutboxKit, tmp_path: Path) -> None:
    relay = StoreRelay(sqlite)
    with copied(sqlite, tmp_path) as copy:
        os.replace(tmp_path / "copy.db", sqlite.url.partition(":///")[2])
        assert copy.url != sqlite.url
    with pytest.raises(OutboxUnreachable, match="was replaced"):
        relay.turn(keep)
    relay.store.open()
    relay.turn(claim_all)
    assert relay.identity.rebaselined
    sqlite.commit(event("a", 1))
    assert len(relay.drain()) == 1


def test_parked_rows_stay_before_new_ones_when_ids_begin_again(kit: OutboxKit) -> None:
    """As after TRUNCATE."""
    relay = StoreRelay(kit)

    def park_all() -> None:
        batch = relay.read()
        assert not relay.store.advance(batch, relay.held, [ParkedRow(row, "later", False) for row in batch.rows])

    kit.commit(event("other", 1), event("a", 1), event("a", 2), event("b", 1))
    park_all()
    kit.commit(event("a", 3))
    if kit.url.startswith("postgresql"):
        sql(kit, "ALTER TABLE {t} ALTER id SET GENERATED BY DEFAULT")
    sql(kit, "UPDATE {t} SET id = 1")
    park_all()
    rows = relay.store.parked(relay.held, limit=10, max_bytes=MB)
    assert by_key(rows, "a") == ["a:1", "a:2", "a:3"]
    relay.store.unpark(relay.held, rows)
    assert relay.store.count_parked() == 0


# -- parked rows ------------------------------------------------------------------------------------------------------


def test_many_reasons_and_rows_are_parked_at_once(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event(f"k{n}", n) for n in range(600)])
    batch = relay.read(limit=1_000)
    reasons = ["no", "half a pair \ud800", "zero \0", "x" * 100_000]
    parked = [ParkedRow(row, reasons[number % 4], number % 2 == 0) for number, row in enumerate(batch.rows)]
    assert not relay.store.advance(batch, relay.held, parked)
    assert relay.store.count_parked() == 600
    assert not relay.read().rows
    rows = relay.store.parked(relay.held, limit=1_000, max_bytes=MB)
    assert [row.id for row in rows] == [each.row.id for each in parked if not each.refused]
    assert not relay.store.unpark(relay.held, rows)
    assert relay.store.count_parked() == 300


def test_parked_rows_are_whole_and_bounded(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    written = [Event(new_id(), TOPIC, "k" * 10_000, os.urandom(200_000), {"h": "v" * 9_000}) for _ in range(4)]
    kit.commit(*written)
    batch = relay.read()
    relay.store.advance(batch, relay.held, [ParkedRow(row, "later", False) for row in batch.rows])
    assert [row.event for row in relay.store.parked(relay.held, limit=10, max_bytes=MB)] == written
    assert len(relay.store.parked(relay.held, limit=10, max_bytes=450_000)) == 2
    assert len(relay.store.parked(relay.held, limit=3, max_bytes=MB)) == 3


# -- databases that cannot be used ------------------------------------------------------------------------------------


def refusal(url: str, table: str) -> str:
    store = open_store(url, table)
    with pytest.raises(BadOutbox) as caught:
        store.open()
    store.close()
    return str(caught.value)


@contextmanager
def role(kit: OutboxKit, *grants: str) -> Iterator[str]:
    """The URL of a new role with these rights."""
    name = f"relay_{uuid4().hex[:8]}"
    is_mariadb = kit.url.startswith("mysql")
    sql(kit, f"CREATE USER {name}" + ("@'%' IDENTIFIED BY 'secret'" if is_mariadb else ""))
    for grant in grants:
        sql(kit, grant.replace("role", f"{name}@'%'" if is_mariadb else name))
    try:
        yield kit.url.replace(
            "onward:onward@" if is_mariadb else "onward@", f"{name}:secret@" if is_mariadb else f"{name}@"
        )
    finally:
        if not is_mariadb:
            sql(kit, f"DROP OWNED BY {name}")
        sql(kit, f"DROP USER {name}" + ("@'%'" if is_mariadb else ""))


def grants_of(kit: OutboxKit) -> list[str]:
    return relay_grants("mariadb" if kit.url.startswith("mysql") else "postgresql", kit.table).split("; ")


def test_the_named_rights_are_enough_for_a_relay(server_kit: OutboxKit) -> None:
    with role(server_kit, *grants_of(server_kit)) as url:
        store = open_store(url, server_kit.table)
        store.open()
        server_kit.commit(event("a", 1), event("b", 1))
        held = store.turn("a", 10.0, claim_all).held
        batch = store.read(held, limit=10, max_bytes=MB)
        assert not store.advance(batch, held, [ParkedRow(batch.rows[0], "no", False)])
        assert not store.unpark(held, store.parked(held, limit=10, max_bytes=MB))
        assert store.turn("a", 10.0, lambda view: LeasePlan(strike=["b"], leave=True)).held == {}
        store.close()


def test_a_role_without_rights_learns_which_it_needs(server_kit: OutboxKit) -> None:
    for suffix in TABLES:
        name = f"{server_kit.table}{suffix}"
        less = (f"REVOKE INSERT, UPDATE, DELETE ON {name} FROM role", f"GRANT SELECT ON {name} TO role")
        with role(server_kit, *grants_of(server_kit), *less) as url:
            assert "GRANT SELECT, INSERT, UPDATE, DELETE ON" in refusal(url, server_kit.table), name


def test_a_wrong_password_is_reported(mariadb: OutboxKit) -> None:
    assert "Access denied" in refusal(mariadb.url.replace(":onward@", ":secret@"), mariadb.table)


def test_a_server_that_is_read_only_is_refused(mariadb: OutboxKit) -> None:
    with role(mariadb, *grants_of(mariadb)) as url:
        sql(mariadb, "SET GLOBAL read_only = 1")
        try:
            assert "use the primary server" in refusal(url, mariadb.table)
        finally:
            sql(mariadb, "SET GLOBAL read_only = 0")


def test_tables_without_transactions_are_refused(mariadb: OutboxKit) -> None:
    sql(mariadb, "ALTER TABLE {t}_shard ENGINE=Aria")
    assert "ENGINE=InnoDB" in refusal(mariadb.url, mariadb.table)


def test_several_primary_servers_are_a_warning(mariadb: OutboxKit, caplog: pytest.LogCaptureFixture) -> None:
    sql(mariadb, "SET GLOBAL auto_increment_increment = 2")
    try:
        with caplog.at_level(logging.WARNING, "onward"):
            StoreRelay(mariadb)
        assert "all writers of this outbox use the same server" in caplog.text
    finally:
        sql(mariadb, "SET GLOBAL auto_increment_increment = 1")


@pytest.mark.parametrize(
    ("name", "value", "cure"), [("version", "1", "outbox upgrade"), ("works_from", "99", "upgrade Onward")]
)
def test_a_schema_of_another_version_is_refused_also_while_a_relay_runs(
    kit: OutboxKit, name: str, value: str, cure: str
) -> None:
    relay = StoreRelay(kit)
    sql(kit, f"UPDATE {{t}}_meta SET value = '{value}' WHERE name = '{name}'")
    assert cure in refusal(kit.url, kit.table)
    with pytest.raises(BadOutbox, match=cure):
        relay.turn(keep)


def test_a_server_that_is_gone_is_unreachable_until_it_is_back(
    server_kit: OutboxKit, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue("mariadb_server" if "mysql" in server_kit.url else "postgres_server")
    with server.proxy() as proxy:
        store = open_store(server_kit.url.replace(f":{server.port}", f":{proxy.port}"), server_kit.table)
        store.open()
        held = store.turn("a", 10.0, claim_all).held
        proxy.cut()
        for call in (lambda: store.turn("a", 10.0, keep), lambda: store.read(held, limit=1, max_bytes=1), store.open):
            with pytest.raises(OutboxUnreachable):
                call()
        store.close()
        proxy.mend()
        store.open()
        assert store.turn("a", 10.0, keep).held == held
        store.close()


def test_a_closed_store_says_so(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    relay.store.close()
    with pytest.raises(OutboxUnreachable):
        relay.read()


def test_other_databases_and_missing_drivers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSetting, match="PostgreSQL, MariaDB, MySQL and SQLite"):
        open_store("oracle://host/shop", "onward_outbox")
    with pytest.raises(BadSetting, match="table"):
        open_store("mysql://host/shop", "drop table")
    for url, driver in (("mysql://host/shop", "pymysql"), ("postgresql://host/shop", "psycopg")):
        for name in [
            name for name in sys.modules if name.startswith(("onward.outbox.queue_", "onward.outbox.postgresql"))
        ]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, driver, None)
        with pytest.raises(MissingExtra, match=r"pip install 'onward\[outbox\]'"):
            open_store(url, "onward_outbox").open()


# -- SQLite -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_commit_of_another_connection_rings_the_bell(sqlite: OutboxKit, journal: str) -> None:
    connection = sqlite.connect()
    connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.close()
    relay = StoreRelay(sqlite)
    relay.store.wait(0.0)  # the turn above has rung it
    began = time.monotonic()
    with beside(relay.store.wait, PATIENCE_S):
        sqlite.commit(event("a", 1))
    sqlite.commit(event("a", 2))
    relay.store.wait(PATIENCE_S)  # a commit before the wait counts too
    assert time.monotonic() - began < PATIENCE_S
    assert len(relay.drain()) == 2


def test_closing_ends_a_wait(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    relay.store.wait(0.0)
    with beside(relay.store.wait, PATIENCE_S) as waiting:
        time.sleep(0.05)
        began = time.monotonic()
        relay.store.close()
        waiting.result()
        assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_file_that_another_program_locks_is_unreachable(
    sqlite: OutboxKit, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.outbox.queue_sqlite._BUSY_S", 0.05)
    writer = sqlite.connect()
    writer.execute(f"PRAGMA journal_mode = {journal}")
    relay = StoreRelay(sqlite)
    sqlite.commit(event("a", 1))
    writer.execute("BEGIN IMMEDIATE")
    assert len(relay.read().rows) == 1  # readers do not wait for a writer
    with pytest.raises(OutboxUnreachable, match="end the one that hangs"):
        relay.turn(keep)
    with pytest.raises(OutboxUnreachable, match="end the one that hangs"):
        relay.step()
    writer.rollback()
    assert len(relay.drain()) == 1


def test_a_file_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    assert "onward outbox init" in refusal(f"sqlite:///{tmp_path}/none.db", "onward_outbox")
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(BadSetting, match="name a file"):
        open_store("sqlite://", "onward_outbox").open()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shop.db").write_text("this is a text, and it is long enough to be read as a header of a database" * 50)
    assert "not a database" in refusal(f"sqlite:///{tmp_path}/shop.db", "onward_outbox")


def test_a_file_without_write_permission_is_refused(sqlite: OutboxKit) -> None:
    source = sqlite.url.partition(":///")[2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shop.db"
        shutil.copy(source, path)
        os.chmod(path, 0o444)
        os.chmod(folder, 0o755)
        with without_rights_of_root():
            assert "write access" in refusal(f"sqlite:///{path}", sqlite.table)


@contextmanager
def without_rights_of_root() -> Iterator[None]:
    """Root may write to every file."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def test_writers_that_hardly_release_the_lock_do_not_starve_the_relay(tmp_path: Path) -> None:
    kit = OutboxKit(f"sqlite:///{tmp_path}/shop.db", None)
    relay = StoreRelay(kit)
    stopped = threading.Event()

    def write() -> None:
        connection = sqlite3.connect(tmp_path / "shop.db", timeout=60, isolation_level=None)
        while not stopped.is_set():
            connection.execute("BEGIN IMMEDIATE")
            kit.write(connection, event("k", 1))
            time.sleep(0.005)
            connection.execute("COMMIT")
        connection.close()

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(20):
            relay.turn(keep)  # raises OutboxUnreachable if it does not get the lock within 5 s
    finally:
        stopped.set()
        for writer in writers:
            writer.join()
        kit.close()
