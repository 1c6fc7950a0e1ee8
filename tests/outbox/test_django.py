"""The outbox in Django: a small project whose own tests run on each database, and the example."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from tests.examples import said_by
from tests.outbox.conftest import everywhere
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer

SETTINGS = """
import json, os
import pymysql

pymysql.version_info = (2, 2, 1, "final", 0)  # Django checks the version of mysqlclient, for which PyMySQL stands in
pymysql.install_as_MySQLdb()
DATABASES = json.loads(os.environ["SHOP_DATABASES"])
INSTALLED_APPS = ["shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
"""
MIGRATION = """
from django.db import migrations, models
from onward.django import CreateOutbox


class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel("Order", [("id", models.IntegerField(primary_key=True))]),
        CreateOutbox("shop_outbox"),
    ]
"""
MODELS = """
from django.db import models, transaction
from onward import Onward
from onward.django import DjangoOutbox

app = Onward("sqlite:///events.db")
outbox = DjangoOutbox(app, table="shop_outbox")


class Order(models.Model):
    id = models.IntegerField(primary_key=True)


def place(number, **options):
    with transaction.atomic():
        Order.objects.create(id=number)
        return outbox.add("orders", {"id": number}, **{"key": "ann", "headers": {"a": "ü"}, **options})
"""
TESTS = """
import json
from django.db import connection, connections, transaction
from django.test import TestCase, TransactionTestCase
from onward.errors import BadOutbox, BadSetting, TooLarge
from onward.django import DjangoOutbox
from onward.outbox.rows import COLUMNS, row_of
from onward.outbox.stores import open_store
from shop.models import Order, app, outbox, place


def stored():
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT id, shard, {', '.join(COLUMNS)} FROM shop_outbox ORDER BY id")
        found = [(*row[:-1], None if row[-1] is None else bytes(row[-1])) for row in cursor.fetchall()]
    return [row_of(*row).event for row in found]


class Rings:
    def __init__(self):
        self.rings = 0
        self.end = app.outboxes[0].on_ring(self.ring)

    def ring(self):
        self.rings += 1


class InTestCase(TestCase):
    def test_an_order_and_its_event_are_there(self):
        self.assertEqual(stored(), [])
        event = place(1)
        self.assertEqual(stored(), [event])
        self.assertEqual(event.value, b'{"id":1}')

    def test_the_events_of_other_tests_were_rolled_back(self):
        self.assertEqual(stored(), [])
        odd = place(1, headers={"%s ?": "'"}, type="%s"), place(2, key=None), place(3, lock=True)
        self.assertEqual(tuple(stored()), odd)

    def test_a_block_that_fails_drops_its_events(self):
        with self.assertRaises(ValueError), transaction.atomic():
            place(1)
            raise ValueError
        kept = place(2)
        self.assertEqual(stored(), [kept])
        self.assertEqual(Order.objects.count(), 1)

    def test_the_relay_is_woken_when_the_test_runs_the_callbacks(self):
        rings = Rings()
        with self.captureOnCommitCallbacks(execute=True):
            place(1)
            self.assertEqual(rings.rings, 0)
        self.assertEqual(rings.rings, 1)
        rings.end()

    def test_a_bad_event_is_refused_before_anything_is_written(self):
        with self.assertRaises(TooLarge):
            outbox.add("orders", "a" * 2_000_000)
        self.assertEqual(stored(), [])

    def test_a_missing_table_is_reported(self):
        other = DjangoOutbox(app, table="no_such_outbox")
        with self.assertRaisesRegex(BadOutbox, "no_such_outbox does not exist.*onward outbox init"):
            with transaction.atomic():
                other.add("orders", "a")
        app.outboxes.pop()


class InTransactionTestCase(TransactionTestCase):
    def setUp(self):
        outbox.clear()

    def test_outside_of_a_transaction_an_event_is_refused(self):
        with self.assertRaisesRegex(BadSetting, "transaction.atomic"):
            outbox.add("orders", "a")
        self.assertEqual(stored(), [])

    def test_a_commit_wakes_the_relay_and_a_rollback_does_not(self):
        rings = Rings()
        with self.assertRaises(ValueError), transaction.atomic():
            place(1)
            raise ValueError
        self.assertEqual(rings.rings, 0)
        with transaction.atomic():
            event = place(2)
            self.assertEqual(rings.rings, 0)
        self.assertEqual(rings.rings, 1)
        self.assertEqual(stored(), [event])
        rings.end()

    def test_a_relay_finds_the_events_by_the_settings(self):
        if outbox.url is None:
            self.assertTrue(connection.is_in_memory_db())
            return
        self.assertIn("test_", outbox.url)
        event = place(1)
        store = open_store(outbox.url, outbox.table)
        store.open()
        from onward.outbox.base import LeasePlan
        turn = store.turn("test", 10.0, lambda view: LeasePlan(claim=[each.number for each in view.shards]))
        rows = store.read(turn.held, limit=10, max_bytes=1000).rows
        store.close()
        self.assertEqual([row.event for row in rows], [event])
"""
PROJECT = {
    "settings.py": SETTINGS,
    "shop/__init__.py": "",
    "shop/models.py": MODELS,
    "shop/migrations/__init__.py": "",
    "shop/migrations/0001_initial.py": MIGRATION,
    "shop/tests.py": TESTS,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def database(name: str, request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """A value of DATABASES."""
    if name.startswith("sqlite"):
        file = {"NAME": str(folder / "test_shop.db")} if name == "sqlite" else {}
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "shop.db"), "TEST": file}
    if name == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("postgres_server")
        url, engine = make_url(postgres.url), "postgresql"
    else:
        mariadb: MariaDBServer = request.getfixturevalue("mariadb_server")
        url, engine = make_url(mariadb.url), "mysql"
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": url.database,
        "USER": url.username,
        "PASSWORD": url.password or "",
        "HOST": url.host,
        "PORT": url.port,
        "OPTIONS": {"ssl_disabled": True} if engine == "mysql" else {},
    }


def django(folder: Path, databases: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the project."""
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    environment = {"DJANGO_SETTINGS_MODULE": "settings", "SHOP_DATABASES": json.dumps(databases), "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("name", [*everywhere(["postgresql", "mariadb"]), "sqlite", "sqlite-in-memory"])
def test_the_tests_of_a_project_pass(name: str, project: Path, request: pytest.FixtureRequest) -> None:
    databases = {"default": database(name, request, project)}
    done = django(project, databases, "-W", "error", "-m", "django", "test", "--noinput")
    assert done.returncode == 0, done.stderr[-5_000:]
    assert "Ran 9 tests" in done.stderr


def test_a_migration_prints_its_sql(project: Path, request: pytest.FixtureRequest) -> None:
    databases = {"default": database("sqlite", request, project)}
    done = django(project, databases, "-m", "django", "sqlmigrate", "shop", "0001")
    assert "Create the outbox shop_outbox" in done.stdout, done.stderr
    assert "CREATE TABLE shop_outbox_parked (" in done.stdout
    back = django(project, databases, "-m", "django", "migrate", "--no-input")
    assert back.returncode == 0, back.stderr
    back = django(project, databases, "-m", "django", "migrate", "shop", "zero", "--no-input")
    assert "IrreversibleError" in back.stderr


POSTGRESQL = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}
URLS: list[tuple[dict[str, Any], str]] = [
    (POSTGRESQL, "postgresql:///shop"),
    (
        {**POSTGRESQL, "USER": "ann", "PASSWORD": "p@ss:/word", "HOST": "db.example", "PORT": 5433},
        "postgresql://ann:p%40ss%3A%2Fword@db.example:5433/shop",
    ),
    (
        {**POSTGRESQL, "HOST": "/var/run/pg", "OPTIONS": {"sslmode": "require", "isolation_level": 3}},
        "postgresql:///shop?sslmode=require&host=%2Fvar%2Frun%2Fpg",
    ),
    (
        {"ENGINE": "django.db.backends.mysql", "NAME": "a b", "USER": "ann", "HOST": "db", "PORT": "3307"},
        "mariadb://ann@db:3307/a%20b",
    ),
    (
        {"ENGINE": "django.db.backends.mysql", "NAME": "shop", "HOST": "/run/mysqld.sock"},
        "mariadb:///shop?unix_socket=%2Frun%2Fmysqld.sock",
    ),
    ({"ENGINE": "django.db.backends.sqlite3", "NAME": "/srv/shop.db"}, "sqlite:////srv/shop.db"),
]


def test_the_relay_gets_the_database_of_the_settings(project: Path) -> None:
    databases = {f"db{number}": settings for number, (settings, _) in enumerate(URLS)}
    program = "from onward.django import url_of; import settings, json; print(json.dumps(list(map(url_of, names))))"
    names = f"names = {list(databases)}; "
    done = django(project, {"default": {}, **databases}, "-c", names + program)
    assert json.loads(done.stdout) == [url for _, url in URLS], done.stderr


def test_the_example_bills_each_order_once(tmp_path: Path) -> None:
    said = said_by("outbox_django.py", tmp_path, lambda out: out.count("pays") >= 3)
    assert sorted(said.splitlines()) == ["ann pays", "bob pays", "cleo pays"]
