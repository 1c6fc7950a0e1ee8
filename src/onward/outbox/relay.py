"""The relay: publishes the committed rows of an outbox, in the order of every key, and remembers how far it is.

It repeats one cycle: read a batch, publish it, advance. Rows are published at least once: after a crash between the
last two steps they are published again, in the same order. Several relays share the shards of an outbox. A relay
publishes only rows of shards that it surely owns.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from onward.brokers.base import Broker
from onward.error_report import storable
from onward.errors import BadOutbox, OutboxError
from onward.outbox.base import OutboxBatch, OutboxRow, OutboxStore, ParkedRow
from onward.outbox.delivering import BatchDelivery
from onward.outbox.leases import RelayLeases
from onward.outbox.parking import ParkedLanes
from onward.outbox.relay_figures import RelayFigures
from onward.outbox.sending import BEHIND, Route, RowFailure, send
from onward.outbox.shard_holder import ShardHolder
from onward.outbox.store_thread import StoreThread

log = logging.getLogger("onward")

BATCH_ROWS = 2_000
BATCH_BYTES = 8 << 20
MOST_PARKED = 100_000  # rows. Beyond that, rows that the broker does not accept wait in place
_ROUNDS = 3  # failed rounds, before a row is parked and the rest goes on without it
_BREATH_S = 0.004  # after a batch that was not full, so that the next one is larger
_POLL_S = (0.005, 0.2)  # between two reads that found nothing: first and longest
_RETRY_S = (0.2, 5.0)  # between two tries to publish, and between two tries to connect
_REACH_S = 5.0  # how long the broker may take to list its topics
_MOST_PAGES = 20  # of parked rows that are tried again, before new rows have their turn
_TIDY_EVERY_S = 5.0
_CLEAN_ROWS = 5_000
_CLEAN_PAUSE_S = 0.02
_FIRST_SHARD = 0  # its owner cleans the table and counts the parked rows


class RelaySettings(msgspec.Struct, frozen=True):
    name: str  # of this relay, unique
    lease_s: float
    keep_s: float
    drain_timeout_s: float


class Backoff:
    """Pauses that grow, and end early when `ended` is set."""

    def __init__(self, ended: asyncio.Event, first_s: float, longest_s: float) -> None:
        self._ended = ended
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s

    async def wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), self.grow())

    def grow(self) -> float:
        """The length of the next pause."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self._longest_s)
        return pause_s

    def reset(self) -> None:
        self._next_s = self._first_s


class Relay:
    """Relays one outbox. `run` returns after `stop`."""

    def __init__(self, store: OutboxStore, broker: Broker, settings: RelaySettings, figures: RelayFigures) -> None:
        self._broker = broker
        self._settings = settings
        self._figures = figures
        self._thread = StoreThread(store, "outbox")
        self._holder = ShardHolder(self._thread, RelayLeases(settings.name, settings.lease_s))
        self._parked = ParkedLanes(self._thread)
        self._full = ""  # said with a failure, if there is no room for more parked rows
        self._stopping = asyncio.Event()
        self._rung = asyncio.Event()

    def stop(self) -> None:
        """Finish the batch at hand, give the shards back, and end."""
        self._stopping.set()
        self._rung.set()

    def ring(self) -> None:
        """A writer in this process has committed rows. Call it in the relay's event loop."""
        self._rung.set()

    @property
    def shards(self) -> int:
        """How many shards this relay owns."""
        return len(self._holder.held)

    # -- its life -------------------------------------------------------------------------------------------------

    async def run(self, started: Callable[[], None]) -> None:
        """Relay until `stop`. Calls `started` once the database was reached, or could not be.

        Raises BadOutbox if the tables cannot be used from the start. If that happens later, as while an operator
        restores the database, the relay waits until they can be used again."""
        pauses = Backoff(self._stopping, *_RETRY_S)
        first = True
        try:
            while not self._stopping.is_set():
                try:
                    await self._connected(started, pauses)
                except OutboxError as error:
                    if first and isinstance(error, BadOutbox):
                        raise
                    self._figures.lost(str(error))
                first = False
                started()
                await pauses.wait()
        finally:
            await self._close()
            self._thread.end()

    async def _connected(self, started: Callable[[], None], pauses: Backoff) -> None:
        """Connect and work until `stop`. Raises OutboxError when the database cannot be used."""
        await self._thread.run(self._thread.store.open)
        try:
            await self._holder.turn()
            self._figures.found()
            pauses.reset()
            started()
            await self._work()
            if self._stopping.is_set():
                await self._holder.leave()
        finally:
            self._holder.held.clear()
            self._parked.forget()
            await self._close()

    async def _close(self) -> None:
        with contextlib.suppress(OutboxError):
            await self._thread.close()

    async def _work(self) -> None:
        """Run the cycle and the tasks beside it until `stop`. Raises the first error of one of them."""
        flow = asyncio.create_task(self._flow())
        beside = [asyncio.create_task(self._holder.keep()), asyncio.create_task(self._tidy())]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([flow, *beside, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() for task in (flow, *beside)):
                await asyncio.wait([flow], timeout=self._settings.drain_timeout_s)
        finally:
            tasks = [flow, *beside, stopping]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in (*beside, flow):
            if not task.cancelled():
                task.result()

    # -- the cycle ------------------------------------------------------------------------------------------------

    async def _flow(self) -> None:
        polls = Backoff(self._rung, *_POLL_S)
        while not self._stopping.is_set():
            held = self._holder.ours()
            if not held:
                await self._either(self._holder.news())
                continue
            await self._parked.learn(held)
            await self._retry_parked(held)
            self._rung.clear()
            batch = await self._thread.run(self._thread.store.read, held, limit=BATCH_ROWS, max_bytes=BATCH_BYTES)
            self._figures.reading(batch.rows, self._parked.oldest)
            await self._relay(batch, held)
            if batch.rows:
                polls.reset()
                await asyncio.sleep(0 if batch.more else _BREATH_S)
            else:
                await self._either(self._thread.rung(polls.grow()))

    async def _either(self, news: Coroutine[Any, Any, None]) -> None:
        """Wait for the news, for a writer of this process, or for `stop`."""
        tasks = [asyncio.create_task(news), asyncio.create_task(self._rung.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _relay(self, batch: OutboxBatch, held: Mapping[int, int]) -> None:
        """Publish the batch, then advance in those of its shards that are still ours."""
        delivery = BatchDelivery(batch.rows, held, self._parked.lanes_of(batch.rows))
        with self._holder.using(held):
            await self._deliver(delivery)
            lost = await self._thread.run(self._thread.store.advance, batch, delivery.held, delivery.parked)
        ours = delivery.held.keys() - set(lost)
        parked = [each for each in delivery.parked if each.row.shard in ours]
        self._parked.add(parked)
        _report(parked)
        gone = {each.row.id for each in parked}
        self._figures.done([row for row in batch.rows if row.shard in ours and row.id not in gone])

    async def _deliver(self, delivery: BatchDelivery) -> None:
        """Publish until no row is left. A row that the broker does not accept is tried a few times. Then it is parked
        if the broker works otherwise; while the broker does not work, all rows wait."""
        pauses, rounds = Backoff(self._stopping, *_RETRY_S), 0
        while delivery.left:
            delivery.keep(await self._holder.still(delivery.held))
            failed = await self._send(delivery, by_topic=rounds > 0)
            rounds += 1
            if not failed:
                continue
            if rounds >= _ROUNDS and await self._may_park(len(delivery.left)):
                delivery.give_up(failed)
            else:
                self._figures.refused(failed[0].why + self._full)
                await pauses.wait()
                if self._stopping.is_set():
                    delivery.keep({})  # the next owner publishes them

    async def _send(self, delivery: BatchDelivery, *, by_topic: bool) -> Sequence[RowFailure]:
        """Publish the rows that are left once. Returns those that may be accepted later."""
        held = delivery.held
        assert self._holder.identity is not None, "a turn comes before the first batch"
        outbox_id = self._holder.identity.outbox_id
        tags = {shard: (f"{outbox_id}/{shard}", fence) for shard, fence in held.items()}
        fenced_publish = self._broker.features.fenced_publish
        route = Route(self._broker.publish, tags if fenced_publish else {}, by_topic)
        result = await send(delivery.left, route)
        delivery.keep({shard: fence for shard, fence in held.items() if shard not in result.fenced})
        delivery.settle(result.failed)
        for shard, seen in result.fenced.items():
            await self._holder.raise_fence(shard, seen)
        left = {row.id for row in delivery.left}
        return [failure for failure in result.failed if failure.row.id in left]

    async def _may_park(self, rows: int) -> bool:
        """Whether the broker works, so that only these rows are in trouble, and there is room for them."""
        try:
            await asyncio.wait_for(self._broker.topics(), _REACH_S)
        except Exception:  # every kind: while the broker does not work, the rows wait
            return False
        has_room = await self._thread.run(self._thread.store.count_parked) + rows <= MOST_PARKED
        self._full = "" if has_room else f"; {MOST_PARKED:,} events are parked, so all others wait behind this one too"
        return has_room

    # -- beside the cycle -----------------------------------------------------------------------------------------

    async def _retry_parked(self, held: Mapping[int, int]) -> None:
        """Try parked rows again, if it is time. A topic that fails is left out of the next pages, so that it does not
        hold up the others."""
        if not self._parked.is_due:
            return
        published, failed = list[OutboxRow](), list[OutboxRow]()
        with self._holder.using(held):
            for _ in range(_MOST_PAGES):
                rows = await self._parked.page(held, {row.event.topic for row in failed})
                delivery = BatchDelivery(rows, await self._holder.still(held), ())
                if not delivery.left:
                    break
                failures = await self._send(delivery, by_topic=True)
                failed += [failure.row for failure in failures]
                published += await self._unpark(rows, delivery)
        await self._parked.tried(held, published, failed)

    async def _unpark(self, rows: Sequence[OutboxRow], delivery: BatchDelivery) -> Sequence[OutboxRow]:
        """Remove the parked rows that are published now, and return them."""
        refused = [each for each in delivery.parked if each.refused]
        gone = {row.id for row in delivery.left}.union(each.row.id for each in delivery.parked)
        published = [row for row in rows if row.shard in delivery.held and row.id not in gone]
        await self._thread.run(self._thread.store.unpark, delivery.held, published, refused)
        _report(refused)
        self._figures.done(published)
        return published

    async def _tidy(self) -> None:
        """Count the parked rows and delete published ones, if we own the first shard."""
        store = self._thread.store
        while True:
            await asyncio.sleep(_TIDY_EVERY_S)
            if _FIRST_SHARD in self._holder.ours():
                self._figures.parked = await self._thread.run(store.count_parked)
                await self._clean()

    async def _clean(self) -> None:
        """Delete published rows, in steps that are short enough for the database. A failure disturbs nothing else."""
        limit = rows = _CLEAN_ROWS
        while rows == limit:
            await asyncio.sleep(_CLEAN_PAUSE_S)
            try:
                rows = await self._thread.run(self._thread.store.clean, keep_s=self._settings.keep_s, limit=limit)
            except OutboxError as error:
                log.debug("%d rows of the outbox were not deleted: %s", limit, error)
                limit = rows = limit // 4
                if not limit:
                    return


def _report(parked: Sequence[ParkedRow]) -> None:
    """Log rows that wait for an operator, and the first of those that wait for the broker."""
    for row, why, refused in parked:
        event = row.event
        if refused:
            log.error(
                "the broker refuses event %s of topic %s, key %s: %s. The later events of its key wait behind it. "
                "Correct the cause, then run `onward outbox retry`",
                *(event.id, storable(event.topic), storable(event.key or "-"), storable(why)),
            )
    waiting = [each for each in parked if not each.refused and each.why != BEHIND]
    if waiting:
        row, why, _ = waiting[0]
        log.warning(
            "%d events of the outbox wait, and are tried again; the first is for topic %s: %s",
            *(len(waiting), storable(row.event.topic), storable(why)),
        )
