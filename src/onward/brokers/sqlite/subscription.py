"""A member of a group: receives what its partitions hold and settles what is done."""

import asyncio
import logging
import sqlite3
from collections.abc import Mapping, Sequence

from onward import clock
from onward.brokers.base import AsideRecord, BrokerLag, Message, Progress
from onward.brokers.sqlite import log, roster
from onward.brokers.sqlite.doorbell import Doorbell
from onward.brokers.sqlite.holdings import Hold, Holdings
from onward.brokers.sqlite.lag import lags
from onward.brokers.sqlite.progress import Claimed, Settlement, settle
from onward.brokers.sqlite.reader import Reader
from onward.brokers.sqlite.tenure import Tenure
from onward.brokers.sqlite.writer import Writer
from onward.errors import BadStore, BrokerError, Closed, GroupDropped
from onward.event import Partition
from onward.settings import Settings

log_ = logging.getLogger("onward")

_LEAVE_S = 2.0  # to tell the others that we leave; else they learn it when our leases run out
_REST_S = 5.0  # between two looks at a damaged record batch
_LOOK_S = 1.0  # how long a lost ring of the doorbell may go unnoticed
_TAIL = "SELECT next FROM onward_partition WHERE id = ?"


class SqliteSubscription:
    def __init__(
        self,
        tenure: Tenure,
        holdings: Holdings,
        *,
        writer: Writer,
        reader: Reader,
        bell: Doorbell,
        settings: Settings,
    ) -> None:
        self._tenure = tenure
        self._holdings = holdings
        self._writer = writer
        self._reader = reader
        self._bell = bell
        self._settings = settings
        self._closing: asyncio.Future[None] | None = None
        self._look_s = min(_LOOK_S, settings.max_poll_gap_s / 3)

    async def receive(self, limit: int, max_bytes: int, wait_s: float) -> Sequence[Message]:
        if self._holdings.closed:
            raise Closed(f"the subscription of group {self._tenure.group} is closed")
        end = clock.now() + wait_s
        while not self.is_closed:
            self._tenure.polled()
            rung = self._bell.listen()
            if not self._holdings.is_stocked(limit, max_bytes):
                await self._reader.run(lambda db: self._fill(db, limit, max_bytes))
            now = clock.now()
            sure = now < self._tenure.sure_until()
            messages = self._holdings.collect(limit, max_bytes, now, sure=sure)
            self._writer.queue.kick(self._tenure, self._holdings.deadline() if sure else now)
            if not messages and self._tenure.dropped:
                raise GroupDropped(self._tenure.dropped)
            if messages or now >= end:
                return messages
            ripe_at = self._holdings.ripe_at() if sure else end
            await self._bell.wait(rung, min(end, ripe_at, now + self._look_s) - now)
        return []

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        claims = self._claims(progress)
        if not claims:
            return list(dict.fromkeys([part.partition for part in progress] + [record.partition for record in aside]))
        settlement = Settlement(self._tenure.group, self._tenure.owner, claims, progress, aside, gone)
        lost = await self._writer.call(lambda tx: settle(tx.db, settlement))
        if lost:
            self._writer.queue.kick(self._tenure)
        return lost

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        with self._holdings.lock:
            ours = dict.fromkeys(self._announced(partitions), drained)
        if ours:
            await self._turned(self._tenure.ask(ours), self._settings.publish_timeout_s)

    def troubles(self) -> Sequence[str]:
        return ()

    def sure_until(self) -> float:
        return self._tenure.sure_until()

    async def pause(self, partitions: Sequence[Partition]) -> None:
        self._set_paused(partitions, paused=True)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        self._set_paused(partitions, paused=False)
        self._bell.nudge()

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        with self._holdings.lock:
            places = {hold.partition: (hold.part, hold.out) for hold in self._holdings.held.values() if hold.epoch}
        return await self._reader.run(lambda db: lags(db, places))

    @property
    def is_closed(self) -> bool:
        return self._holdings.closed

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with self._holdings.lock:
            self._holdings.closed = True
        self._bell.nudge()
        try:
            await self._turned(self._tenure.leave(), min(_LEAVE_S, self._settings.publish_timeout_s))
        except BrokerError:
            pass  # nobody can write now: the leases run out by themselves
        finally:
            self._writer.queue.remove(self._tenure)
            with self._holdings.lock:
                self._holdings.held.clear()
            await self._reader.close()

    async def _turned(self, turn: "asyncio.Future[None]", within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await turn
        except TimeoutError:
            raise BrokerError(self._writer.too_late()) from None

    def _set_paused(self, partitions: Sequence[Partition], *, paused: bool) -> None:
        with self._holdings.lock:
            for hold in self._announced(partitions):
                hold.paused = paused

    def _announced(self, partitions: Sequence[Partition]) -> list[Hold]:
        """What the caller knows of: an ownership that receive has not told yet cannot be meant."""
        holds = [self._holdings.held.get(partition) for partition in partitions]
        return [hold for hold in holds if hold is not None and hold.epoch]

    def _claims(self, progress: Sequence[Progress]) -> dict[Partition, Claimed]:
        """All that is held under an epoch that the caller still goes by."""
        stale = set()
        with self._holdings.lock:
            held = {hold.partition: hold for hold in self._holdings.held.values() if hold.epoch}
        for part in progress:
            hold = held.get(part.partition)
            if hold is None or hold.epoch != part.epoch:
                stale.add(part.partition)
        return {place: Claimed(hold.part, hold.fence) for place, hold in held.items() if place not in stale}

    # In the reader's thread

    def _fill(self, db: sqlite3.Connection, limit: int, max_bytes: int) -> None:
        """Read on in the partitions that flow, until there is enough for a receive."""
        self._tenure.saw(roster.version(db, self._tenure.group))
        for hold, stocked in self._holdings.flowing(clock.now()):
            limit -= stocked
            (tail,) = db.execute(_TAIL, (hold.part,)).fetchone()
            try:
                if hold.read < tail:
                    limit, max_bytes = self._read(db, hold, tail, (limit, max_bytes))
            except BadStore as error:
                self._rest(hold, error)
            if limit <= 0 or max_bytes <= 0:
                return

    def _rest(self, hold: Hold, error: BadStore) -> None:
        """This partition stands still, and only this one. It is looked at again, for somebody may mend it."""
        if str(error) != hold.damage:
            hold.damage = str(error)
            log_.error("%s of group %s stands still: %s", hold.partition, self._tenure.group, error)
        hold.rests_until = clock.now() + _REST_S

    def _read(self, db: sqlite3.Connection, hold: Hold, tail: int, wanted: tuple[int, int]) -> tuple[int, int]:
        limit, max_bytes = wanted
        for rows in log.read(db, hold.part, hold.read):
            self._holdings.stock(hold, rows)
            limit -= len(rows.events)
            max_bytes -= rows.size
            if limit <= 0 or max_bytes <= 0:
                return limit, max_bytes
        if hold.read < tail:
            self._holdings.stock(hold, log.Rows(tail, [], 0))  # the rest was trimmed
        return limit, max_bytes
