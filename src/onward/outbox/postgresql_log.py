"""The log store: an append-only table on PostgreSQL. Rows are not touched when they are published; only the cursors of
the shards move.

Nothing that a cursor says is kept in this process. Each read loads the cursors in its own transaction, so that they
belong to the same database as the rows, also after a restore, a failover or behind a pooler.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from onward.error_report import storable
from onward.errors import OutboxUnreachable
from onward.outbox.base import Lane, LeasePlan, OutboxBatch, OutboxRow, ParkedRow, RelaysView, Turn
from onward.outbox.databases import check_table
from onward.outbox.postgresql import PgConnection, PostgresListener, begin, connect, transaction, translated
from onward.outbox.postgresql_checks import check_outbox
from onward.outbox.postgresql_cleaning import Sweep, clean
from onward.outbox.postgresql_cursors import Condition, CursorMove, ShardCursor, rotated, sections
from onward.outbox.postgresql_pages import FIELDS, PageReader
from onward.outbox.postgresql_rebaseline import LAST_ID, DatabaseState, here, rebaseline, state_query
from onward.outbox.postgresql_turns import RelayTurn
from onward.settings import redacted

_DEFAULT_LEASE_S = 10.0  # until the first turn
_IDLE_S = 60.0  # for a transaction that only reads
_REST_S = 1.0  # between two writes of an idle relay
# The server ends our transaction when it is idle, before the next relay has waited too long for its locks.
_PARTS = (0.9, 0.7, 1.0)  # of a third of the lease: to wait for a lock, to be idle, for a statement
# Statistics of a table that grows and shrinks this fast are never right. Without them, the planner would read a whole
# backlog and sort it, for each page.
_PLAN = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off"
_TRIES = 3  # of a turn in a database that was restored

_CURSORS = """
SELECT state.*, s.shard, s.fence, s.seen::text, s.until::text, s.last, s.top
FROM ({state}) AS state LEFT JOIN {t}_shard AS s ON s.shard = ANY(%s::smallint[]) AND s.owner IS NOT NULL
"""
_ADVANCE = f"""
WITH step AS (
    SELECT * FROM unnest(
        %s::smallint[], %s::bigint[], %s::text[], %s::pg_snapshot[], %s::pg_snapshot[], %s::bigint[], %s::bigint[],
        %s::bigint[]
    ) AS step (shard, fence, before, seen, until, last, top, high)
), moved AS (
    UPDATE {{t}}_shard AS s SET seen = step.seen, until = step.until, last = step.last, top = step.top,
        high = greatest(s.high, least(step.high, (SELECT {LAST_ID})))
    FROM step WHERE s.shard = step.shard AND s.fence = step.fence AND s.owner IS NOT NULL
        AND concat_ws(' ', s.seen, coalesce(s.until::text, '-'), s.last, s.top) = step.before
        AND (SELECT value FROM {{t}}_meta WHERE name = 'identity') = {{here}}
    RETURNING s.shard
), kept AS (
    INSERT INTO {{t}}_parked ({FIELDS}, refused, why, since)
    SELECT {", ".join(f"r.{field}" for field in FIELDS.split(", "))}, given.refused, given.why, %s
    FROM unnest(%s::bigint[], %s::boolean[], %s::text[]) AS given (id, refused, why) JOIN {{t}} AS r USING (id)
    WHERE r.shard IN (SELECT shard FROM moved)
)
SELECT shard FROM moved
"""
_OURS = """
SELECT s.shard FROM {t}_shard AS s JOIN unnest(%s::smallint[], %s::bigint[]) AS held (shard, fence) USING (shard, fence)
WHERE s.owner IS NOT NULL
"""
_LANES = """
SELECT DISTINCT shard, topic, event_key FROM {t}_parked WHERE shard = ANY(%s::smallint[]) AND event_key IS NOT NULL
"""
_PARKED = f"""
SELECT {FIELDS} FROM {{t}}_parked AS p WHERE shard = ANY(%s::smallint[]) AND NOT refused AND topic <> ALL(%s::text[])
    AND NOT EXISTS (
        SELECT FROM {{t}}_parked AS r WHERE r.refused AND r.topic = p.topic AND r.event_key = p.event_key
    )
ORDER BY id LIMIT %s
"""
_UNPARK = "DELETE FROM {t}_parked WHERE id = ANY(%s::bigint[]) AND shard = ANY(%s::smallint[])"
_REFUSE = """
UPDATE {t}_parked AS p SET refused = true, why = given.why FROM unnest(%s::bigint[], %s::text[]) AS given (id, why)
WHERE p.id = given.id AND p.shard = ANY(%s::smallint[])
"""
_RAISE = "UPDATE {t}_shard SET fence = %s WHERE shard = %s AND fence = %s AND owner IS NOT NULL AND fence <= %s"


class PostgresLogStore:
    """Implements `OutboxStore` for PostgreSQL in mode `log`."""

    def __init__(self, url: str, table: str) -> None:
        self._url = url
        self._table = check_table(table)
        self._connection: PgConnection | None = None
        self._listener = PostgresListener(url, table.rpartition(".")[2])
        self._here = ""  # an expression in SQL
        self._lease_s = _DEFAULT_LEASE_S
        self._sweep = Sweep()
        self._reads = 0
        self._rest_until = 0.0

    # -- the connection ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.close()
        connection = connect(self._url)
        try:
            with translated(self._url, self._table), transaction(connection, self._begin_reading):
                check_outbox(connection, redacted(self._url), self._table)
                self._here = here(connection, self._table)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._sweep = Sweep()
        self._listener = PostgresListener(self._url, self._table.rpartition(".")[2])

    def close(self) -> None:
        self._listener.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def wait(self, timeout_s: float) -> None:
        self._listener.wait(timeout_s)

    @contextmanager
    def _reading(self) -> Iterator[PgConnection]:
        """A transaction with one snapshot for all its statements."""
        with self._in(self._begin_reading) as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[PgConnection]:
        """A transaction that waits for others, and makes others wait, for about a third of the lease at most."""
        lock_s, idle_s, statement_s = (self._pause_s * part for part in _PARTS)
        with self._in(begin(lock_s=lock_s, idle_s=idle_s, statement_s=statement_s)) as connection:
            yield connection

    @contextmanager
    def _in(self, begin_text: str) -> Iterator[PgConnection]:
        if self._connection is None:
            raise OutboxUnreachable(f"the outbox {self._table} is not open")
        with translated(self._url, self._table), transaction(self._connection, f"{begin_text}; {_PLAN}"):
            yield self._connection

    @property
    def _begin_reading(self) -> str:
        return begin(isolation="REPEATABLE READ, READ ONLY", lock_s=self._pause_s, idle_s=_IDLE_S)

    @property
    def _pause_s(self) -> float:
        return self._lease_s / 3

    def _sql(self, text: str) -> str:
        return text.replace("{t}", self._table).replace("{here}", self._here)

    # -- leases -----------------------------------------------------------------------------------------------------

    def turn(self, name: str, lease_s: float, decide: Callable[[RelaysView], LeasePlan]) -> Turn:
        self._lease_s = lease_s
        for attempt in range(_TRIES):
            with self._writing() as connection:
                turn = RelayTurn(connection, self._table, name, lease_s)
                state = turn.lock(self._state)
                if state.sound:
                    return turn.take(state, decide, rebaselined=attempt > 0)
            with translated(self._url, self._table):
                rebaseline(connection, self._table, self._state, lock_s=self._pause_s)
        raise OutboxUnreachable(f"{self._table} of {redacted(self._url)} is being restored; is that still going on?")

    def raise_fence(self, shard: int, fence: int, to: int) -> bool:
        with self._writing() as connection:
            return connection.execute(self._sql(_RAISE), (to, shard, fence, to)).rowcount > 0

    @property
    def _state(self) -> str:
        return state_query(self._table, self._here)

    # -- the flow ---------------------------------------------------------------------------------------------------

    def read(self, held: Mapping[int, int], *, limit: int, max_bytes: int) -> OutboxBatch:
        moves: dict[int, CursorMove] = {}
        with self._reading() as connection:
            snapshot, cursors = self._cursors(connection, held)
            every = sections(cursors)
            self._reads += 1
            reader = PageReader(connection, self._table, limit=limit, max_bytes=max_bytes)
            for section in rotated(every, self._reads):
                page = reader.page(section, snapshot)
                moves |= page.section.moves(cursors, page.published)
                if page.rows:
                    return OutboxBatch(page.rows, page.published is not None or len(every) > 1, moves)
        return OutboxBatch((), False, {} if self._resting(cursors) else moves)

    def advance(self, batch: OutboxBatch, held: Mapping[int, int], parked: Sequence[ParkedRow] = ()) -> Sequence[int]:
        marks = cast("Mapping[int, CursorMove]", batch.mark)
        moves = {shard: marks[shard] for shard in sorted(held) if shard in marks}
        if not held or not (moves or batch.rows):
            return ()
        others = {shard: fence for shard, fence in held.items() if shard not in moves}
        with self._writing() as connection:
            copies = [each.row.id for each in parked], [each.refused for each in parked], _reasons(connection, parked)
            values = (*_steps(moves, held, batch.rows), time.time(), *copies)
            ours = {shard for (shard,) in connection.execute(self._sql(_ADVANCE), values)}
            ours |= self._ours(connection, others) if others else set()
        self._rest_until = time.monotonic() + _REST_S
        return sorted(held.keys() - ours)

    def clean(self, *, keep_s: float, limit: int) -> int:
        with self._writing() as connection:
            self._check(DatabaseState(*connection.execute(self._state).fetchall()[0]))
            return clean(connection, self._table, self._sweep, keep_s=keep_s, limit=limit)

    def _resting(self, cursors: Mapping[int, ShardCursor]) -> bool:
        """Nothing was found, so the cursors need not be stored now: a later read finds nothing there again. They are
        stored from time to time, because meanwhile the rows of other shards make each read longer."""
        return time.monotonic() < self._rest_until and not any(cursor.until for cursor in cursors.values())

    def _cursors(self, connection: PgConnection, held: Mapping[int, int]) -> tuple[str, dict[int, ShardCursor]]:
        """The snapshot of this transaction, and the cursors of those shards that are still ours."""
        found = connection.execute(self._sql(_CURSORS).replace("{state}", self._state), (list(held),)).fetchall()
        state = DatabaseState(*found[0][:6])
        self._check(state)
        rows = [row[6:] for row in found if row[6] in held]
        return state.snapshot, {shard: ShardCursor(*rest) for shard, fence, *rest in rows if held[shard] == fence}

    def _check(self, state: DatabaseState) -> None:
        """Use no cursor of another database. The next turn corrects them."""
        if state.replica:
            raise OutboxUnreachable(f"{redacted(self._url)} has become a replica; the relay needs the primary server")
        if not state.sound:
            raise OutboxUnreachable(f"the tables of {self._table} were replaced; the relay connects again")

    def _ours(self, connection: PgConnection, held: Mapping[int, int], *, lock: bool = False) -> set[int]:
        statement = self._sql(_OURS + (" FOR UPDATE OF s" if lock else ""))
        return {shard for (shard,) in connection.execute(statement, (list(held), list(held.values())))}

    # -- parked rows ------------------------------------------------------------------------------------------------

    def parked_lanes(self, held: Mapping[int, int]) -> Mapping[int, Sequence[Lane]]:
        lanes: dict[int, list[Lane]] = {}
        with self._reading() as connection:
            for shard, topic, key in connection.execute(self._sql(_LANES), (list(held),)):
                lanes.setdefault(shard, []).append((topic, key))
        return lanes

    def parked(
        self, held: Mapping[int, int], *, limit: int, max_bytes: int, without: Collection[str] = ()
    ) -> Sequence[OutboxRow]:
        some = Condition(_PARKED, (list(held), list(without), limit))
        with self._reading() as connection:
            connection.execute("SET LOCAL enable_nestloop = off")  # there may be many rows, and many refused ones
            return PageReader(connection, self._table, limit=limit, max_bytes=max_bytes).rows(some)

    def unpark(
        self, held: Mapping[int, int], published: Sequence[OutboxRow], refused: Sequence[ParkedRow] = ()
    ) -> Sequence[int]:
        with self._writing() as connection:
            ours = self._ours(connection, held, lock=True)
            connection.execute(self._sql(_UNPARK), ([row.id for row in published], list(ours)))
            if refused:
                given = [each.row.id for each in refused], _reasons(connection, refused), list(ours)
                connection.execute(self._sql(_REFUSE), given)
        return sorted(held.keys() - ours)

    def count_parked(self) -> int:
        with self._reading() as connection:
            ((count,),) = connection.execute(f"SELECT count(*) FROM {self._table}_parked").fetchall()
        return int(count)


def _steps(moves: Mapping[int, CursorMove], held: Mapping[int, int], rows: Sequence[OutboxRow]) -> Sequence[list[Any]]:
    """The moves as columns."""
    highest = {row.shard: row.id for row in rows}  # they ascend
    after = [move.after for move in moves.values()]
    return (
        list(moves),
        [held[shard] for shard in moves],
        [move.before.text for move in moves.values()],
        *(list(column) for column in (zip(*after, strict=True) if after else ((), (), (), ()))),
        [highest.get(shard, 0) for shard in moves],
    )


def _reasons(connection: PgConnection, parked: Sequence[ParkedRow]) -> list[str]:
    """As the database can store them: no text may stop the relay."""
    encoding = "utf-8" if connection.info.parameter_status("server_encoding") == "UTF8" else "ascii"
    texts = [storable(each.why).replace("\0", "\\0") for each in parked]
    return [text.encode(encoding, "backslashreplace").decode() for text in texts]
