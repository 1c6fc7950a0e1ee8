"""The queue store: rows are pending until they are published, and then they are deleted.

Every read begins with the lowest id. A store that continues after the last id it has seen would pass over a row whose
transaction commits late, or would read it after a later row of its key.
"""

import logging
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any
from uuid import uuid4

from onward.error_report import storable
from onward.errors import BadOutbox, OutboxUnreachable
from onward.outbox import schema
from onward.outbox.base import (
    Lane,
    LeasePlan,
    OutboxBatch,
    OutboxIdentity,
    OutboxRow,
    ParkedRow,
    RelayState,
    RelaysView,
    ShardState,
    Turn,
)
from onward.outbox.databases import check_table, dialect_of
from onward.outbox.queue_connections import QueueConnection, RelayBell, SleepingBell, connect
from onward.outbox.queue_statements import CHUNK, PARKED, PENDING, QueueSql
from onward.outbox.rows import row_of

log = logging.getLogger("onward")

_DEFAULT_LEASE_S = 10.0  # until the first turn


class QueueStore:
    """Implements `OutboxStore` for MariaDB, MySQL, SQLite, and PostgreSQL in mode `queue`."""

    def __init__(self, url: str, table: str) -> None:
        self._url = url
        self._table = check_table(table)
        self._sql = QueueSql(dialect_of(url), table)
        self._connection: QueueConnection | None = None
        self._bell: RelayBell = SleepingBell()
        self._shards = 0  # how many there are
        self._name = ""  # of our relay
        self._beat: int | None = None  # as our last turn wrote it

    # -- the connection ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.close()
        db = connect(self._url, self._table)
        try:
            meta = dict(db.rows(self._sql.meta))
            self._check(meta)
            db.check_server()
            db.limit_pauses(_DEFAULT_LEASE_S)
            with db.transaction():
                for probe in self._sql.probes():
                    db.run(probe)
            self._bell = db.bell()
        except BaseException:
            db.close()
            raise
        self._shards = int(meta["shards"])
        self._connection = db

    def close(self) -> None:
        self._bell.close()
        db, self._connection = self._connection, None
        if db is not None:
            db.close()

    def wait(self, timeout_s: float) -> None:
        self._bell.wait(timeout_s)

    @property
    def _db(self) -> QueueConnection:
        if self._connection is None:
            raise OutboxUnreachable(f"the store of outbox {self._table} is not open")
        return self._connection

    def _check(self, meta: Mapping[str, str]) -> None:
        if "version" not in meta:
            raise BadOutbox(f"the outbox {self._table} was not created completely: run `onward outbox init URL` again")
        schema.check(int(meta["version"]), int(meta["works_from"]))

    # -- leases -----------------------------------------------------------------------------------------------------

    def turn(self, name: str, lease_s: float, decide: Callable[[RelaysView], LeasePlan]) -> Turn:
        db = self._db
        db.limit_pauses(lease_s)
        with db.transaction():
            meta = dict(db.rows(self._sql.lock_meta))  # one relay at a time
            self._check(meta)
            outbox_id, rebaselined = self._identify(db, meta)
            beat = self._renew(db, name, lease_s)
            self._apply(db, name, decide(self._view(db)))
            held = dict(db.rows(self._sql.held, name))
        self._name, self._beat = name, beat
        return Turn(OutboxIdentity(outbox_id, int(meta["shards"]), int(meta["version"]), rebaselined), held)

    def _identify(self, db: QueueConnection, meta: Mapping[str, str]) -> tuple[str, bool]:
        """The id of this outbox, and whether it is a copy of another one. The rows of a copy are those that were not
        published when it was made, so nothing has to be done about them."""
        known, found = meta["identity"], db.identity()
        if known == found:
            return meta["outbox_id"], False
        outbox_id = uuid4().hex  # also before the first relay: a copy may have been made already
        db.run(self._sql.set_meta, found, "identity")
        db.run(self._sql.set_meta, outbox_id, "outbox_id")
        if known:
            db.run(self._sql.strike(everybody=True))
            db.run(self._sql.free(everything=True))
            log.warning(
                "the outbox %s of %s is a copy: it was made in %s, and this is %s. It gets a new id, and its rows are "
                "published from here. If the original is still in use, they are published twice: then stop this relay "
                "and delete the rows of the copy",
                *(self._table, db.where, known, found),
            )
        return outbox_id, bool(known)

    def _renew(self, db: QueueConnection, name: str, lease_s: float) -> int:
        """Our new beat. If the stored one is not the one that we wrote, we were struck, or the tables are those of a
        backup: then we own nothing."""
        if name != self._name:
            self._beat = None
        if not db.run(self._sql.renew(self._beat), lease_s, name):
            db.run(self._sql.strike(), name)
            db.run(self._sql.free(), name)
            db.run(self._sql.enlist(random.getrandbits(48)), lease_s, name)
        beat: int = db.rows(self._sql.beat, name)[0][0]
        return beat

    def _view(self, db: QueueConnection) -> RelaysView:
        relays = [RelayState(*row) for row in db.rows(self._sql.relays)]
        return RelaysView(relays, [ShardState(*row) for row in db.rows(self._sql.shards)])

    def _apply(self, db: QueueConnection, name: str, plan: LeasePlan) -> None:
        for shard in sorted(plan.release):
            db.run(self._sql.release(shard), name)
        for relay in (*plan.strike, *([name] if plan.leave else [])):
            db.run(self._sql.strike(), relay)
            db.run(self._sql.free(), relay)
        for shard in [] if plan.leave else sorted(plan.claim):
            db.run(self._sql.claim(shard), name)

    def raise_fence(self, shard: int, fence: int, to: int) -> bool:
        with self._db.transaction():
            return self._db.run(self._sql.raise_fence(shard, fence, to), self._name) > 0

    def _owned(self, db: QueueConnection, held: Mapping[int, int]) -> set[int]:
        """Those shards of `held` that are still ours, and remain so until the transaction ends."""
        found = db.rows(self._sql.lock_shards(held), self._name)
        beats = db.rows(self._sql.beat, self._name)
        if not beats or beats[0][0] != self._beat:  # struck, or the tables were restored from a backup
            return set()
        return {shard for shard, fence in found if held[shard] == fence}

    # -- rows -------------------------------------------------------------------------------------------------------

    def read(self, held: Mapping[int, int], *, limit: int, max_bytes: int) -> OutboxBatch:
        if not held:
            return OutboxBatch((), more=False, mark=None)
        shards = None if len(held) >= self._shards else sorted(held)
        rows, more = self._bounded(self._sql.read(shards, limit, max_bytes // limit), PENDING, max_bytes)
        return OutboxBatch(rows, more or len(rows) >= limit, mark=None)

    def advance(self, batch: OutboxBatch, held: Mapping[int, int], parked: Sequence[ParkedRow] = ()) -> Sequence[int]:
        if not batch.rows or not held:
            return ()
        db = self._db
        with db.transaction():
            owned = self._owned(db, held)
            self._park(db, [each for each in parked if each.row.shard in owned])
            self._delete(db, PENDING, [row.id for row in batch.rows if row.shard in owned])
        return sorted(held.keys() - owned)

    def parked_lanes(self, held: Mapping[int, int]) -> Mapping[int, Sequence[Lane]]:
        lanes: dict[int, list[Lane]] = {}
        if held:
            with self._db.reading():
                for shard, topic, key in self._db.rows(self._sql.parked_lanes(held)):
                    lanes.setdefault(shard, []).append((topic, key))
        return lanes

    def parked(
        self, held: Mapping[int, int], *, limit: int, max_bytes: int, without: Collection[str] = ()
    ) -> Sequence[OutboxRow]:
        if not held:
            return ()
        statement = self._sql.parked(held, limit, max_bytes // limit, without=len(without))
        return self._bounded(statement, PARKED, max_bytes, *without)[0]

    def unpark(
        self, held: Mapping[int, int], published: Sequence[OutboxRow], refused: Sequence[ParkedRow] = ()
    ) -> Sequence[int]:
        if not held or not (published or refused):
            return ()
        db = self._db
        with db.transaction():
            owned = self._owned(db, held)
            self._delete(db, PARKED, [row.id for row in published if row.shard in owned])
            for row, why, _ in refused:
                if row.shard in owned:
                    db.run(self._sql.refuse(row.id), _reason(why))
        return sorted(held.keys() - owned)

    def count_parked(self) -> int:
        with self._db.reading():
            count: int = self._db.rows(self._sql.count_parked)[0][0]
            return count

    def clean(self, *, keep_s: float, limit: int) -> int:
        return 0  # there is nothing left to clean

    def _bounded(self, statement: str, suffix: str, max_bytes: int, *values: str) -> tuple[Sequence[OutboxRow], bool]:
        """The rows of a statement in their order, as many as fit, and whether some did not."""
        db = self._db
        with db.reading():
            found = sorted(db.rows(statement, *values), key=_id_of)
            fitting = fit(found, max_bytes)
            large = [id_ for size, id_, *_ in fitting if size is not None]
            whole = {row[0]: row for ids in _chunks(large) for row in db.rows(self._sql.whole(suffix, ids))}
        # A large row that has disappeared meanwhile was published by another relay.
        rows = [
            row_of(*row) if size is None else row_of(*whole[row[0]])
            for size, *row in fitting
            if size is None or row[0] in whole
        ]
        return rows, len(fitting) < len(found)

    def _park(self, db: QueueConnection, parked: Sequence[ParkedRow]) -> None:
        for ids in _chunks([each.row.id for each in parked]):
            self._lower_parked(db, ids)
        ordered = sorted(parked, key=_kind_of)
        for (why, refused), rows in groupby(ordered, key=_kind_of):
            for ids in _chunks([each.row.id for each in rows]):
                db.run(self._sql.park(ids, refused=refused), _reason(why), time.time())

    def _lower_parked(self, db: QueueConnection, ids: Sequence[int]) -> None:
        """Parked rows come before the pending rows of their lanes. Their ids are higher only if the table was emptied
        with TRUNCATE, or restored, so that ids began again."""
        if not db.rows(self._sql.displaced(ids))[0][0]:
            return
        ((_, lowest, highest),) = db.rows(self._sql.count_parked)
        db.run(self._sql.lower_parked(max(highest - min(ids), highest - lowest) + 1))

    def _delete(self, db: QueueConnection, suffix: str, ids: Sequence[int]) -> None:
        for chunk in _chunks(ids):
            db.run(self._sql.delete(suffix, chunk))


def fit(found: Sequence[Sequence[Any]], max_bytes: int) -> Sequence[Sequence[Any]]:
    """The first rows, up to `max_bytes`, but at least one. A row has its size, if it is large, and then its columns, of
    which the last is the payload."""
    total = 0
    for number, row in enumerate(found):
        total += row[0] if row[0] is not None else len(row[-1] or b"")
        if total > max_bytes and number:
            return found[:number]
    return found


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))


def _id_of(row: Sequence[Any]) -> int:
    """Of a row that begins with its size."""
    id_: int = row[1]
    return id_


def _kind_of(each: ParkedRow) -> tuple[str, bool]:
    return each.why, each.refused


def _reason(why: str) -> str:
    """As every database can store it."""
    return storable(why).replace("\0", "\\0")
