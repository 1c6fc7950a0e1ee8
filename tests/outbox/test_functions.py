"""The SQL functions and procedures of an outbox, for triggers and for programs in other languages."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pymysql
import pytest

from onward.event import Event
from onward.outbox import schema
from onward.outbox.rows import row_of
from tests.cli.shell import until
from tests.outbox.fresh import FreshDatabase, fresh_database
from tests.outbox.store_kit import OutboxKit, StoreRelay, claim_all, event, keep

ROWS = "SELECT id, shard, event_id, topic, event_key, event_type, event_time, headers, payload FROM {} ORDER BY id"


@pytest.fixture
def postgres(request: pytest.FixtureRequest, postgres_server: object, tmp_path: Path) -> Iterator[FreshDatabase]:
    with fresh_database("postgresql", request, tmp_path) as database:
        schema.init(database.url)
        yield database


@pytest.fixture
def mariadb(request: pytest.FixtureRequest, mariadb_server: object, tmp_path: Path) -> Iterator[FreshDatabase]:
    with fresh_database("mariadb", request, tmp_path) as database:
        schema.init(database.url)
        yield database


@pytest.fixture
def kit(postgres_server: Any) -> Iterator[OutboxKit]:
    kit = OutboxKit(postgres_server.url, "log")
    yield kit
    kit.close()


def written(database: FreshDatabase, table: str = "onward_outbox") -> list[Event]:
    """The events in the table, as a relay reads them. Their ids and times are those of now."""
    rows = [row_of(*row) for row in database.rows(ROWS.format(table))]
    for row in rows:
        number = UUID(row.event.id)
        assert str(number) == row.event.id
        assert (number.version, number.variant) == (7, "specified in RFC 4122")
        assert abs((number.int >> 80) - row.event.time * 1000) < 2
        assert time.time() - 60 < row.event.time < time.time() + 1
        assert not row.fault
    assert len({row.event.id for row in rows}) == len(rows)
    return [row.event for row in rows]


def parts(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(each.topic, each.key, each.value, dict(each.headers), each.type) for each in events]


# -- PostgreSQL ---------------------------------------------------------------------------------------------------


def test_enqueue_writes_bytes_json_texts_and_tombstones(postgres: FreshDatabase) -> None:
    postgres.run(
        r"SELECT onward_enqueue('orders', '\x00ff'::bytea)",
        "SELECT onward_enqueue('orders', '{\"id\": 1}'::jsonb, 'c-1')",
        "SELECT onward_enqueue('orders', 'grüße', 'c-1', type => 'order.placed')",
        "SELECT onward_enqueue('orders', NULL, key => 'c-1', lock => true)",
        "SELECT onward_enqueue('o.r_d-1', '', 'ключ', headers => '{\"a\": \"ü\"}')",
        "SELECT onward_enqueue('orders', '', '', headers => '{}', type => NULL)",
    )
    assert parts(written(postgres)) == [
        ("orders", None, b"\x00\xff", {}, ""),
        ("orders", "c-1", b'{"id": 1}', {}, ""),
        ("orders", "c-1", "grüße".encode(), {}, "order.placed"),
        ("orders", "c-1", None, {}, ""),
        ("o.r_d-1", "ключ", b"", {"a": "ü"}, ""),
        ("orders", "", b"", {}, ""),
    ]


def test_enqueue_returns_the_id_of_the_event(postgres: FreshDatabase) -> None:
    with closing(postgres.connect()) as connection:
        (name,) = connection.execute("SELECT onward_enqueue('orders', 'x')").fetchone()
        connection.commit()
    assert [each.id for each in written(postgres)] == [name]


BAD_CALLS = [
    ("NULL, 'x'", "topic NULL: use 1 to 200 of the characters"),
    ("'', 'x'", "topic '': use 1 to 200 of the characters"),
    ("'or ders', 'x'", "topic 'or ders': use 1 to 200"),
    ("E'orders\\n', 'x'", "use 1 to 200 of the characters"),
    ("'ordérs', 'x'", "use 1 to 200 of the characters"),
    ("'..', 'x'", "use 1 to 200 of the characters"),
    ("repeat('x', 201), 'x'", "use 1 to 200 of the characters"),
    ("'orders', 'x', headers => '{\"a\": 1}'", "each value must be a text"),
    ("'orders', 'x', headers => '{\"a\": null}'", "each value must be a text"),
    ("'orders', 'x', headers => '{\"\": \"b\"}'", "each name needs printable characters"),
    ("'orders', 'x', headers => '[]'", "use a JSON object of names and texts"),
    ("'orders', 'x', headers => 'null'", "use a JSON object of names and texts"),
    ("'orders', 'x', type => repeat('x', 201)", "at most 200 printable characters"),
    ("'orders', 'x', lock => true", "lock needs a key"),
]


def test_enqueue_refuses_what_could_not_be_published(postgres: FreshDatabase) -> None:
    for call, why in BAD_CALLS:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=why):
            postgres.run(f"SELECT onward_enqueue({call})")
    assert written(postgres) == []


def test_a_trigger_of_postgresql_writes_events_with_the_data(postgres: FreshDatabase) -> None:
    postgres.run(
        "CREATE TABLE purchase (id int PRIMARY KEY, total int)",
        """
        CREATE FUNCTION purchase_changed() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM onward_enqueue('orders', to_jsonb(NEW), NEW.id::text, type => lower(TG_OP));
            RETURN NULL;
        END $$
        """,
        "CREATE TRIGGER changed AFTER INSERT OR UPDATE ON purchase FOR EACH ROW EXECUTE FUNCTION purchase_changed()",
        "INSERT INTO purchase VALUES (1, 10), (2, 20)",
        "UPDATE purchase SET total = 11 WHERE id = 1",
    )
    with closing(postgres.connect()) as connection:
        connection.execute("INSERT INTO purchase VALUES (3, 30)")
        connection.rollback()
    assert parts(written(postgres)) == [
        ("orders", "1", b'{"id": 1, "total": 10}', {}, "insert"),
        ("orders", "2", b'{"id": 2, "total": 20}', {}, "insert"),
        ("orders", "1", b'{"id": 1, "total": 11}', {}, "update"),
    ]


def test_the_functions_work_with_any_search_path_and_need_only_insert(postgres: FreshDatabase) -> None:
    postgres.run(
        "CREATE SCHEMA shop",
        "DROP ROLE IF EXISTS clerk",
        "CREATE ROLE clerk LOGIN",
        "GRANT USAGE ON SCHEMA shop TO clerk",
    )
    schema.init(postgres.url, table="shop.events_outbox")
    try:
        with closing(postgres.connect("clerk")) as clerk:
            clerk.execute("CREATE TEMP TABLE onward_outbox (id int)")  # it hides ours
            clerk.execute("SET search_path = pg_temp")
            clerk.commit()
            for call in ("public.onward_enqueue", "shop.events_enqueue"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table"):
                    clerk.execute(f"SELECT {call}('orders', 'x')")
                clerk.rollback()
            postgres.run("GRANT INSERT ON onward_outbox, shop.events_outbox TO clerk")
            for call in ("public.onward_enqueue", "shop.events_enqueue"):
                for payload in ("'x'", "'x'::bytea", "'1'::jsonb"):
                    clerk.execute(f"SELECT {call}('orders', {payload}, 'c-1', lock => true)")
            clerk.commit()
        assert len(written(postgres)) == len(written(postgres, "shop.events_outbox")) == 3
    finally:
        postgres.run("DROP OWNED BY clerk", "DROP ROLE clerk")


def test_a_locked_key_waits_for_the_transaction_that_locked_it(postgres: FreshDatabase) -> None:
    call = "SELECT onward_enqueue('orders', %s, %s, lock => true)"
    with closing(postgres.connect()) as first, closing(postgres.connect()) as second:
        first.execute(call, ("first", "c-1"))
        second.execute(call, ("other", "c-2"))
        second.commit()
        waiting = threading.Thread(target=lambda: second.execute(call, ("second", "c-1")))
        waiting.start()
        blocked = f"SELECT 1 FROM pg_stat_activity WHERE pid = {second.info.backend_pid} AND wait_event = 'advisory'"
        until(lambda: postgres.rows(blocked), "the second transaction waits")
        first.commit()
        waiting.join()
        second.commit()
    assert [each.value for each in written(postgres) if each.key == "c-1"] == [b"first", b"second"]


def test_the_functions_survive_a_dump_and_restore(
    postgres: FreshDatabase, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    postgres.run("SELECT onward_enqueue('orders', 'before', 'c-1')")
    dump = subprocess.run(["pg_dump", "--clean", "--if-exists", postgres.url], capture_output=True, check=True).stdout
    with fresh_database("postgresql", request, tmp_path) as restored:
        command = ["psql", "--set", "ON_ERROR_STOP=1", restored.url]
        subprocess.run(command, input=dump, capture_output=True, check=True)
        restored.run("SELECT onward_enqueue('orders', '\"after\"'::jsonb, 'c-1')")
        assert [each.value for each in written(restored)] == [b"before", b'"after"']
        assert schema.init(restored.url) == []


# -- cleaning -----------------------------------------------------------------------------------------------------


def clean(kit: OutboxKit, call: str = "") -> tuple[int, list[str]]:
    """How many rows it deleted, and its warnings."""
    with closing(kit.connect()) as connection:
        warnings: list[str] = []
        connection.add_notice_handler(lambda diagnostic: warnings.append(diagnostic.message_primary))
        (count,) = connection.execute(f"SELECT {kit.table}_clean({call})").fetchone()
        connection.commit()
        return count, warnings


def left(kit: OutboxKit) -> list[str]:
    with closing(kit.connect()) as connection:
        rows = connection.execute(f"SELECT convert_from(payload, 'UTF8') FROM {kit.table} ORDER BY id").fetchall()
        return [text for (text,) in rows]


def test_clean_deletes_only_published_rows(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*(event("a", n) for n in range(5)))
    open_ = kit.connect()
    kit.write(open_, event("b", 1))
    relay.drain()
    open_.commit()
    kit.commit(event("a", 5))
    assert clean(kit) == (5, [])
    assert left(kit) == ["b:1", "a:5"]
    assert len(relay.drain()) == 2
    assert clean(kit) == (2, [])
    assert clean(kit) == (0, [])


def test_clean_deletes_the_published_part_of_a_backlog(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*(event("a", n) for n in range(50)))
    relay.step(limit=10)
    published = [(each.value or b"").decode() for each in relay.published]
    assert clean(kit) == (len(published), [])
    assert left(kit) == [f"a:{n}" for n in range(len(published), 50)]
    relay.drain()
    assert [(each.value or b"").decode() for each in relay.published] == [f"a:{n}" for n in range(50)]


def test_clean_obeys_its_limits(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    now = time.time()
    old = [Event(f"old-{n}", "orders", "a", b"old", {}, "", now - 7200) for n in range(7)]
    kit.commit(*old[:4], Event("new", "orders", "a", b"new", {}, "", now), *old[4:])
    relay.drain()
    assert clean(kit, "interval '1 day'") == (0, [])
    assert clean(kit, "keep => interval '1 hour', max_rows => 3") == (3, [])
    assert clean(kit, "interval '1 hour', 3") == (3, [])
    assert clean(kit, "interval '1 hour', 3") == (1, [])
    assert left(kit) == ["new"]
    assert clean(kit, "max_rows => 0") == (0, [])
    assert clean(kit) == (1, [])


def test_clean_deletes_nothing_before_the_first_relay_and_after_a_copy(kit: OutboxKit) -> None:
    """In a copy the transaction numbers mean nothing, so rows that were never published could count as published."""
    kit.commit(event("a", 1))
    count, (warning,) = clean(kit)
    assert (count, "no relay has used" in warning) == (0, True)
    relay = StoreRelay(kit)
    relay.drain()
    with closing(kit.connect()) as connection:
        connection.execute(f"UPDATE {kit.table}_meta SET value = '7/' || value WHERE name = 'identity'")
        connection.commit()
    kit.commit(event("a", 2))
    assert clean(kit)[0] == 0
    relay.turn(claim_all)  # it notices, and compares the rows
    relay.turn(keep)
    relay.drain()
    assert clean(kit) == (2, [])


def test_there_is_no_clean_function_where_rows_are_deleted_at_once() -> None:
    assert "_clean" in schema.script("postgresql")
    for dialect in ("mariadb", "sqlite"):
        assert "_clean" not in schema.script(dialect)
    assert "_clean" not in schema.script("postgresql", mode="queue")


# -- MariaDB ------------------------------------------------------------------------------------------------------


def test_the_procedure_writes_bytes_json_texts_and_tombstones(mariadb: FreshDatabase) -> None:
    mariadb.run(
        "CALL onward_enqueue('orders', x'00ff', NULL, NULL, NULL)",
        "CALL onward_enqueue('orders', JSON_OBJECT('id', 1), 'c-1', 'order.placed', NULL)",
        "CALL onward_enqueue('o.r_d-1', NULL, 'ключ', '', '{\"a\": \"ü\", \"b\": \"\"}')",
        "CALL onward_enqueue('orders', 'grüße', '', NULL, '{}')",
    )
    assert parts(written(mariadb)) == [
        ("orders", None, b"\x00\xff", {}, ""),
        ("orders", "c-1", b'{"id": 1}', {}, "order.placed"),
        ("o.r_d-1", "ключ", None, {"a": "ü", "b": ""}, ""),
        ("orders", "", "grüße".encode(), {}, ""),
    ]


BAD_MARIADB_CALLS = [
    ("NULL, 'x', NULL, NULL, NULL", "use 1 to 200 of the characters"),
    ("'', 'x', NULL, NULL, NULL", "use 1 to 200 of the characters"),
    ("'or ders', 'x', NULL, NULL, NULL", "use 1 to 200 of the characters"),
    ("'orders\\n', 'x', NULL, NULL, NULL", "use 1 to 200 of the characters"),
    ("'orders ', 'x', NULL, NULL, NULL", "use 1 to 200 of the characters"),
    ("'order\u017f', 'x', NULL, NULL, NULL", "use 1 to 200 of the characters"),
    ("'..', 'x', NULL, NULL, NULL", "use 1 to 200 of the characters"),
    ("REPEAT('x', 201), 'x', NULL, NULL, NULL", "use 1 to 200 of the characters"),
    ("'orders', 'x', NULL, REPEAT('x', 201), NULL", "at most 200 characters"),
    ("'orders', 'x', NULL, NULL, '[]'", "use a JSON object of names and texts"),
    ("'orders', 'x', NULL, NULL, 'a'", "use a JSON object of names and texts"),
    ("'orders', 'x', NULL, NULL, '{\"a\": 1}'", "each value must be a text"),
    ("'orders', 'x', NULL, NULL, '{\"a\": \"b\", \"c\": null}'", "each value must be a text"),
]


def test_the_procedure_refuses_what_could_not_be_published(mariadb: FreshDatabase) -> None:
    for call, why in BAD_MARIADB_CALLS:
        with pytest.raises(pymysql.err.OperationalError, match=why):
            mariadb.run(f"CALL onward_enqueue({call})")
    assert written(mariadb) == []


def test_a_trigger_of_mariadb_writes_events_with_the_data(mariadb: FreshDatabase) -> None:
    mariadb.run(
        "CREATE TABLE purchase (id INT PRIMARY KEY, total INT)",
        "CREATE TRIGGER placed AFTER INSERT ON purchase FOR EACH ROW BEGIN CALL onward_lock(NEW.id); "
        "CALL onward_enqueue('orders', JSON_OBJECT('id', NEW.id, 'total', NEW.total), NEW.id, 'insert', NULL); END",
        "INSERT INTO purchase VALUES (1, 10), (2, 20)",
    )
    with closing(mariadb.connect()) as connection:
        connection.cursor().execute("INSERT INTO purchase VALUES (3, 30)")
        connection.rollback()
    assert parts(written(mariadb)) == [
        ("orders", "1", b'{"id": 1, "total": 10}', {}, "insert"),
        ("orders", "2", b'{"id": 2, "total": 20}', {}, "insert"),
    ]


def test_the_procedure_is_found_in_another_schema(mariadb: FreshDatabase) -> None:
    home = mariadb.url.rpartition("/")[2]
    with closing(mariadb.connect()) as connection:
        connection.select_db("information_schema")
        connection.cursor().execute(f"CALL {home}.onward_enqueue('orders', 'x', NULL, NULL, NULL)")
        connection.commit()
    assert len(written(mariadb)) == 1


def test_a_key_locked_in_mariadb_waits_for_the_transaction_that_locked_it(mariadb: FreshDatabase) -> None:
    write = "CALL onward_enqueue('orders', %s, %s, NULL, NULL)"
    with closing(mariadb.connect()) as first, closing(mariadb.connect()) as second:
        first.cursor().execute("CALL onward_lock('c-1')")
        first.cursor().execute(write, ("first", "c-1"))
        second.cursor().execute("CALL onward_lock('c-2')")
        second.commit()
        waiting = threading.Thread(target=lambda: second.cursor().execute("CALL onward_lock('c-1')"))
        waiting.start()
        blocked = (
            "SELECT 1 FROM information_schema.innodb_trx "
            f"WHERE trx_mysql_thread_id = {second.thread_id()} AND trx_state = 'LOCK WAIT'"
        )
        until(lambda: mariadb.rows(blocked), "the second transaction waits")
        first.commit()
        waiting.join()
        second.cursor().execute(write, ("second", "c-1"))
        second.commit()
    assert [each.value for each in written(mariadb)] == [b"first", b"second"]
    for problem in ("CALL onward_lock(NULL)", "CALL onward_lock('c-1')"):
        with pytest.raises(pymysql.err.OperationalError, match="the key is NULL, or onward_outbox_lock has not all"):
            mariadb.run(problem)
        mariadb.run("DELETE FROM onward_outbox_lock")


def test_a_caller_of_the_procedure_needs_only_execute_and_insert(mariadb: FreshDatabase) -> None:
    home, clerk = mariadb.url.rpartition("/")[2], "clerk@'127.0.0.1'"
    mariadb.run(f"CREATE OR REPLACE USER {clerk}", f"GRANT EXECUTE ON PROCEDURE {home}.onward_enqueue TO {clerk}")
    try:
        with closing(mariadb.connect("clerk")) as connection:
            call = "CALL onward_enqueue('orders', 'x', NULL, NULL, NULL)"
            with pytest.raises(pymysql.err.OperationalError, match="INSERT command denied"):
                connection.cursor().execute(call)
            mariadb.run(f"GRANT INSERT ON {home}.onward_outbox TO {clerk}")
            connection.cursor().execute(call)
            connection.commit()
        assert len(written(mariadb)) == 1
    finally:
        mariadb.run(f"DROP USER {clerk}")
