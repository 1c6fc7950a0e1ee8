"""The tables of an outbox: how they are created and upgraded, and which versions of code and schema fit."""

import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from onward.errors import BadOutbox, BadSetting, OutboxError, OutboxUnreachable
from onward.outbox import schema, status
from onward.outbox.stores import open_store
from tests.outbox.fresh import DIALECTS, FreshDatabase, fresh_database
from tests.servers.server import free_port

INSERT = "INSERT INTO {} (event_id, topic, event_key, event_time) VALUES ('e-1', 'orders', 'c-1', 1.0)"
FUNCTIONS = {"postgresql": ": SQL functions", "mariadb": ": SQL procedures", "sqlite": ""}


@pytest.fixture(params=DIALECTS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FreshDatabase]:
    with fresh_database(request.param, request, tmp_path) as database:
        yield database


@pytest.fixture
def postgres(request: pytest.FixtureRequest, postgres_server: object, tmp_path: Path) -> Iterator[FreshDatabase]:
    with fresh_database("postgresql", request, tmp_path) as database:
        yield database


@pytest.fixture
def mariadb(request: pytest.FixtureRequest, mariadb_server: object, tmp_path: Path) -> Iterator[FreshDatabase]:
    with fresh_database("mariadb", request, tmp_path) as database:
        yield database


def picture(database: FreshDatabase) -> object:
    """Everything in the database, except what differs between two outboxes."""
    return _tables(database), {name: value for name, value in database.meta().items() if name != "outbox_id"}


def _tables(database: FreshDatabase) -> object:
    if database.dialect == "postgresql":
        command = ["pg_dump", "--no-owner", "--exclude-table-data=onward_outbox_meta", database.url]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [line for line in dump.splitlines() if not line.startswith(("--", "\\"))]
    if database.dialect == "sqlite":
        return database.rows("SELECT name, sql FROM sqlite_master"), database.rows("SELECT * FROM onward_outbox_shard")
    every = [("TABLE", name) for (name,) in database.rows("SHOW TABLES")]
    every += [("PROCEDURE", row[1]) for row in database.rows("SHOW PROCEDURE STATUS WHERE db = DATABASE()")]
    texts = [re.sub(r"AUTO_INCREMENT=\d+ ", "", _create(database, *each)) for each in every]
    return texts, database.rows("SELECT shard FROM onward_outbox_shard UNION SELECT slot FROM onward_outbox_lock")


def _create(database: FreshDatabase, kind: str, name: str) -> str:
    (row,) = database.rows(f"SHOW CREATE {kind} {name}")
    return str(row[1] if kind == "TABLE" else row[2])


def version_1(dialect: str, **options: Any) -> list[str]:
    """The statements of the first version."""
    every, later = schema.statements(dialect, **options), schema.statements(dialect, since=1, **options)
    return every[: len(every) - len(later)]


# -- creating -----------------------------------------------------------------------------------------------------


def test_init_creates_everything_and_a_second_call_changes_nothing(database: FreshDatabase) -> None:
    created = schema.init(database.url)
    assert created == ["version 1: tables", f"version 2{FUNCTIONS[database.dialect]}"]
    before, meta = picture(database), database.meta()
    assert schema.init(database.url) == schema.upgrade(database.url) == []
    assert (picture(database), database.meta()) == (before, meta)
    assert re.fullmatch("[0-9a-f]{32}", meta.pop("outbox_id"))
    log, shards = database.dialect == "postgresql", "1" if database.dialect == "sqlite" else "8"
    wanted = {"version": "2", "works_from": "1", "identity": "", "shards": shards, "mode": "log" if log else "queue"}
    assert meta == wanted


def test_of_several_inits_at_once_one_creates_the_tables(database: FreshDatabase) -> None:
    barrier = threading.Barrier(4)

    def init(_: int) -> list[str]:
        barrier.wait()
        return schema.init(database.url)

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(init, range(4)))
    assert sorted(map(len, done)) == [0, 0, 0, 2]
    schema.check(int(database.meta()["version"]), 1)


@pytest.mark.parametrize("mode", ["log", "queue"])
def test_the_printed_sql_does_in_the_databases_own_client_what_init_does(
    mode: str, database: FreshDatabase, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if mode == "log" and database.dialect != "postgresql":
        pytest.skip("only PostgreSQL has this mode")
    schema.init(database.url, mode=mode)
    other = tmp_path / "other"
    other.mkdir()
    with fresh_database(database.dialect, request, other) as printed:
        _run_client(printed, schema.script(database.dialect, mode=mode))
        assert picture(printed) == picture(database)
        assert printed.meta()["outbox_id"] != database.meta()["outbox_id"]
        assert schema.init(printed.url) == []


def _run_client(database: FreshDatabase, sql: str) -> None:
    if database.dialect == "sqlite":
        with closing(database.connect()) as connection:
            connection.executescript(sql)
        return
    if database.dialect == "postgresql":
        command = ["psql", "--set", "ON_ERROR_STOP=1", "--single-transaction", database.url]
    else:
        host, port = database.url.partition("@")[2].partition("/")[0].split(":")
        command = [
            "mariadb",
            "--no-defaults",
            "--comments",
            f"--host={host}",
            f"--port={port}",
            "--user=onward",
            "--password=onward",
        ]
        command.append(database.url.rpartition("/")[2])
    done = subprocess.run(command, input=sql, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_statement_runs_in_a_migration(
    database: FreshDatabase, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Alembic's `op.execute` makes a `text` of it, in which a colon before a name and a % could have a meaning."""
    schema.init(database.url)
    other = tmp_path / "other"
    other.mkdir()
    with fresh_database(database.dialect, request, other) as migrated:
        drivers = {"postgresql": "postgresql+psycopg", "mariadb": "mysql+pymysql", "sqlite": "sqlite"}
        engine = create_engine(f"{drivers[database.dialect]}:{migrated.url.partition(':')[2]}")
        with engine.begin() as connection:
            for statement in schema.statements(database.dialect):
                connection.execute(text(statement))
        engine.dispose()
        assert picture(migrated) == picture(database)


def test_events_of_the_transaction_that_creates_the_tables_are_not_lost(postgres: FreshDatabase) -> None:
    """A later transaction that ends earlier makes our own transaction count as visible in its own snapshot."""
    with closing(postgres.connect()) as connection:
        connection.execute("CREATE TABLE ours ()")
        postgres.run("CREATE TABLE theirs ()")
        for statement in schema.statements("postgresql"):
            connection.execute(statement)
        connection.execute(INSERT.format("onward_outbox"))
        connection.commit()
    assert status.read(postgres.url).waiting == 1


def test_an_interrupted_init_is_finished_with_its_first_choices(mariadb: FreshDatabase) -> None:
    begun = version_1("mariadb", shards=3)
    for done in range(2, len(begun), 3):
        mariadb.run(*begun[:done])
        assert schema.init(mariadb.url, shards=5) == ["version 1: tables", "version 2: SQL procedures"]
        assert mariadb.meta()["shards"] == "3"
        assert len(mariadb.rows("SELECT shard FROM onward_outbox_shard")) == 3
        assert "MOD 3" in _create(mariadb, "TABLE", "onward_outbox")
        mariadb.run("DROP TABLE " + ", ".join(name for (name,) in mariadb.rows("SHOW TABLES")))


@pytest.mark.parametrize("table", ["shop.onward_outbox", "shop.Events"])
def test_a_table_may_be_in_another_schema(database: FreshDatabase, table: str) -> None:
    home = {"postgresql": "CREATE SCHEMA shop", "mariadb": "CREATE DATABASE shop"}
    if database.dialect == "sqlite":
        table = table.replace("shop", "main")
    else:
        with pytest.raises(BadOutbox, match=r"shop.*create it first, or name an existing one with --table"):
            schema.init(database.url, table=table)
        database.run(home[database.dialect])
    try:
        schema.init(database.url, table=table, shards=1)
        assert schema.init(database.url, table=table) == []
        database.run(INSERT.format(table))
        assert status.read(database.url, table=table).waiting == 1
    finally:
        if database.dialect == "mariadb":
            database.run("DROP DATABASE shop")


@pytest.mark.parametrize("table", ["", "a b", "a.b.c", "1a", "x" * 42, 'a"', "a;", "täble", ".a", "a\n"])
def test_a_name_that_would_need_quotes_is_refused(table: str) -> None:
    with pytest.raises(BadSetting, match="use at most 41 letters, digits and _"):
        schema.script("sqlite", table=table)
    with pytest.raises(BadSetting, match="use at most 41 letters, digits and _"):
        schema.init("sqlite:///none.db", table=table)


def test_the_longest_name_works(database: FreshDatabase) -> None:
    schema.init(database.url, table="x" * 41)
    assert status.read(database.url, table="x" * 41).waiting == 0


def test_choices_that_a_database_does_not_have_are_refused() -> None:
    for dialect, options, why in [
        ("sqlite", {"shards": 2}, "has 1 shard"),
        ("postgresql", {"shards": 0}, "1 to 256"),
        ("mariadb", {"shards": 257}, "1 to 256"),
        ("mariadb", {"mode": "log"}, "has mode queue"),
        ("postgresql", {"mode": "fifo"}, "has mode log or queue"),
        ("oracle", {}, "not on 'oracle'"),
    ]:
        with pytest.raises(BadSetting, match=why):
            schema.script(dialect, **options)  # type: ignore[arg-type]


def test_the_number_of_shards_and_the_mode_cannot_change(postgres: FreshDatabase) -> None:
    schema.init(postgres.url, shards=4, mode="queue")
    assert schema.init(postgres.url, shards=4, mode="queue") == schema.init(postgres.url) == []
    with pytest.raises(BadSetting, match="shards=8: the outbox onward_outbox exists with shards=4"):
        schema.init(postgres.url, shards=8)
    with pytest.raises(BadSetting, match="mode=log: the outbox onward_outbox exists with mode=queue"):
        schema.init(postgres.url, mode="log")


# -- versions -----------------------------------------------------------------------------------------------------


def test_a_writer_works_with_version_1_and_the_relay_asks_for_the_upgrade(database: FreshDatabase) -> None:
    database.run(*version_1(database.dialect))
    database.run(INSERT.format("onward_outbox"))
    cure = "has schema version 1, and the relay needs 2: run `onward outbox upgrade URL`"
    with pytest.raises(BadOutbox, match=cure):
        schema.check(1, 1)
    _refused(database, "run `onward outbox upgrade URL`")
    (finding, *_) = status.findings(status.read(database.url), 60.0)
    assert (finding.level, finding.cure) == ("error", "run `onward outbox upgrade URL`")
    assert schema.upgrade(database.url) == [f"version 2{FUNCTIONS[database.dialect]}"]
    _accepted(database)
    assert status.read(database.url).waiting == 1


def test_a_newer_schema_is_used_if_it_says_so(database: FreshDatabase) -> None:
    schema.init(database.url)
    database.run("UPDATE onward_outbox_meta SET value = '3' WHERE name = 'version'")
    database.run("UPDATE onward_outbox_meta SET value = '2' WHERE name = 'works_from'")
    schema.check(3, 2)
    assert schema.init(database.url) == schema.upgrade(database.url) == []
    _accepted(database)
    assert status.findings(status.read(database.url), 60.0)[0].level == "ok"
    database.run("UPDATE onward_outbox_meta SET value = '3' WHERE name = 'works_from'")
    for refused in (
        lambda: schema.check(3, 3),
        lambda: schema.init(database.url),
        lambda: schema.upgrade(database.url),
        lambda: status.read(database.url),
    ):
        with pytest.raises(BadOutbox, match=r"schema version 3, which needs an Onward .* upgrade Onward"):
            refused()
    _refused(database, "upgrade Onward")


def _accepted(database: FreshDatabase) -> None:
    store = open_store(database.url, "onward_outbox")
    store.open()
    store.close()


def _refused(database: FreshDatabase, cure: str) -> None:
    store = open_store(database.url, "onward_outbox")
    with pytest.raises(BadOutbox, match=cure):
        store.open()
    store.close()


def test_an_upgrade_finds_the_schema_of_the_tables(postgres: FreshDatabase) -> None:
    """Even if the first schema of the search_path is another one."""
    postgres.run(*version_1("postgresql"))
    postgres.run(
        f"ALTER DATABASE {postgres.url.rpartition('/')[2]} SET search_path = mine, public", "CREATE SCHEMA mine"
    )
    assert schema.upgrade(postgres.url) == ["version 2: SQL functions"]
    homes = postgres.rows("SELECT DISTINCT pronamespace::regnamespace::text FROM pg_proc WHERE proname LIKE 'onward%'")
    assert homes == [("public",)]
    postgres.run("SELECT onward_enqueue('orders', '1')")
    assert status.read(postgres.url).waiting == 1


# -- what may be wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "_meta", "_parked"])
def test_a_table_of_another_program_is_left_alone(database: FreshDatabase, suffix: str) -> None:
    name = f"onward_outbox{suffix}"
    database.run(f"CREATE TABLE {name} (id INT, note VARCHAR(10))", f"INSERT INTO {name} VALUES (1, 'mine')")
    with pytest.raises(OutboxError, match=name) as caught:
        schema.init(database.url)
    assert "is not part of an outbox; choose another name with --table" in str(caught.value)
    assert database.rows(f"SELECT * FROM {name}") == [(1, "mine")]
    schema.init(database.url, table="events_outbox")


def test_a_function_of_another_outbox_is_left_alone(postgres: FreshDatabase) -> None:
    schema.init(postgres.url)
    with pytest.raises(BadOutbox, match=r"onward_enqueue.*already exists.*choose another name with --table"):
        schema.init(postgres.url, table="onward")
    assert postgres.rows("SELECT to_regclass('onward_meta')") == [(None,)]


def test_a_procedure_of_another_outbox_is_left_alone(mariadb: FreshDatabase) -> None:
    schema.init(mariadb.url)
    with pytest.raises(BadOutbox, match=r"a procedure onward_\w+ of another outbox or program; choose another name"):
        schema.init(mariadb.url, table="onward")
    mariadb.run("CALL onward_enqueue('orders', '1', NULL, NULL, NULL)")
    assert status.read(mariadb.url).waiting == 1


def test_missing_tables_are_reported_with_the_cure(database: FreshDatabase) -> None:
    for missing in (schema.upgrade, schema.missing, status.read, status.release):
        with pytest.raises(BadOutbox, match="run `onward outbox init URL`"):
            missing(database.url)
    if database.dialect == "sqlite":
        assert not Path(database.url.partition(":///")[2]).exists()
        return
    database.run("CREATE TABLE onward_outbox_meta (name VARCHAR(9), value VARCHAR(9))")
    with pytest.raises(BadOutbox, match="has no outbox onward_outbox: run `onward outbox init URL`"):
        status.read(database.url)


def test_a_role_without_rights_learns_which_it_needs(postgres: FreshDatabase) -> None:
    postgres.run("DROP ROLE IF EXISTS guest", "CREATE ROLE guest LOGIN")
    guest = postgres.as_user("guest")
    try:
        with pytest.raises(BadOutbox, match=r"permission denied for schema public; use a role that may create"):
            schema.init(guest)
        schema.init(postgres.url)
        with pytest.raises(BadOutbox, match="GRANT SELECT, INSERT, UPDATE, DELETE ON onward_outbox, ") as caught:
            status.read(guest)
        postgres.run(str(caught.value).rpartition("grant them: ")[2].replace("TO role", "TO guest"))
        assert status.read(guest).transactions is None
        assert status.release(guest) == 0
    finally:
        postgres.run("DROP OWNED BY guest", "DROP ROLE guest")


def test_a_user_without_rights_learns_which_it_needs(mariadb: FreshDatabase) -> None:
    name = mariadb.url.rpartition("/")[2]
    mariadb.run("CREATE OR REPLACE USER guest@'127.0.0.1'", f"GRANT CREATE VIEW ON {name}.* TO guest@'127.0.0.1'")
    guest = mariadb.as_user("guest")
    try:
        with pytest.raises(BadOutbox, match=r"command denied.*use a role that may create"):
            schema.init(guest)
        schema.init(mariadb.url)
        with pytest.raises(BadOutbox, match="GRANT SELECT, INSERT, UPDATE, DELETE ON onward_outbox_meta TO ") as caught:
            status.read(guest)
        for grant in str(caught.value).rpartition("grant them: ")[2].split("; "):
            mariadb.run(grant.replace("TO role", "TO guest@'127.0.0.1'"))
        assert status.read(guest).transactions is None
        assert status.release(guest) == 0
    finally:
        mariadb.run("DROP USER guest@'127.0.0.1'")


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "mysql+aiomysql"])
def test_a_server_that_does_not_answer_is_reported_without_the_password(scheme: str) -> None:
    url = f"{scheme}://shop:secret@127.0.0.1:{free_port()}/shop"
    for attempt in (schema.init, schema.upgrade, status.read):
        with pytest.raises(OutboxUnreachable, match="is it running, is the URL right") as caught:
            attempt(url)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["oracle://shop:secret@host/shop", "shop.db", "sqlite://", "sqlite:///:memory:"])
def test_a_url_without_an_outbox_is_refused(url: str) -> None:
    with pytest.raises(BadSetting, match="the outbox's database") as caught:
        schema.init(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_refuses_writes_is_reported(postgres: FreshDatabase) -> None:
    name = postgres.url.rpartition("/")[2]
    postgres.run(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(BadOutbox, match=r"read-only transaction; is it a replica\?"):
        schema.init(postgres.url)


def test_a_file_that_is_no_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "shop.db").write_text("something else, longer than the header of a database" * 10)
    with pytest.raises(BadOutbox, match="file is not a database"):
        schema.init(f"sqlite:///{tmp_path}/shop.db")
