"""The log store on PostgreSQL: what the suite of all stores cannot test, because it is about PostgreSQL alone."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from onward.errors import BadOutbox, BadSetting, OutboxUnreachable
from onward.outbox import postgresql
from onward.outbox.base import LeasePlan, ParkedRow, RelaysView
from onward.outbox.postgresql_log import PostgresLogStore
from tests.outbox.postgresql_kit import commit_before_each_statement, sql
from tests.outbox.store_kit import OutboxKit, StoreRelay, by_key, claim_all, event, keep
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.servers


@pytest.fixture
def kit(postgres_server: PostgresServer) -> Iterator[OutboxKit]:
    kit = OutboxKit(postgres_server.url, "log")
    yield kit
    kit.close()


def role(kit: OutboxKit, *statements: str) -> str:
    """A new role without rights on the tables; the statements have {role} for its name. Returns the URL with it."""
    name = f"role_{kit.table}"
    for statement in (f"CREATE ROLE {name} LOGIN", *statements):
        sql(kit, statement.replace("{role}", name))
    return kit.url.replace("onward@", f"{name}@")


# -- order and loss ---------------------------------------------------------------------------------------------------


def test_a_transaction_that_began_early_and_wrote_late_comes_after_the_one_it_waited_for(kit: OutboxKit) -> None:
    """B has the lower number, A the lower id. With a cursor by the lowest open transaction (C), B would come first."""
    relay = StoreRelay(kit)
    b, c = kit.connect(), kit.connect()
    for connection in (b, c):
        connection.execute("SELECT pg_current_xact_id()")
    kit.commit(event("k", 1))  # A
    kit.write(b, event("k", 2))
    b.commit()
    assert by_key(relay.drain(), "k") == ["k:1", "k:2"]
    kit.write(c, event("k", 3))
    c.commit()
    assert by_key(relay.drain(), "k") == ["k:3"]


def test_rows_of_savepoints_come_with_their_transaction(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    connection = kit.connect()
    for n in range(70):  # more subtransactions than PostgreSQL lists in a snapshot
        connection.execute("SAVEPOINT s")
        kit.write(connection, event("k", n))
        if n % 7 == 0:
            connection.execute("ROLLBACK TO s")
    kit.commit(event("other", 1))
    assert [each.key for each in relay.drain()] == ["other"]
    connection.commit()
    assert by_key(relay.drain(), "k") == [f"k:{n}" for n in range(70) if n % 7]


def test_a_cursor_passes_exactly_the_rows_that_were_read_while_writers_commit(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)

    def write(writer: int) -> None:
        connection = kit.connect()
        for n in range(60):
            kit.write(connection, event(f"w{writer}", n))
            connection.commit()

    with ThreadPoolExecutor(3) as writers:
        tasks = [writers.submit(write, number) for number in range(3)]
        while not all(task.done() for task in tasks):
            relay.step(limit=20)
            passed = sql(
                kit,
                "SELECT count(*) FROM {t} JOIN {t}_shard USING (shard) WHERE pg_visible_in_snapshot(xid, seen) "
                "OR (id <= last AND pg_visible_in_snapshot(xid, until))",
            )
            assert passed == [(len(relay.published),)]
    relay.drain()
    for writer in range(3):
        assert by_key(relay.published, f"w{writer}") == [f"w{writer}:{n}" for n in range(60)]


@pytest.mark.parametrize("limit", [5, 1000])
def test_rows_that_commit_during_a_read_are_read_once(
    limit: int, kit: OutboxKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event("k", n) for n in range(20)])
    with monkeypatch.context() as patch:
        commit_before_each_statement(kit, "w", patch)
        for _ in range(10):
            relay.step(limit)
    relay.drain(limit)
    written = sql(kit, "SELECT count(*) FROM {t} WHERE event_key = 'w'")[0][0]
    assert by_key(relay.published, "w") == [f"w:{n}" for n in range(written)]
    assert by_key(relay.published, "k") == [f"k:{n}" for n in range(20)]


def test_a_late_commit_within_a_backlog_is_read_after_it(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    late, never = kit.connect(), kit.connect()
    kit.write(never, event("never", 1))
    kit.commit(*[event("k", n) for n in range(5)])
    kit.write(late, event("late", 1))
    kit.commit(*[event("k", n) for n in range(5, 20)])
    relay.step(limit=3)
    late.commit()
    relay.drain(limit=3)
    assert by_key(relay.published, "late") == ["late:1"]
    assert by_key(relay.published, "k") == [f"k:{n}" for n in range(20)]


def test_a_backlog_of_some_shards_does_not_delay_the_others(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event(f"k{n % 40}", n) for n in range(200)])
    batch = relay.read(limit=10)
    shard = batch.rows[0].shard
    relay.store.advance(batch, {shard: relay.held[shard]})  # so that this shard alone is within a backlog
    relay.drain(limit=10)
    busy = sql(kit, "SELECT event_key FROM {t} WHERE shard = %s LIMIT 1", shard)[0][0]
    other = sql(kit, "SELECT event_key FROM {t} WHERE shard <> %s LIMIT 1", shard)[0][0]
    kit.commit(*[event(busy, 1000 + n) for n in range(100)])
    batch = relay.read(limit=10)
    relay.store.advance(batch, {shard: relay.held[shard]})
    kit.commit(event(other, 5000))
    keys = {row.event.key for _ in range(2) for row in relay.step(limit=10).rows}
    assert {busy, other} <= keys


def test_shards_that_were_apart_are_read_together_again(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event(f"k{n}", n) for n in range(40)])
    batch = relay.read()
    relay.store.advance(batch, dict(sorted(relay.held.items())[:3]))
    relay.drain()
    assert len(sql(kit, "SELECT DISTINCT seen::text, until::text FROM {t}_shard")) == 1


def test_no_page_is_loaded_whole_if_its_payloads_are_large(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    count, size = 80, 1 << 20
    sql(
        kit,
        "INSERT INTO {t} (event_id, topic, event_key, event_time, payload) "
        "SELECT n::text, 'orders', 'k', 0, convert_to(repeat(md5(n::text), %s), 'UTF8') FROM generate_series(1, %s) n",
        *(size // 32, count),
    )
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest use of memory
    before = highest_memory()
    for limit in (200, 50):  # the rows fit, but for their payloads; the rows do not fit
        assert len(relay.read(limit=limit, max_bytes=3 * size + 1000).rows) == 3
    assert highest_memory() - before < 30 * size
    assert len(relay.drain(limit=200, max_bytes=10 * size)) == count


def highest_memory() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_an_old_batch_advances_nothing(kit: OutboxKit) -> None:
    """For example, when the answer to the first call was lost."""
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    batch = relay.read()
    assert not relay.store.advance(batch, relay.held)
    kit.commit(event("a", 2))
    relay.step()
    assert set(relay.store.advance(batch, relay.held)) == relay.held.keys()
    assert not relay.drain()


def test_a_read_returns_nothing_of_shards_that_are_lost(kit: OutboxKit) -> None:
    first = StoreRelay(kit)
    kit.commit(event("a", 1))
    StoreRelay(kit, "b")
    assert not first.read().rows


def test_a_relay_that_was_struck_advances_nothing_even_if_nobody_has_claimed_its_shards(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    batch = relay.read()
    StoreRelay(kit, "b", lambda view: LeasePlan(strike=["a"]))
    assert set(relay.store.advance(batch, relay.held)) == relay.held.keys()
    assert by_key(StoreRelay(kit, "c").drain(), "a") == ["a:1"]


def test_an_idle_relay_hardly_writes(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    relay.drain()
    began = time.monotonic()
    versions = set()
    for _ in range(50):
        relay.step()
        versions.update(sql(kit, "SELECT xmin::text FROM {t}_shard"))
    assert len(versions) <= 2 + (time.monotonic() - began)  # about one write in a second


def test_an_idle_relay_moves_its_cursors_from_time_to_time(kit: OutboxKit) -> None:
    """Otherwise it would look again and again at the rows of other relays."""
    relay = StoreRelay(kit)
    before = sql(kit, "SELECT seen::text FROM {t}_shard WHERE shard = 0")
    relay.step()
    assert sql(kit, "SELECT seen::text FROM {t}_shard WHERE shard = 0") != before


# -- turns ------------------------------------------------------------------------------------------------------------


def test_a_relay_that_is_stopped_in_a_turn_does_not_block_the_others(kit: OutboxKit) -> None:
    first, second = kit.store(), kit.store()
    inside, over = threading.Event(), threading.Event()

    def stop(view: RelaysView) -> LeasePlan:
        inside.set()
        over.wait(60)
        return claim_all(view)

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(first.turn, "a", 3.0, stop)
        assert inside.wait(30)
        try:
            began = time.monotonic()
            assert second.turn("b", 60.0, claim_all).held
            assert time.monotonic() - began < 20  # it is about a second on an idle machine
        finally:
            over.set()
        with pytest.raises(OutboxUnreachable):
            stopped.result()
    first.open()
    assert not first.turn("a", 3.0, keep).held


def test_a_relay_does_not_wait_for_long_for_the_turn_of_another(kit: OutboxKit) -> None:
    store, other = StoreRelay(kit).store, kit.connect()
    other.execute(f"SELECT FROM {kit.table}_meta FOR UPDATE")
    with pytest.raises(OutboxUnreachable, match="lock timeout"):
        store.turn("a", 0.3, keep)
    other.rollback()
    assert store.turn("a", 10.0, claim_all).held


def test_a_relay_that_was_removed_by_hand_owns_nothing(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    sql(kit, "DELETE FROM {t}_relay")
    relay.turn(keep)
    assert relay.held == {}
    assert sql(kit, "SELECT DISTINCT owner FROM {t}_shard") == [(None,)]


def test_an_error_in_a_decision_changes_nothing(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)

    def fail(view: RelaysView) -> LeasePlan:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        relay.turn(fail)
    held = relay.held
    relay.turn(keep)
    assert relay.held == held


# -- checks -----------------------------------------------------------------------------------------------------------


def test_a_sequence_with_a_cache_is_refused_with_its_cure(kit: OutboxKit) -> None:
    sql(kit, "ALTER TABLE {t} ALTER COLUMN id SET CACHE 20")
    with pytest.raises(BadOutbox, match="CACHE 20") as refusal:
        kit.store()
    sql(kit, str(refusal.value).partition("run ")[2])
    kit.store()


def test_missing_rights_are_named_and_are_enough(kit: OutboxKit) -> None:
    url = role(kit)
    store = PostgresLogStore(url, kit.table)
    for what in ("UPDATE", "SEQUENCE"):
        with pytest.raises(BadOutbox, match=what) as refusal:
            store.open()
        for grant in re.findall(r"GRANT [^;]+", str(refusal.value)):
            sql(kit, grant)
    store.open()
    relay = StoreRelay(kit, "b")
    relay.store.close()
    relay.store = store
    relay.turn(claim_all)
    kit.commit(event("a", 1), event("b", 1))
    batch = relay.read()
    assert not store.advance(batch, relay.held, [ParkedRow(batch.rows[0], "no", refused=False)])
    assert store.clean(keep_s=0, limit=10) == 2
    assert not store.unpark(relay.held, store.parked(relay.held, limit=5, max_bytes=100))
    sql(kit, "UPDATE {t}_meta SET value = 'elsewhere' WHERE name = 'identity'")
    relay.turn(claim_all)
    assert relay.identity.rebaselined
    store.close()


def test_a_role_with_other_defaults_changes_nothing(kit: OutboxKit) -> None:
    """Repeatable reads would fail when two relays take turns, and serializable ones would make writers fail."""
    url = role(
        kit,
        "ALTER ROLE {role} SUPERUSER",
        "ALTER ROLE {role} SET default_transaction_isolation = 'serializable'",
    )
    kit.url = url
    relay = StoreRelay(kit)
    kit.commit(*[event("a", n) for n in range(10)])
    assert by_key(relay.drain(limit=3), "a") == [f"a:{n}" for n in range(10)]


def test_tables_of_another_version_are_refused(kit: OutboxKit) -> None:
    store = kit.store()
    sql(kit, "UPDATE {t}_meta SET value = '99' WHERE name IN ('version', 'works_from')")
    with pytest.raises(BadOutbox, match="upgrade Onward"):
        store.turn("a", 10.0, keep)
    with pytest.raises(BadOutbox, match="upgrade Onward"):
        kit.store()


# -- encodings --------------------------------------------------------------------------------------------------------


@contextmanager
def with_encoding(server: PostgresServer, encoding: str) -> Iterator[OutboxKit]:
    """An outbox in a new database."""
    name = f"db_{encoding}_{uuid4().hex[:8]}".lower()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    kit = OutboxKit(server.url.removesuffix("onward") + name, "log")
    try:
        yield kit
    finally:
        kit.close()


@pytest.mark.parametrize(("encoding", "shown"), [("UTF8", "주문"), ("LATIN1", "\\uc8fc\\ubb38")])
def test_every_reason_can_be_stored(encoding: str, shown: str, postgres_server: PostgresServer) -> None:
    with with_encoding(postgres_server, encoding) as kit:
        relay = StoreRelay(kit)
        kit.commit(event("é", 1))
        batch = relay.read()
        relay.store.advance(batch, relay.held, [ParkedRow(batch.rows[0], "주문 \0 \ud800", refused=False)])
        assert sql(kit, "SELECT why, event_key FROM {t}_parked") == [(f"{shown} \\0 \\ud800", "é")]
        relay.store.unpark(relay.held, (), [ParkedRow(batch.rows[0], "\0주문", refused=True)])
        assert not relay.store.parked(relay.held, limit=9, max_bytes=99)


def test_a_text_that_is_not_utf_8_is_named(postgres_server: PostgresServer) -> None:
    with with_encoding(postgres_server, "SQL_ASCII") as kit:
        relay = StoreRelay(kit)
        kit.commit(event("good", 1))
        sql(kit, "UPDATE {t} SET event_key = E'\\xff'")
        with pytest.raises(BadOutbox, match="not UTF-8"):
            relay.read()
        sql(kit, "DELETE FROM {t}")
        kit.commit(event("good", 2))
        assert by_key(relay.drain(), "good") == ["good:2"]


# -- connections ------------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_reported_and_the_store_works_after_it_was_opened_again(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    sql(kit, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'onward relay'")
    with pytest.raises(OutboxUnreachable):
        relay.read()
    relay.store.open()
    relay.turn(keep)
    assert by_key(relay.drain(), "a") == ["a:1"]


def test_a_server_that_does_not_answer_is_noticed(
    postgres_server: PostgresServer, kit: OutboxKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql.PgConnection, "answer_s", 0.5)
    with postgres_server.proxy() as proxy:
        store = PostgresLogStore(proxy.url, kit.table)
        store.open()
        proxy.stall()
        for text in ("not answered", "closed"):  # a late answer must not be taken for that of another statement
            with pytest.raises(OutboxUnreachable, match=text):
                store.turn("a", 10.0, keep)
        store.close()


def test_a_url_is_understood_whatever_driver_it_names(postgres_server: PostgresServer) -> None:
    place = f"127.0.0.1:{postgres_server.port}/onward"
    for url in (
        f"postgresql+psycopg2://onward:p%40ss%2F%3Aw@{place}?connect_timeout=3",
        f"postgresql+asyncpg://onward:p%40ss%2F%3Aw@{place}?ssl=disable&prepared_statement_cache_size=0",
    ):
        with postgresql.connect(url) as connection:
            assert connection.info.password == "p@ss/:w"
            assert connection.info.get_parameters()["application_name"] == "onward relay"


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("postgresql://onward:secret@127.0.0.1:1/onward", OutboxUnreachable),
        ("postgresql://onward:secret@127.0.0.1:1/onward?nonsense=1", BadSetting),
        ("postgresql://onward:secret@127.0.0.1:port/onward", BadSetting),
    ],
)
def test_an_error_never_contains_the_password(url: str, error: type[Exception]) -> None:
    with pytest.raises(error) as refusal:
        postgresql.connect(url)
    causes: list[BaseException | None] = [refusal.value, refusal.value.__cause__]
    assert not any("secret" in str(each) for each in causes)


# -- the bell ---------------------------------------------------------------------------------------------------------


def rung_s(store: PostgresLogStore, timeout_s: float) -> float:
    began = time.monotonic()
    store.wait(timeout_s)
    return time.monotonic() - began


def test_the_bell_wakes_and_several_rings_are_one(kit: OutboxKit) -> None:
    store = PostgresLogStore(kit.url, kit.table)
    store.open()
    store.wait(0.01)  # connects
    with kit.transaction() as connection:  # they arrive together
        for n in range(3):
            connection.execute(f"NOTIFY {kit.table}, '{n}'")
    assert rung_s(store, 60) < 30
    assert rung_s(store, 0.3) >= 0.3
    store.close()


def test_closing_ends_a_wait(kit: OutboxKit) -> None:
    store = PostgresLogStore(kit.url, kit.table)
    store.open()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rung_s, store, 60)
        store.close()
        assert waiting.result() < 30
    assert rung_s(store, 60) < 30  # it is closed


def test_without_a_connection_waiting_is_sleeping(kit: OutboxKit) -> None:
    listener = postgresql.PostgresListener("postgresql://onward@127.0.0.1:1/onward", "x")
    began = time.monotonic()
    listener.wait(0.1)
    listener.wait(0.1)
    assert time.monotonic() - began >= 0.2
    listener.close()


# -- cleaning ---------------------------------------------------------------------------------------------------------


def left(kit: OutboxKit) -> list[str]:
    return [key for (key,) in sql(kit, "SELECT event_key FROM {t} ORDER BY id")]


def test_published_rows_are_deleted_when_they_are_old_enough(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("old", 1))
    sql(kit, "UPDATE {t} SET event_time = extract(epoch FROM now()) - 100")
    kit.commit(event("young", 1))
    sql(kit, "UPDATE {t} SET event_time = extract(epoch FROM now()) WHERE event_key = 'young'")
    relay.drain()
    kit.commit(event("pending", 1))
    assert relay.store.clean(keep_s=50, limit=10) == 1
    assert left(kit) == ["young", "pending"]
    assert relay.store.clean(keep_s=-50, limit=10) == 1
    assert left(kit) == ["pending"]


def test_rows_that_cannot_be_deleted_do_not_stop_the_cleaning(kit: OutboxKit) -> None:
    """Rows of a shard that no relay owns stay, in front of the others."""
    relay = StoreRelay(kit)
    kit.commit(*[event(f"k{n % 16}", n) for n in range(300)])
    some = dict(sorted(relay.held.items())[:4])
    batch = relay.read(limit=1000)
    relay.store.advance(batch, some)
    deletable = sum(row.shard in some for row in batch.rows)
    deleted = [relay.store.clean(keep_s=0, limit=20) for _ in range(40)]
    assert sum(deleted) == deletable
    assert deleted[0] == 20
    relay.drain(limit=1000)
    while relay.store.clean(keep_s=0, limit=20):
        pass
    assert left(kit) == []


def test_one_relay_cleans_at_a_time(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    relay.drain()
    other = kit.connect()
    other.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"onward clean {kit.table}"])
    assert relay.store.clean(keep_s=0, limit=10) == 0
    other.rollback()
    assert relay.store.clean(keep_s=0, limit=10) == 1
