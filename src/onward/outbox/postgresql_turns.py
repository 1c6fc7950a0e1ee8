"""A turn of a relay in the tables of an append-only outbox on PostgreSQL. It runs inside one transaction."""

import time
from collections.abc import Callable
from typing import Any

from onward.outbox.base import LeasePlan, OutboxIdentity, RelayState, RelaysView, ShardState, Turn
from onward.outbox.postgresql import PgConnection
from onward.outbox.postgresql_rebaseline import DatabaseState, name_outbox
from onward.outbox.schema import check

_LOCK = "SELECT FROM {t}_meta WHERE name = 'outbox_id' FOR UPDATE"
_META = "SELECT name, value FROM {t}_meta"
_BEAT = "UPDATE {t}_relay SET beat = beat + 1, lease_s = %s WHERE name = %s"
_LIST = "INSERT INTO {t}_relay (name, beat, lease_s) VALUES (%s, %s, %s)"
_RELAYS = "SELECT name, beat, lease_s FROM {t}_relay ORDER BY name"
_SHARDS = "SELECT shard, owner, fence FROM {t}_shard ORDER BY shard"
_REMOVE = "DELETE FROM {t}_relay WHERE name = ANY(%s)"
_FREE = "UPDATE {t}_shard SET owner = NULL WHERE owner = ANY(%s)"
_RELEASE = "UPDATE {t}_shard SET owner = NULL WHERE owner = %s AND shard = ANY(%s::smallint[])"
_CLAIM = "UPDATE {t}_shard SET owner = %s, fence = fence + 1 WHERE shard = ANY(%s::smallint[])"
_HELD = "SELECT shard, fence FROM {t}_shard WHERE owner = %s"


class RelayTurn:
    """One turn of the relay `name`. Its methods are called in this order: lock, then take."""

    def __init__(self, connection: PgConnection, table: str, name: str, lease_s: float) -> None:
        self._connection = connection
        self._table = table
        self._name = name
        self._lease_s = lease_s

    def lock(self, query: str) -> DatabaseState:
        """Wait until no other relay takes a turn. Returns the state as it is then."""
        self._run(_LOCK)
        return DatabaseState(*self._rows(query)[0])

    def take(self, state: DatabaseState, decide: Callable[[RelaysView], LeasePlan], *, rebaselined: bool) -> Turn:
        if not state.stored:
            name_outbox(self._connection, self._table, state)
        identity = self._identity(rebaselined)
        self._renew()
        self._apply(decide(self._view()))
        return Turn(identity, dict(self._rows(_HELD, self._name)))

    def _identity(self, rebaselined: bool) -> OutboxIdentity:
        meta = dict(self._rows(_META))
        version = int(meta["version"])
        check(version, int(meta["works_from"]))
        return OutboxIdentity(meta["outbox_id"], int(meta["shards"]), version, rebaselined)

    def _renew(self) -> None:
        if self._run(_BEAT, self._lease_s, self._name):
            return
        # The others must see another beat than the one before we were struck.
        self._run(_LIST, self._name, time.time_ns() // 1000, self._lease_s)
        self._run(_FREE, [self._name])

    def _view(self) -> RelaysView:
        return RelaysView(
            [RelayState(*row) for row in self._rows(_RELAYS)], [ShardState(*row) for row in self._rows(_SHARDS)]
        )

    def _apply(self, plan: LeasePlan) -> None:
        gone = [name for name in plan.strike if name != self._name] + [self._name] * plan.leave
        if gone:
            self._run(_REMOVE, gone)
            self._run(_FREE, gone)
        if plan.release:
            self._run(_RELEASE, self._name, list(plan.release))
        if plan.claim and not plan.leave:
            self._run(_CLAIM, self._name, list(plan.claim))

    def _run(self, statement: str, *values: object) -> int:
        return self._connection.execute(statement.replace("{t}", self._table), values or None).rowcount

    def _rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement.replace("{t}", self._table), values or None).fetchall()
