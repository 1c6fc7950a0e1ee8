"""A member of a group: receives the events of its partitions and settles which are done."""

import asyncio
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onward import clock
from onward.brokers.base import AsideRecord, BrokerLag, Progress
from onward.brokers.core.holdings import Chunk, Holdings
from onward.brokers.core.subscription import SubscriptionShell
from onward.brokers.sqlite import group_version, log
from onward.brokers.sqlite.figures import lags
from onward.brokers.sqlite.lease_manager import Held, LeaseManager, LogPlace
from onward.brokers.sqlite.progress import Claimed, SettleWrite, settle
from onward.brokers.sqlite.reader import StoreReader
from onward.brokers.sqlite.writer import Writer
from onward.errors import AsideError, BadStore, BrokerError, StoreLost
from onward.event import Delivery, Partition
from onward.settings import Settings

log_ = logging.getLogger("onward")

_LEAVE_S = 2.0  # the time to report that we leave; otherwise the other members notice when our leases end
_REST_S = 5.0  # the pause between two attempts to read a damaged record batch
_LOOK_S = 1.0  # look for events at least this often, in case a ring of the doorbell was lost
_TAIL = "SELECT next FROM onward_partition WHERE id = ?"


News = tuple[int, frozenset[Held]]  # how often the bell has rung, and the partitions to read from
Found = tuple[Held, list[log.Rows], int]  # record batches of a partition, and the position up to which it was read


class Access(NamedTuple):
    """The subscription's ways into the store."""

    writer: Writer
    reader: StoreReader


class SqliteSubscription(SubscriptionShell[LogPlace]):
    def __init__(self, manager: LeaseManager, holdings: Holdings[LogPlace], access: Access, settings: Settings) -> None:
        super().__init__(manager, holdings, look_s=min(_LOOK_S, settings.max_poll_gap_s / 3))
        self._manager = manager
        self._writer, self._reader = access
        self._timeout_s = settings.publish_timeout_s
        self._exhausted: News | None = None  # the news of the last read, if that read returned all there was

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        holds, lost = self._holdings.settleable(progress, aside)
        if not holds:
            return list(lost)
        claims = {partition: Claimed(hold.own.part, hold.fence) for partition, hold in holds.items()}
        enrolment = self._manager.enrolment
        call = SettleWrite(enrolment.group, enrolment.owner, claims, progress, aside, gone)
        try:
            answer = await self._writer.call(lambda tx: settle(tx.db, call))
        except StoreLost as lost:
            self._manager.lose(lost)
            raise
        if answer.lost:
            self._manager.look_at(0.0)
        if answer.refused:
            why = "; ".join(dict.fromkeys(answer.refused.values()))
            raise AsideError(
                f"records of group {enrolment.group} could not be set aside: {why}",
                partitions=list(answer.refused),
                lost=answer.lost,
            )
        return answer.lost

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        holds = dict.fromkeys(self._holdings.known(partitions), drained)
        if holds:
            await self._turned(self._manager.release(holds), self._timeout_s)

    def troubles(self) -> Sequence[str]:
        known = super().troubles()
        obstacle = self._writer.lock_wait.trouble(self._manager.renewal_s)
        if not obstacle and self._manager.is_overdue:  # healthy writers of other processes hold the lock for a moment
            obstacle = self._writer.obstacle()
        return [*known, f"leases cannot be renewed: {obstacle}"] if obstacle else known

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        places = {hold.partition: (hold.own.part, hold.ahead.next_out) for hold in self._holdings.announced()}
        return await self._reader.run(lambda db: lags(db, places))

    def _collected(self, now: float, *, sure: bool) -> None:
        self._manager.look_at(self._holdings.deadline if sure else now)

    async def _leave(self) -> None:
        try:
            await self._turned(self._manager.leave(), min(_LEAVE_S, self._timeout_s))
        except BrokerError:
            pass  # nothing can be written now; the leases will end by themselves
        finally:
            self._writer.queue.remove(self._manager)
            with self._holdings.lock:
                self._holdings.held.clear()
            await self._reader.close()

    async def _turned(self, turn: "asyncio.Future[None]", within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await turn
        except TimeoutError:
            raise BrokerError(self._writer.too_late()) from None

    async def _read(self, limit: int, max_bytes: int) -> None:
        if self._manager.failure is not None or self._holdings.is_stocked(limit, max_bytes):
            return
        news = self._holdings.bell.listen(), frozenset(self._holdings.flowing())
        if news == self._exhausted:
            self._exhausted = None  # skip only once: after the next wait, read even if no bell has rung
            return
        self._exhausted = None
        # The thread only reads. If it also built the deliveries, it would compete with the loop for the interpreter.
        try:
            found, is_all = await self._reader.run(lambda db: self._fill(db, limit, max_bytes))
        except StoreLost as lost:
            return self._manager.lose(lost)  # receive reports the partitions as fenced, then raises it
        for hold, rows, reached in found:
            self._stock(hold, rows, reached)
        if is_all:
            self._exhausted = news

    def _stock(self, hold: Held, found: Sequence[log.Rows], reached: int) -> None:
        for rows in found:
            if rows.start > hold.ahead.position:  # earlier events were removed by retention
                self._holdings.stock((), [(hold, rows.start)])
            self._holdings.stock([(hold, _chunk(hold, rows))])
        if reached > hold.ahead.position:
            self._holdings.stock((), [(hold, reached)])

    # -- in the reader's thread -----------------------------------------------------------------------------------

    def _fill(self, db: sqlite3.Connection, limit: int, max_bytes: int) -> tuple[list[Found], bool]:
        """Read from the partitions that are not paused, until there is enough for a receive. True if all was read."""
        self._manager.saw(group_version.read(db, self._manager.group))
        now = clock.now()
        found: list[Found] = []
        for hold in self._holdings.flowing():
            limit -= hold.ahead.events
            if limit <= 0 or max_bytes <= 0:
                break
            if hold.own.rests_until > now:
                continue
            rows, reached = self._read_hold(db, hold, limit, max_bytes)
            found.append((hold, rows, reached))
            limit -= sum([len(each.events) for each in rows])
            max_bytes -= sum([each.size for each in rows])
        return found, limit > 0 and max_bytes > 0

    def _read_hold(self, db: sqlite3.Connection, hold: Held, limit: int, max_bytes: int) -> tuple[list[log.Rows], int]:
        """Record batches of a partition, and the position up to which its log was read."""
        found: list[log.Rows] = []
        row = db.execute(_TAIL, (hold.own.part,)).fetchone()
        if row is None or hold.ahead.position >= row[0]:  # None: the topic was dropped, which the next turn notices
            if row is not None and hold.ahead.position > row[0]:
                self._manager.look_at(0.0)  # the store may be in an older state; a turn checks that
            return found, 0
        try:
            for rows in log.read(db, hold.own.part, hold.ahead.position):
                found.append(rows)
                limit -= len(rows.events)
                max_bytes -= rows.size
                if limit <= 0 or max_bytes <= 0:
                    return found, 0
        except BadStore as error:
            self._rest(hold, error)
            return found, 0
        hold.own.damage = ""
        return found, int(row[0])

    def _rest(self, hold: Held, error: BadStore) -> None:
        """Stop reading only this partition. It is tried again later, because an operator may repair it."""
        if str(error) != hold.own.damage:
            hold.own.damage = str(error)
            log_.error("%s of group %s is stopped: %s", hold.partition, self._manager.group, error)
        hold.own.rests_until = clock.now() + _REST_S


def _chunk(hold: Held, rows: log.Rows) -> Chunk:
    partition, epoch, fence, log_id = hold.partition, hold.epoch, hold.fence, hold.log_id
    deliveries = [
        Delivery(event, partition, position, epoch, 1, fence, log_id)
        for position, event in enumerate(rows.events, rows.start)
    ]
    return Chunk(deliveries, rows.size)
