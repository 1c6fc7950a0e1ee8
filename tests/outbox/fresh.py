"""Databases that a test has for itself."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pymysql
import pytest

from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer

DIALECTS = [
    pytest.param("postgresql", marks=pytest.mark.servers),
    pytest.param("mariadb", marks=pytest.mark.servers),
    "sqlite",
]


class FreshDatabase:
    """An empty database. Each call runs in a connection and a transaction of its own."""

    def __init__(self, dialect: str, url: str) -> None:
        self.dialect = dialect
        self.url = url

    def connect(self, user: str | None = None) -> Any:
        """A connection that is not in autocommit mode."""
        parts = urlsplit(self.url)
        if self.dialect == "sqlite":
            return sqlite3.connect(self.url.partition(":///")[2])
        if self.dialect == "postgresql":
            return psycopg.connect(self.as_user(user) if user else self.url)
        return pymysql.connect(
            host=parts.hostname or "",
            port=parts.port or 0,
            user=user or parts.username,
            password="" if user else parts.password or "",
            database=parts.path[1:],
        )

    def as_user(self, user: str) -> str:
        """The URL for another user, who has no password."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{user}@{parts.hostname}:{parts.port}{parts.path}"

    def run(self, *statements: str) -> None:
        with closing(self.connect()) as connection:
            for statement in statements:
                connection.cursor().execute(statement)
            connection.commit()

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return [tuple(row) for row in cursor.fetchall()]

    def meta(self, table: str = "onward_outbox") -> dict[str, str]:
        return dict(self.rows(f"SELECT name, value FROM {table}_meta"))


@contextmanager
def fresh_database(dialect: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[FreshDatabase]:
    if dialect == "sqlite":
        yield FreshDatabase(dialect, f"sqlite:///{folder}/shop.db")
        return
    name = f"fresh_{uuid4().hex[:12]}"
    with closing(_admin(dialect, request)) as admin:
        admin.cursor().execute(f"CREATE DATABASE {name}")
        try:
            server = request.getfixturevalue(_FIXTURES[dialect])
            yield FreshDatabase(dialect, f"{server.url.rpartition('/')[0]}/{name}")
        finally:
            admin.cursor().execute(f"DROP DATABASE {name}" + (" (FORCE)" if dialect == "postgresql" else ""))


_FIXTURES = {"postgresql": "postgres_server", "mariadb": "mariadb_server"}


def _admin(dialect: str, request: pytest.FixtureRequest) -> Any:
    if dialect == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("postgres_server")
        return psycopg.connect(postgres.url, autocommit=True)
    mariadb: MariaDBServer = request.getfixturevalue("mariadb_server")
    return pymysql.connect(host=mariadb.host, port=mariadb.port, user="onward", password="onward", autocommit=True)
