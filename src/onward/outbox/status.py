"""The state of an outbox for an operator: what waits, who relays it, and what needs a person."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from onward import clock
from onward.brokers.base import Finding
from onward.errors import BadOutbox
from onward.outbox import status_queries
from onward.outbox.databases import OutboxConnection, check_table, connected, dialect_of
from onward.outbox.schema import TABLE, VERSION, check, existing_meta, relay_grants
from onward.outbox.status_queries import Queries

LONG_S = 60.0  # a transaction that is open for longer is reported
_LOOK_EVERY_S = 0.1


class RelayStatus(msgspec.Struct, frozen=True):
    """`alive`: its beat has changed while we looked. None: we did not look."""

    name: str
    lease_s: float
    alive: bool | None = None


class ShardStatus(msgspec.Struct, frozen=True):
    shard: int
    owner: str | None
    fence: int


class ParkedLane(msgspec.Struct, frozen=True):
    """Parked rows of one topic and key. `why` is the reason of its first row, or of its first refused one."""

    topic: str
    key: str | None
    rows: int
    refused: bool
    since: float  # Unix time
    event_id: str
    why: str


class LongTransaction(msgspec.Struct, frozen=True):
    """`pid`: the database's process or connection, None for a prepared transaction. `who`: PostgreSQL's
    application_name or the name of the prepared transaction, MariaDB's user and host."""

    pid: int | None
    age_s: float
    who: str
    query_start: str | None


class TableUpkeep(msgspec.Struct, frozen=True):
    """Of PostgreSQL. `sequence_cache` must be 1, or ids do not follow the order of locks."""

    sequence_cache: int
    dead_rows: int
    last_autovacuum: str | None


class OutboxStatus(msgspec.Struct, frozen=True, kw_only=True):
    database: str  # the URL without its password
    table: str
    version: int
    works_from: int
    mode: str
    outbox_id: str
    waiting: int  # rows that are neither published nor parked
    oldest_s: float | None  # the age of the oldest event that is not published; without parked ones if some are refused
    parked_rows: int
    refused_rows: int
    relays: Sequence[RelayStatus]
    shards: Sequence[ShardStatus]
    parked: Sequence[ParkedLane]  # refused ones first; at most MOST_LANES
    transactions: Sequence[LongTransaction] | None  # open for longer than LONG_S; None: this user may not see them
    upkeep: TableUpkeep | None = None


def read(url: str, *, table: str = TABLE, look_s: float = 0.0) -> OutboxStatus:
    """Read the status. Looks for up to `look_s` whether the beats of the relays change; 0: does not look."""
    with _opened(url, table) as connection:
        meta = existing_meta(connection, table)
        if int(meta["version"]) > VERSION:
            check(int(meta["version"]), int(meta["works_from"]))
        _refuse_replica(connection)
        return _read(connection, table, meta, look_s)


def release(url: str, *, table: str = TABLE, key: str | None = None, topic: str | None = None) -> int:
    """Let the relay try refused rows again. Returns how many there were."""
    chosen = [each for each in (key, topic) if each is not None]
    with _opened(url, table) as connection:
        existing_meta(connection, table)
        statement = status_queries.release(connection.dialect, table, key=key is not None, topic=topic is not None)
        return connection.run(statement, *chosen)


@contextmanager
def _opened(url: str, table: str) -> Iterator[OutboxConnection]:
    check_table(table)
    with connected(url, rights=f"its owner can grant them: {relay_grants(dialect_of(url), table)}") as connection:
        yield connection


def findings(status: OutboxStatus, max_age_s: float) -> list[Finding]:
    """What an operator should know. Level `error`: it needs a person."""
    found = [*_of_schema(status), *_of_rows(status, max_age_s), *_of_database(status)]
    return found or [Finding("ok", "nothing needs your attention")]


def _of_schema(status: OutboxStatus) -> list[Finding]:
    if status.version >= VERSION:
        return []
    what = f"the outbox has schema version {status.version}, and the relay needs {VERSION}"
    return [Finding("error", what, "run `onward outbox upgrade URL`")]


def _of_rows(status: OutboxStatus, max_age_s: float) -> list[Finding]:
    found = []
    if status.refused_rows:
        what = f"refused events: {status.refused_rows:,}; the later events of their keys wait behind them"
        found.append(Finding("error", what, "remove the cause, then run `onward outbox retry URL`"))
    if status.oldest_s is not None and status.oldest_s > max_age_s:
        what = f"an event has waited for {status.oldest_s:.0f} s, more than outbox_max_age_s={max_age_s:g}"
        found.append(Finding("error", what, "is a relay running, and can it reach its broker? See its log"))
    if (status.waiting or status.parked_rows) and not any(each.alive is not False for each in status.relays):
        what = "events wait, and no relay is alive"
        found.append(Finding("error", what, "start `onward relay MODULE:APP`, or `onward run` with outbox_relay on"))
    return found


def _of_database(status: OutboxStatus) -> list[Finding]:
    found = []
    if status.upkeep is not None and status.upkeep.sequence_cache > 1:
        cache = status.upkeep.sequence_cache
        what = f"the sequence of {status.table}.id has CACHE {cache}, which can invert the events of a key"
        cure = f"run: ALTER TABLE {status.table} ALTER COLUMN id SET CACHE 1; then restart the writers"
        found.append(Finding("error", what, cure))
    if status.transactions:
        what = f"transactions that are open for more than {LONG_S:g} s: {len(status.transactions)}"
        found.append(Finding("warning", what, "their events, if any, come when they commit; others are not delayed"))
    if status.transactions is None:
        what = "this user may not see the transactions of others, so long ones are not listed"
        found.append(Finding("warning", what, "grant pg_read_all_stats on PostgreSQL, or PROCESS on MariaDB"))
    return found


# -- reading ------------------------------------------------------------------------------------------------------


def _read(connection: OutboxConnection, table: str, meta: Mapping[str, str], look_s: float) -> OutboxStatus:
    queries = Queries(connection.dialect, meta["mode"], table)
    relays = _relays(connection, queries, look_s)
    waiting, oldest = connection.rows(queries.waiting)[0]
    parked, refused, oldest_parked = connection.rows(queries.parked)[0]
    # Refused events wait for an operator, and others may wait behind them. Their age says nothing about the relay.
    times = [each for each in (oldest, None if refused else oldest_parked) if each is not None]
    return OutboxStatus(
        database=connection.where,
        table=table,
        version=int(meta["version"]),
        works_from=int(meta["works_from"]),
        mode=meta["mode"],
        outbox_id=meta["outbox_id"],
        waiting=waiting,
        oldest_s=max(0.0, time.time() - min(times)) if times else None,
        parked_rows=parked,
        refused_rows=int(refused or 0),
        relays=relays,
        shards=[ShardStatus(*row) for row in connection.rows(queries.shards)],
        parked=[_lane(row) for row in connection.rows(queries.lanes)],
        transactions=_transactions(connection, queries),
        upkeep=_upkeep(connection, queries),
    )


def _relays(connection: OutboxConnection, queries: Queries, look_s: float) -> list[RelayStatus]:
    """The relays. A relay that was listed before and after, with the same beat, is not alive."""
    first = connection.rows(queries.relays)
    if not first or not look_s:
        return [RelayStatus(name, lease_s) for name, _, lease_s in first]
    before, until = {name: beat for name, beat, _ in first}, clock.now() + look_s
    while True:
        now = connection.rows(queries.relays)
        seen = [RelayStatus(name, lease_s, before.get(name) != beat) for name, beat, lease_s in now]
        if all(each.alive for each in seen) or clock.now() > until:
            return seen
        time.sleep(_LOOK_EVERY_S)


def _lane(row: Sequence[Any]) -> ParkedLane:
    topic, key, rows, refused, since, event_id, why = row
    return ParkedLane(topic, key, rows, bool(refused), since, event_id, why)


def _transactions(connection: OutboxConnection, queries: Queries) -> list[LongTransaction] | None:
    if queries.may_see_transactions is None:
        return []
    try:
        if not connection.value(queries.may_see_transactions):
            return None
        found = connection.rows(queries.transactions, LONG_S)
    except BadOutbox:  # MariaDB
        return None
    return [LongTransaction(pid, float(age_s), who or "", start) for pid, age_s, who, start in found]


def _upkeep(connection: OutboxConnection, queries: Queries) -> TableUpkeep | None:
    return TableUpkeep(*connection.rows(queries.upkeep)[0]) if queries.upkeep else None


def _refuse_replica(connection: OutboxConnection) -> None:
    question = {"postgresql": "SELECT pg_is_in_recovery()", "mariadb": "SELECT @@global.read_only"}
    if connection.dialect in question and connection.value(question[connection.dialect]) not in (0, "OFF"):
        raise BadOutbox(f"{connection.where} is a replica, or accepts no writes: use the primary server")
