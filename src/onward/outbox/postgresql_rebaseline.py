"""Notices that the tables of an append-only outbox were restored, copied or reset, and makes them right again.

The cursors name transactions by their numbers, which mean nothing in another database. A restored row could count as
published because its number is low, or be passed over for ever because its number is in the future.
"""

import logging
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg

from onward.errors import OutboxUnreachable
from onward.outbox.postgresql import PgConnection, begin, transaction

log = logging.getLogger("onward")

_TRIES = 10  # while others write to the same rows
_IDLE_S = 60.0
_LONG_S = 3600.0  # for a statement that writes to all rows
PUBLISHED = """(
    pg_visible_in_snapshot(r.xid, s.seen) OR coalesce(r.id <= s.last AND pg_visible_in_snapshot(r.xid, s.until), false)
)"""
"""A condition: row `r` of shard `s` is published."""

_HERE = """concat_ws(
    '/', {system}, (SELECT oid FROM pg_database WHERE datname = current_database()), '{t}'::regclass::oid::bigint
)"""
_SYSTEM = "(SELECT system_identifier FROM pg_control_system())"
LAST_ID = "coalesce(pg_sequence_last_value(pg_get_serial_sequence('{t}', 'id')::regclass), 0)"
"""The last id that was given to a row, as an expression in SQL."""

_STATE = """
SELECT
    {here} AS here,
    (SELECT value FROM {t}_meta WHERE name = 'identity') AS stored,
    pg_is_in_recovery() AS replica,
    coalesce((SELECT xid FROM {t} ORDER BY xid DESC LIMIT 1) >= pg_snapshot_xmax(pg_current_snapshot()), false)
        OR EXISTS (
            SELECT FROM {t}_shard
            WHERE pg_snapshot_xmax(coalesce(until, seen)) > pg_snapshot_xmax(pg_current_snapshot())
        ) AS ahead,
    {last_id} < (SELECT max(high) FROM {t}_shard) AS behind,
    pg_current_snapshot()::text AS snapshot
"""
# A dump is restored table by table. The primary key of a table is created after its rows.
_COMPLETE = """
SELECT count(*) = 5 AND (SELECT count(*)::text FROM {t}_shard) = (SELECT value FROM {t}_meta WHERE name = 'shards')
FROM pg_index WHERE indisprimary AND indisvalid AND indrelid IN (
    '{t}'::regclass, '{t}_meta'::regclass, '{t}_relay'::regclass, '{t}_shard'::regclass, '{t}_parked'::regclass
)
"""
_LOCK = "SELECT FROM {t}_meta WHERE name = 'outbox_id' FOR UPDATE"
_RENUMBER = f"""
UPDATE {{t}} AS r SET xid = CASE WHEN %s AND r.id <= s.high AND {PUBLISHED} THEN '3' ELSE pg_current_xact_id() END
FROM {{t}}_shard AS s WHERE s.shard = r.shard AND r.xid <> '3'
"""
_RESET = """
UPDATE {t}_shard SET seen = %s::pg_snapshot, until = NULL, last = 0, top = 0, high = 0, owner = NULL
"""
# The ids of new rows may be as low as those of parked rows, which come before them.
_LOWER_PARKED = """
UPDATE {t}_parked SET id = id - (SELECT greatest(max(id), 0) + max(id) - min(id) + 1 FROM {t}_parked)
"""
_NAME = """
UPDATE {t}_meta SET value = CASE name WHEN 'identity' THEN %s ELSE %s END WHERE name IN ('identity', 'outbox_id')
"""


class DatabaseState(NamedTuple):
    """`here` names this database and table, `stored` is what was stored about it: "" if no relay has used it yet, None
    while it is being restored. `ahead`: some rows or cursors name transactions of the future. `behind`: the next ids
    were used already."""

    here: str
    stored: str | None
    replica: bool
    ahead: bool
    behind: bool
    snapshot: str

    @property
    def sound(self) -> bool:
        """The cursors mean what they say."""
        return self.stored in ("", self.here) and not self.ahead and not self.behind

    @property
    def foreign(self) -> bool:
        """The cursors belong to another database."""
        return self.stored != self.here or self.ahead


def here(connection: PgConnection, table: str) -> str:
    """The expression in SQL that names this database and table. Most users may ask for the identifier of the server."""
    (allowed,) = connection.execute(
        "SELECT has_function_privilege(oid, 'EXECUTE') FROM pg_proc WHERE oid = to_regproc('pg_control_system')"
    ).fetchone() or (False,)
    return _HERE.replace("{t}", table).replace("{system}", _SYSTEM if allowed else "'-'")


def state_query(table: str, here: str) -> str:
    """The statement that returns a DatabaseState."""
    return _STATE.replace("{last_id}", LAST_ID).replace("{t}", table).replace("{here}", here)


def name_outbox(connection: PgConnection, table: str, state: DatabaseState) -> None:
    """Store where this outbox is, with a new id for it, so that no copy has the same."""
    connection.execute(_NAME.replace("{t}", table), (state.here, uuid4().hex))


def rebaseline(connection: PgConnection, table: str, query: str, *, lock_s: float) -> None:
    """Give every row a transaction number of this database: rows that were published get one that is visible in all
    snapshots, the others the number of this transaction. Free all shards, and give the outbox a new id.

    Writers may write meanwhile. This transaction has one snapshot, which it takes before it has a number of its own. It
    changes the rows that are visible in the snapshot, and stores the snapshot as `seen`. So `seen` hides the rows that
    are to be published, and those of all writers that had not committed."""
    for left in reversed(range(_TRIES)):
        try:
            text = begin(isolation="REPEATABLE READ", lock_s=lock_s, idle_s=_IDLE_S)
            with connection.patience(_LONG_S), transaction(connection, text):
                return _rebaseline(connection, table, query)
        except psycopg.errors.SerializationFailure:
            if not left:
                raise


def _rebaseline(connection: PgConnection, table: str, query: str) -> None:
    connection.execute(_LOCK.replace("{t}", table))
    state = DatabaseState(*_one(connection, query))
    if state.sound:
        return  # another relay has done it
    if _one(connection, _COMPLETE.replace("{t}", table)) != (True,):
        raise OutboxUnreachable(f"the tables of the outbox {table} are not complete: a restore is going on, or failed")
    log.warning(
        "the outbox %s was restored, copied or reset (it is %s, and was %s); the relay compares its rows",
        *(table, state.here, state.stored or "new"),
    )
    trusted = not (state.foreign and state.behind)  # otherwise a low id does not tell whether a row is an old one
    connection.execute(_RENUMBER.replace("{t}", table), (trusted,))
    connection.execute(_RESET.replace("{t}", table), (state.snapshot,))
    if state.behind:
        connection.execute(_LOWER_PARKED.replace("{t}", table))
    connection.execute(f"DELETE FROM {table}_relay")
    name_outbox(connection, table, state)


def _one(connection: PgConnection, query: str) -> tuple[Any, ...]:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row
