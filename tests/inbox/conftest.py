"""Every database that SqlInbox supports, sync and async, each with new tables."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from tests.inbox.place import Place, ground
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer

Open = Callable[..., AbstractAsyncContextManager[Place]]
SERVERS = ["postgresql", "postgresql-async", "mariadb", "mariadb-async"]
FILES = ["sqlite", "sqlite-async"]


def url_of(name: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if name.startswith("sqlite"):
        return f"{'sqlite+aiosqlite' if 'async' in name else 'sqlite'}:///{folder}/effects.db"
    if name.startswith("postgresql"):
        postgres: PostgresServer = request.getfixturevalue("postgres_server")
        return postgres.url.replace("postgresql:", "postgresql+psycopg:")
    mariadb: MariaDBServer = request.getfixturevalue("mariadb_server")
    return mariadb.url.replace("mysql:", "mysql+asyncmy:" if "async" in name else "mysql+pymysql:")


def opener(name: str, url: str) -> Open:
    @asynccontextmanager
    async def opened(**options: Any) -> AsyncIterator[Place]:
        if name.startswith("sqlite"):
            options.setdefault("connect_args", {"timeout": 60})
        else:
            options.setdefault("pool_size", 20)
        place = Place((create_async_engine if "async" in name else create_engine)(url, **options))
        try:
            await place.prepare()
            await place.inbox.start(ground())
            yield place
        finally:
            await place.close()

    return opened


def everywhere(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.servers] if name in SERVERS else []) for name in names]


@pytest.fixture(params=everywhere(SERVERS + FILES))
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(request.param, url_of(request.param, request, tmp_path))


@pytest.fixture(params=everywhere(SERVERS))
def server_database(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(request.param, url_of(request.param, request, tmp_path))


@pytest.fixture(params=everywhere([name for name in SERVERS + FILES if "async" in name]))
def async_database(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return opener(request.param, url_of(request.param, request, tmp_path))


@pytest.fixture
def sqlite_database(tmp_path: Path) -> Open:
    return opener("sqlite-async", f"sqlite+aiosqlite:///{tmp_path}/effects.db")
