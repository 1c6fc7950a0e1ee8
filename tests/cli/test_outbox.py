"""`onward outbox`, on every database."""

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onward.cli import app, policy
from onward.outbox import schema, status
from onward.outbox.stores import open_store
from tests.cli.shell import Shell, until
from tests.outbox.fresh import DIALECTS, FreshDatabase, fresh_database
from tests.outbox.store_kit import claim_all, keep
from tests.servers.needs import POSTGRES
from tests.servers.postgres import PostgresServer
from tests.servers.server import free_port

EVENT = "INSERT INTO onward_outbox (event_id, topic, event_key, event_time) VALUES ('{}', 'orders', {}, {})"
PARKED = "INSERT INTO onward_outbox_parked VALUES ({}, 0, 'e-{}', '{}', {}, '', {}, NULL, NULL, {}, 'too large', 1e9)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, without settings from the environment. The modules that a test imports stay: SQLAlchemy
    cannot be imported twice."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("ONWARD_"):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture(params=DIALECTS)
def database(request: pytest.FixtureRequest, folder: Path) -> Iterator[FreshDatabase]:
    with fresh_database(request.param, request, folder) as database:
        yield database


@pytest.fixture
def postgres(request: pytest.FixtureRequest, postgres_server: object, folder: Path) -> Iterator[FreshDatabase]:
    with fresh_database("postgresql", request, folder) as database:
        yield database


def outbox(*arguments: str, code: int = policy.OK) -> Any:
    done = CliRunner().invoke(app, ["outbox", *arguments], prog_name="onward")
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


def refused(*arguments: str, code: int) -> str:
    """The error in one line."""
    done = outbox(*arguments, code=code)
    assert done.stdout == ""
    return str(done.stderr).splitlines()[-1]


def report(database: FreshDatabase, *arguments: str, code: int = policy.OK) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outbox("status", database.url, "--json", *arguments, code=code).stdout)
    return found


def errors(found: dict[str, Any]) -> list[str]:
    return [each["what"] for each in found["findings"] if each["level"] == "error"]


@contextmanager
def beating(database: FreshDatabase, name: str = "relay-1") -> Iterator[None]:
    """A relay that owns every shard and renews its lease, but publishes nothing."""
    stopping = threading.Event()
    store = open_store(database.url, "onward_outbox")
    store.open()
    store.turn(name, 10.0, claim_all)

    def beat() -> None:
        while not stopping.wait(0.05):
            store.turn(name, 10.0, keep)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        store.close()


# -- init and upgrade ---------------------------------------------------------------------------------------------


def test_init_reports_what_it_created(database: FreshDatabase) -> None:
    first = outbox("init", database.url).stdout.splitlines()
    assert [line.partition(":")[0] for line in first] == ["created version 1", "created version 2"]
    assert outbox("init", database.url).stdout == "the outbox onward_outbox is complete; nothing was changed\n"
    assert outbox("upgrade", database.url).stdout == "the outbox onward_outbox is complete; nothing was changed\n"
    outbox("init", database.url, "--table", "events_outbox", "--shards", "1", "--mode", "queue")
    assert database.meta("events_outbox")["mode"] == "queue"


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "mysql", "mariadb+mariadbconnector", "sqlite"])
def test_print_connects_to_nothing_and_shows_no_password(folder: Path, scheme: str) -> None:
    place = "/none.db" if scheme == "sqlite" else f"shop:secret@127.0.0.1:{free_port()}/shop"
    text = outbox("init", f"{scheme}://{place}", "--print", "--table", "my_outbox").stdout
    assert text.startswith("-- Onward's outbox my_outbox. Run it with: ")
    assert "CREATE TABLE" in text
    assert "my_outbox_parked" in text
    assert "secret" not in text
    assert not (folder / "none.db").exists()


def test_upgrade_creates_or_prints_what_is_missing(database: FreshDatabase) -> None:
    later = schema.statements(database.dialect, since=1)
    database.run(*schema.statements(database.dialect)[: -len(later)])
    printed = outbox("upgrade", database.url, "--print").stdout
    assert printed.endswith(schema.script(database.dialect, since=1).rstrip() + "\n")
    assert database.meta()["version"] == "1"
    assert outbox("status", database.url, code=policy.NO).stdout.count("run `onward outbox upgrade URL`") == 1
    assert outbox("upgrade", database.url).stdout.startswith("created version 2")
    assert database.meta()["version"] == "2"
    assert outbox("upgrade", database.url, "--print").stdout.count("\n") == 1


# -- which outbox -------------------------------------------------------------------------------------------------

SHOP = """
from onward import Onward
from onward.outbox import Outbox

app = Onward("sqlite:///broker.db")
first = Outbox(app, "sqlite:///shop.db", table="first_outbox")
again = Outbox(app, "sqlite:///shop.db", table="first_outbox")
both = Onward("sqlite:///broker.db")
Outbox(both, "sqlite:///shop.db", table="first_outbox")
Outbox(both, "sqlite:///shop.db", table="second_outbox")
none = Onward("sqlite:///broker.db")
"""


def test_the_url_comes_from_the_application_or_the_settings(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "shop.py").write_text(SHOP)
    done = outbox("init", "--app", "shop:app")
    assert "using sqlite:///shop.db (application shop:app)" in done.stderr
    outbox("status", "sqlite:///shop.db", "--table", "first_outbox")
    outbox("init", "--app", "shop:both", "--table", "second_outbox")
    outbox("status", "sqlite:///shop.db", "--table", "second_outbox")
    assert "no outbox given: write its database's URL" in refused("status", code=policy.USAGE)
    (here / "onward.toml").write_text('app = "shop:app"\n')
    outbox("status")
    monkeypatch.setenv("ONWARD_OUTBOX_URL", "sqlite:///env.db")
    done = outbox("init")
    assert "using sqlite:///env.db (the setting outbox_url)" in done.stderr
    assert (here / "env.db").exists()
    (here / "other_shop.py").write_text(SHOP)
    outbox("status", "--app", "other_shop:none")


def test_a_choice_that_is_not_clear_is_refused(here: Path) -> None:
    (here / "shop.py").write_text(SHOP)
    several = refused("status", "--app", "shop:both", code=policy.USAGE)
    assert "first_outbox at sqlite:///shop.db, second_outbox at sqlite:///shop.db" in several
    assert "has no outbox; write" in refused("status", "--app", "shop:none", code=policy.USAGE)
    assert "has no outbox with table x;" in refused("status", "--app", "shop:app", "--table", "x", code=policy.USAGE)
    two = refused("init", "sqlite:///shop.db", "--app", "shop:app", code=policy.USAGE)
    assert "URL and --app cannot be used together" in two


def test_exit_codes_tell_wrong_arguments_from_an_outbox_that_cannot_be_used(folder: Path) -> None:
    closed = f"postgresql://shop:secret@127.0.0.1:{free_port()}/shop"
    for command in ("init", "upgrade", "status", "retry"):
        error = refused(command, closed, code=policy.UNREACHABLE)
        assert "cannot be opened" in error
        assert "secret" not in error
        assert "use at most 41 letters" in refused(command, closed, "--table", "a b", code=policy.USAGE)
        assert "an outbox works on" in refused(command, "oracle://shop:secret@db", code=policy.USAGE)
        if command != "init":
            assert "run `onward outbox init URL`" in refused(command, "sqlite:///none.db", code=policy.UNREACHABLE)
    assert not (folder / "none.db").exists()
    assert "1 shard" in refused("init", "sqlite:///shop.db", "--shards", "2", code=policy.USAGE)


# -- status -------------------------------------------------------------------------------------------------------


def test_an_empty_outbox_needs_nobody(database: FreshDatabase) -> None:
    schema.init(database.url)
    found = report(database)
    assert (found["waiting"], found["oldest_s"], found["parked"], found["relays"]) == (0, None, [], [])
    assert found["findings"] == [{"level": "ok", "what": "nothing needs your attention", "cure": ""}]
    assert len(found["shards"]) == (1 if database.dialect == "sqlite" else 8)
    assert found["outbox_id"] == database.meta()["outbox_id"]
    text = outbox("status", database.url).stdout
    assert re.search(r"schema +version 2, mode (log|queue), shards [18]\n", text)
    assert "onward:onward" not in text


def test_waiting_rows_and_their_age_are_exact(database: FreshDatabase) -> None:
    schema.init(database.url)
    with beating(database):
        for number, age in enumerate([5, 30, 20]):
            database.run(EVENT.format(number, "'c-1'", time.time() - age))
        found = report(database)
        assert found["waiting"] == 3
        assert 30 <= found["oldest_s"] < 60
        assert errors(found) == []
        database.run(EVENT.format("old", "NULL", time.time() - 100))
        (error,) = errors(report(database, code=policy.NO))
        assert re.fullmatch(r"an event has waited for 1\d\d s, more than outbox_max_age_s=60", error)


def test_the_limit_of_the_age_is_a_setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = FreshDatabase("sqlite", "sqlite:///shop.db")
    schema.init(database.url)
    with beating(database):
        database.run(EVENT.format("old", "NULL", time.time() - 100))
        monkeypatch.setenv("ONWARD_OUTBOX_MAX_AGE_S", "3600")
        assert errors(report(database)) == []


def test_published_rows_do_not_wait(postgres: FreshDatabase) -> None:
    """In mode log they stay in the table. An open transaction must not make them count again."""
    schema.init(postgres.url)
    store = open_store(postgres.url, "onward_outbox")
    store.open()
    turn = store.turn("relay-1", 10.0, claim_all)
    with closing(postgres.connect()) as bystander:
        bystander.execute("CREATE TABLE elsewhere ()")
        for number in range(9):
            postgres.run(EVENT.format(number, f"'c-{number}'", time.time()))
        waiting, published = [], [0]
        while (batch := store.read(turn.held, limit=4, max_bytes=1 << 20)).rows:  # a backlog, page by page
            waiting.append(report(postgres, "--look", "0")["waiting"])
            store.advance(batch, turn.held)
            published.append(published[-1] + len(batch.rows))
        store.close()
        assert waiting == [9 - count for count in published[:-1]]
        assert report(postgres, "--look", "0")["waiting"] == 0
        assert len(postgres.rows("SELECT id FROM onward_outbox")) == 9


def test_a_relay_is_alive_while_its_beat_changes(database: FreshDatabase) -> None:
    schema.init(database.url)
    database.run(EVENT.format("e", "NULL", time.time()))
    assert errors(report(database, code=policy.NO)) == ["events wait, and no relay is alive"]
    with beating(database):
        found = report(database)
        assert found["relays"] == [{"name": "relay-1", "lease_s": 10.0, "alive": True}]
        assert {each["owner"] for each in found["shards"]} == {"relay-1"}
        assert all(each["fence"] == 1 for each in found["shards"])
        assert re.search(r"relay-1 +[18] +10 s +yes", outbox("status", database.url).stdout)
        assert report(database, "--look", "0")["relays"][0]["alive"] is None
    found = report(database, "--look", "0.2", code=policy.NO)
    assert found["relays"][0]["alive"] is False
    assert errors(found) == ["events wait, and no relay is alive"]
    assert "no sign of life" in outbox("status", database.url, "--look", "0.2", code=policy.NO).stdout


def test_parked_events_are_listed_by_key_and_refused_ones_first(database: FreshDatabase) -> None:
    schema.init(database.url)
    with beating(database):
        _park(database)
        found = report(database, code=policy.NO)
        assert [(each["topic"], each["key"], each["rows"], each["refused"]) for each in found["parked"]] == [
            ("orders", "b", 2, True),
            ("orders", None, 1, True),
            ("orders", "a", 2, False),
            ("orders", "a ", 1, False),
            ("bills", "b", 1, False),
        ]
        assert found["parked"][0] | {"since": 1e9, "event_id": "e-3", "why": "too large"} == found["parked"][0]
        assert (found["parked_rows"], found["refused_rows"], found["waiting"]) == (7, 2, 0)
        assert found["oldest_s"] is None  # refused events wait for an operator, not for a relay
        assert errors(found) == ["refused events: 2; the later events of their keys wait behind them"]
        lines = outbox("status", database.url, code=policy.NO).stdout.splitlines()
        assert any(re.fullmatch(r"orders +b +2 +refused +20\d\d-\S+ \S+ +e-3: too large *", line) for line in lines)


def _park(database: FreshDatabase) -> None:
    """Seven rows of five lanes."""
    rows = [(1, "orders", "'a'"), (2, "orders", "'a'"), (3, "orders", "'b'"), (4, "orders", "'b'")]
    rows += [(5, "orders", "NULL"), (6, "orders", "'a '"), (7, "bills", "'b'")]
    for number, topic, key in rows:
        database.run(PARKED.format(number, number, topic, key, time.time(), number in (3, 5)))


def test_a_long_transaction_is_named(database: FreshDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    schema.init(database.url)
    monkeypatch.setattr(status, "LONG_S", 0.2)
    with closing(database.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute(EVENT.format("slow", "NULL", 1.0))
        if database.dialect == "sqlite":
            assert report(database)["transactions"] == []
            return
        until(lambda: report(database)["transactions"], "the transaction is 0.2 s old")
        (found,) = report(database)["transactions"]
        pid = connection.info.backend_pid if database.dialect == "postgresql" else connection.thread_id()
        assert found["pid"] == pid
        assert 0.2 < found["age_s"] < 60
        if database.dialect == "postgresql":
            cursor.execute("SET application_name = 'the [red]shop'")
            (found,) = report(database)["transactions"]
            assert (found["who"], found["query_start"][:2]) == ("the [red]shop", "20")
        else:
            assert found["who"].startswith("onward@127.0.0.1")
        text = outbox("status", database.url).stdout
        assert re.search(rf"\n{pid} +\d+ s ", text)
        assert "transactions that are open for more than 0.2 s: 1" in text
        assert ("the [red]shop" in text) == (database.dialect == "postgresql")


def test_the_cache_of_the_sequence_and_dead_rows_are_shown(postgres: FreshDatabase) -> None:
    schema.init(postgres.url)
    upkeep = report(postgres)["upkeep"]
    assert upkeep == {"sequence_cache": 1, "dead_rows": 0, "last_autovacuum": None}
    postgres.run("ALTER TABLE onward_outbox ALTER COLUMN id SET CACHE 20", EVENT.format("e", "NULL", time.time()))
    postgres.run("DELETE FROM onward_outbox")
    until(lambda: report(postgres, code=policy.NO)["upkeep"]["dead_rows"] == 1, "the dead row is counted")
    found = report(postgres, code=policy.NO)
    assert errors(found) == ["the sequence of onward_outbox.id has CACHE 20, which can invert the events of a key"]
    postgres.run(found["findings"][0]["cure"].removeprefix("run: ").partition(";")[0])
    assert errors(report(postgres)) == []
    assert re.search(r"table +1 dead rows, last autovacuum: ", outbox("status", postgres.url).stdout)


def test_control_characters_do_not_reach_the_terminal(folder: Path) -> None:
    database = FreshDatabase("sqlite", "sqlite:///shop.db")
    schema.init(database.url)
    database.run(PARKED.format(1, 1, "orders", "char(27) || '[31mred'", 1.0, 1))
    assert r" \x1b[31mred " in outbox("status", database.url, code=policy.NO).stdout


class StandbyServer(PostgresServer):
    """A replica of another server."""

    def __init__(self, primary: str) -> None:
        super().__init__()
        self.primary = primary

    def prepare(self) -> None:
        command = POSTGRES.path.with_name("pg_basebackup")
        data = str(self.folder / "data")
        self.run(
            str(command), "-D", data, "-d", self.primary, "--write-recovery-conf", "--checkpoint=fast", "--no-sync"
        )


def test_a_replica_is_refused(postgres: FreshDatabase) -> None:
    schema.init(postgres.url)
    standby = StandbyServer(postgres.url)
    try:
        standby.start()
        url = f"{standby.url.rpartition('/')[0]}/{postgres.url.rpartition('/')[2]}"
        assert "use the primary server" in refused("status", url, code=policy.UNREACHABLE)
        assert "is it a replica?" in refused("init", url, "--table", "new_outbox", code=policy.UNREACHABLE)
        assert "is it a replica?" in refused("retry", url, code=policy.UNREACHABLE)
    finally:
        standby.close()


def test_a_read_only_server_is_refused(request: pytest.FixtureRequest, mariadb_server: object, folder: Path) -> None:
    with fresh_database("mariadb", request, folder) as database:
        schema.init(database.url)
        database.run("SET GLOBAL read_only = 1")
        try:
            assert "accepts no writes: use the primary" in refused("status", database.url, code=policy.UNREACHABLE)
        finally:
            database.run("SET GLOBAL read_only = 0")


# -- retry --------------------------------------------------------------------------------------------------------


def test_retry_releases_refused_events(database: FreshDatabase) -> None:
    schema.init(database.url)
    _park(database)
    assert outbox("retry", database.url, "--key", "a", code=policy.NO).stdout == (
        "there are no refused events to release\n"
    )
    outbox("retry", database.url, "--key", "b ", code=policy.NO)
    outbox("retry", database.url, "--topic", "bills", "--key", "b", code=policy.NO)
    assert outbox("retry", database.url, "--key", "b").stdout == "released 1 event; the relay tries again\n"
    assert [each["key"] for each in report(database, code=policy.NO)["parked"] if each["refused"]] == [None]
    assert json.loads(outbox("retry", database.url, "--topic", "orders", "--json").stdout) == {"released": 1}
    assert outbox("retry", database.url).stdout == "there are no refused events to release\n"
    assert report(database, code=policy.NO)["refused_rows"] == 0


def test_the_command_works_in_a_process_of_its_own(shell: Shell) -> None:
    done = shell.run("outbox", "init", "sqlite:///outbox.db")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "created version 1: tables\ncreated version 2\n"
    done = shell.run("outbox", "status", "sqlite:///outbox.db")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("outbox       onward_outbox at sqlite:///outbox.db\n")
    done = shell.run("outbox", "init", "--help")
    assert "Example:" in done.stdout
