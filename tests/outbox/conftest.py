"""Every database and driver with which the outbox is written, each with new tables."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.outbox.shop import Shop
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer

DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgresql-async": "postgresql+psycopg_async",
    "asyncpg": "postgresql+asyncpg",
    "mariadb": "mysql+pymysql",
    "mariadb-async": "mysql+asyncmy",
    "sqlite": "sqlite+pysqlite",
    "sqlite-async": "sqlite+aiosqlite",
}
SERVERS = [name for name in DRIVERS if not name.startswith("sqlite")]
FILES = [name for name in DRIVERS if name.startswith("sqlite")]


def url_of(name: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if name in FILES:
        return f"{DRIVERS[name]}:///{folder}/shop.db"
    if name.startswith("mariadb"):
        mariadb: MariaDBServer = request.getfixturevalue("mariadb_server")
        return mariadb.url.replace("mysql:", f"{DRIVERS[name]}:")
    postgres: PostgresServer = request.getfixturevalue("postgres_server")
    return postgres.url.replace("postgresql:", f"{DRIVERS[name]}:")


def everywhere(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.servers] if name in SERVERS else []) for name in names]


def opened(name: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Shop]:
    shop = Shop(url_of(name, request, folder), folder)
    yield shop
    shop.close()


@pytest.fixture(params=everywhere(SERVERS + FILES))
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """A shop on each database, with each driver."""
    yield from opened(request.param, request, tmp_path)


@pytest.fixture(params=everywhere(["postgresql", "mariadb", "sqlite"]))
def plain_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """A shop on each database, with a sync driver."""
    yield from opened(request.param, request, tmp_path)


@pytest.fixture(params=everywhere(["postgresql-async", "asyncpg", "mariadb-async", "sqlite-async"]))
def async_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """A shop on each database, with an async driver."""
    yield from opened(request.param, request, tmp_path)


@pytest.fixture(params=everywhere(["postgresql", "asyncpg", "mariadb", "mariadb-async"]))
def server_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    yield from opened(request.param, request, tmp_path)


@pytest.fixture
def postgres_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    yield from opened("postgresql", request, tmp_path)


@pytest.fixture
def mariadb_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    yield from opened("mariadb", request, tmp_path)


@pytest.fixture(params=FILES)
def file_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """A shop on SQLite."""
    yield from opened(request.param, request, tmp_path)


@pytest.fixture
def sqlite_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    yield from opened("sqlite", request, tmp_path)
