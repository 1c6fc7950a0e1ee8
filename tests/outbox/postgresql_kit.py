"""What the tests of the log store on PostgreSQL share."""

import itertools
from typing import Any

import psycopg
import pytest

from onward.outbox import postgresql
from tests.outbox.store_kit import OutboxKit, event


def sql(kit: OutboxKit, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement with {t} for the table, in a transaction of its own."""
    with psycopg.connect(kit.url, autocommit=True) as connection:
        cursor = connection.execute(statement.replace("{t}", kit.table), values or None)
        return cursor.fetchall() if cursor.description else []


def commit_before_each_statement(kit: OutboxKit, key: str, patch: pytest.MonkeyPatch) -> None:
    """A writer commits a row whenever a relay is about to run a statement."""
    plain, numbers = postgresql.PgConnection.execute, itertools.count()

    def execute(self: postgresql.PgConnection, *args: Any, **kwargs: Any) -> Any:
        kit.commit(event(key, next(numbers)))
        return plain(self, *args, **kwargs)

    patch.setattr(postgresql.PgConnection, "execute", execute)
