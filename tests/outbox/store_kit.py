"""A database with the tables of an outbox, and writers whose transactions a test opens and ends by hand."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
import pytest
from sqlalchemy.engine import make_url

from onward.event import Event, new_id
from onward.outbox import schema
from onward.outbox.base import LeasePlan, OutboxBatch, OutboxRow, OutboxStore, RelaysView
from onward.outbox.rows import COLUMNS, values_of
from onward.outbox.stores import open_store

DATABASES = ["postgresql-log", "postgresql-queue", "mariadb", "sqlite"]
TOPIC = "orders"


def event(key: str | None, n: int, *, size: int = 0, topic: str = TOPIC) -> Event:
    """An event whose value names its key and its number."""
    return Event(new_id(), topic, key, f"{key}:{n}".encode().ljust(size), {"n": str(n)}, "placed", 1_700_000_000.0 + n)


class OutboxKit:
    """The tables of one test."""

    def __init__(self, url: str, mode: str | None) -> None:
        self.url = url
        self.table = f"outbox_{uuid4().hex[:12]}"
        self.single = make_url(url).get_backend_name() == "sqlite"  # one writer at a time, one shard
        schema.init(url, table=self.table, mode=mode)
        self._open: list[Any] = []

    def store(self) -> OutboxStore:
        """A new store, opened."""
        store = open_store(self.url, self.table)
        store.open()
        self._open.append(store)
        return store

    def connect(self) -> Any:
        """A connection of a writer, which is not in autocommit."""
        url = make_url(self.url)
        if self.single:
            connection: Any = sqlite3.connect(str(url.database), timeout=20)
        elif url.get_backend_name() == "postgresql":
            connection = psycopg.connect(self.url)
        else:
            connection = pymysql.connect(
                host=url.host or "",
                port=url.port or 0,
                user=url.username,
                password=url.password or "",
                database=url.database,
            )
        self._open.append(connection)
        return connection

    def write(self, connection: Any, *events: Event) -> None:
        """Insert the events, without a commit."""
        mark = "?" if self.single else "%s"
        statement = f"INSERT INTO {self.table} ({', '.join(COLUMNS)}) VALUES ({', '.join([mark] * len(COLUMNS))})"
        cursor = connection.cursor()
        for each in events:
            cursor.execute(statement, values_of(each))
        cursor.close()

    def commit(self, *events: Event) -> None:
        """Insert the events in a transaction of their own."""
        with self.transaction() as connection:
            self.write(connection, *events)

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A connection of a writer. Its transaction commits at the end of the body."""
        connection = self.connect()
        yield connection
        connection.commit()
        connection.close()

    def close(self) -> None:
        for each in self._open:
            with suppress(pymysql.Error):  # it is closed already
                each.close()


class StoreRelay:
    """A relay that a test drives step by step: it claims every shard and publishes into a list."""

    def __init__(
        self, kit: OutboxKit, name: str = "a", decide: Callable[[RelaysView], LeasePlan] | None = None
    ) -> None:
        self.store = kit.store()
        self.name = name
        self.published: list[Event] = []
        self.turn(decide or claim_all)

    def turn(self, decide: Callable[[RelaysView], LeasePlan]) -> None:
        turn = self.store.turn(self.name, 10.0, decide)
        self.held, self.identity = dict(turn.held), turn.identity

    def read(self, limit: int = 100, max_bytes: int = 1 << 20) -> OutboxBatch:
        return self.store.read(self.held, limit=limit, max_bytes=max_bytes)

    def step(self, limit: int = 100, max_bytes: int = 1 << 20) -> OutboxBatch:
        """Read, publish, advance."""
        batch = self.read(limit, max_bytes)
        self.published += [row.event for row in batch.rows]
        assert not self.store.advance(batch, self.held)
        return batch

    def drain(self, limit: int = 100, max_bytes: int = 1 << 20) -> list[Event]:
        """All that there is to publish now, in order."""
        before = len(self.published)
        while self.step(limit, max_bytes).rows:
            pass
        return self.published[before:]


def claim_all(view: RelaysView) -> LeasePlan:
    return LeasePlan(claim=[shard.number for shard in view.shards])


def keep(view: RelaysView) -> LeasePlan:
    return LeasePlan()


def by_key(rows: Sequence[OutboxRow] | Sequence[Event], key: str) -> list[str]:
    """The values of a key, in order."""
    events = [each.event if isinstance(each, OutboxRow) else each for each in rows]
    return [(each.value or b"").decode().strip() for each in events if each.key == key]


def url_of(database: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if database == "sqlite":
        return f"sqlite:///{folder}/shop.db"
    server = request.getfixturevalue("mariadb_server" if database == "mariadb" else "postgres_server")
    return str(server.url)


def mode_of(database: str) -> str | None:
    return database.partition("-")[2] or None
