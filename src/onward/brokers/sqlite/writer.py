"""The writer: one thread per broker object that does all writes, in short group commits.

It takes the lock file, begins a transaction, and only then takes the work out of the queue. So all callers that waited
share one commit, and a caller that waited too long can still be withdrawn. Parcels (publishes) are appended together.
Every other job has its own savepoint, so it can fail alone.
"""

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from onward import clock
from onward.brokers.core.publishing import BEHIND
from onward.brokers.sqlite import leases
from onward.brokers.sqlite.bells import Bells
from onward.brokers.sqlite.gate import Gate
from onward.brokers.sqlite.lock_wait import LockWait
from onward.brokers.sqlite.outgoing import Appended, Appender, Parcel
from onward.brokers.sqlite.queue import Batch, Job, WriteQueue, answer, outcomes, refused
from onward.brokers.sqlite.store import Store, error_code
from onward.brokers.sqlite.transaction import Transaction, guarded
from onward.errors import BrokerError, Closed, PublishError, StoreLost
from onward.settings import Settings

_RETRY_S = 0.5  # the pause before a failed chore is tried again
_BUSY_S = 1.0  # how long to try to begin a transaction
_TRY_AGAIN_S = 0.001
_STOP_S = 1.5  # must be longer than _BUSY_S

T = TypeVar("T")


class Writer:
    def __init__(self, store: Store, gate: Gate, bells: Bells, courier: Appender, settings: Settings) -> None:
        self.queue = WriteQueue(str(store.path), settings.max_outgoing_bytes)
        self._store = store
        self._gate = gate
        self._bells = bells
        self._courier = courier
        self._timeout_s = settings.publish_timeout_s
        self.lock_wait = LockWait(store.path)
        self._db = store.connect_watched()
        self._db.execute("PRAGMA busy_timeout=0")  # see _begin
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"onward-writer-{store.path.name}", daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[Transaction], T]) -> T:
        """Run the work inside a transaction, and return its result after the commit."""
        return await self.done(self.enter(work))

    def enter(self, work: Callable[[Transaction], T]) -> Job[T]:
        job = Job(work, asyncio.get_running_loop())
        self.queue.enter_job(job)
        return job

    async def done(self, job: Job[T]) -> T:
        timer = job.loop.call_later(self._timeout_s, lambda: self.queue.withdraw_job(job, self.too_late()))
        try:
            return await job.future
        except asyncio.CancelledError:
            self.queue.take_back(job)
            raise
        finally:
            timer.cancel()

    async def publish(self, parcels: Sequence[Parcel]) -> list[tuple[Parcel, Exception]]:
        """Append the parcels in this order, after all earlier ones. Returns those that failed.

        If the caller is cancelled, the parcels are still written, because later events of their keys may be in the
        queue.
        """
        loop = asyncio.get_running_loop()
        self.queue.enter(parcels)
        timer = loop.call_later(self._timeout_s, lambda: self.queue.withdraw(parcels, self.too_late()))
        try:
            return await outcomes(parcels)
        finally:
            timer.cancel()
            self.queue.answered(parcels)

    def too_late(self) -> str:
        """Why the work was not written in time."""
        slow = f"writing to {self._store.path} is too slow; the disk or the machine is overloaded"
        return f"not done within {self._timeout_s:g} s: {self.obstacle() or slow}"

    def obstacle(self) -> str:
        """Which other program prevents this process from writing now. "" if none is known."""
        return self.lock_wait.why or self._gate.obstacle()

    async def stop(self) -> None:
        """Finish the work in the queue, then end the thread. Work that cannot be written in time is refused."""
        self.queue.close()
        # Wait a little longer than any caller does. Without callers the wait is short, because another program may
        # hold the lock forever.
        limit_s = self._timeout_s if self.queue.has_callers else 0.0
        await asyncio.wait({asyncio.wrap_future(self._ended)}, timeout=limit_s + _STOP_S)
        # If the thread still waits in the kernel for the lock, that is harmless: it is a daemon, and it will find an
        # empty queue.
        self.queue.fail_all(Closed(f"the broker on {self._store.path} was closed before this could be written"))

    # In the writer's thread

    def _run(self) -> None:
        try:
            while self.queue.wait():
                self._flush()
        finally:
            self._db.close()
            self._gate.close()
            self.queue.close()
            self._ended.set_result(None)

    def _flush(self) -> None:
        try:
            with self._gate.held():
                batch, rings = self._transaction()
        except OSError as error:
            return self.queue.fail_all(BrokerError(str(error)), chores_at=clock.now() + _RETRY_S)
        if not self._bells.ring(batch.owners) or rings:
            self._gate.ring()
        for after in batch.after:
            after()
        for chore, failure in batch.failed:
            chore.failed(failure)
            self.queue.kick(chore, clock.now() + _RETRY_S)
        answer(batch.answers)

    def _transaction(self) -> tuple[Batch, bool]:
        """Run one transaction. Returns its contents, and whether to wake all readers instead of only some owners."""
        self.lock_wait.begin()
        try:
            self._begin()
        except sqlite3.Error as error:
            why = self._store.explained(error)
            if error_code(error) == sqlite3.SQLITE_BUSY:
                # Another program writes. Callers wait until their own timeouts end.
                self.lock_wait.why = str(why)
                return Batch((), (), ()), False
            self.lock_wait.end()
            batch = self.queue.take()
            self._roll_back(batch, why, certain=True)
            return batch, False
        self.lock_wait.end()
        batch = self.queue.take()
        tx = Transaction(self._db)
        committing = False
        try:
            self._store.compare(self._db)
            self._do_jobs(tx, batch)  # before the chores, so that a settle takes effect before the release after it
            self._do_chores(tx, batch)
            self._append(tx, batch)
            self._store.check(self._db)
            committing = True
            self._db.execute("COMMIT")
            self._store.committed(batch.totals)
        except StoreLost as lost:
            self._roll_back(batch, lost, certain=True)
            return batch, False
        except sqlite3.Error as error:
            certain = not committing or error_code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)
            self._roll_back(batch, self._store.explained(error), certain=certain)
            return batch, False
        return batch, tx.rings

    def _begin(self) -> None:
        """Begin to write. SQLite itself sleeps up to 0.1 s between two attempts. Then an application that writes one
        transaction after the other would hardly ever let us in."""
        end = clock.now() + _BUSY_S
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error_code(error) != sqlite3.SQLITE_BUSY or clock.now() >= end:
                    raise
            time.sleep(_TRY_AGAIN_S)

    def _do_chores(self, tx: Transaction, batch: Batch) -> None:
        for chore in batch.chores:
            outcome = guarded(tx, chore.work)
            if outcome.result is not None:
                batch.after.append(outcome.result)
            elif isinstance(outcome.error, StoreLost):
                self._store.gone_back(str(outcome.error))
            elif outcome.error is not None:
                batch.failed.append((chore, outcome.error))

    def _do_jobs(self, tx: Transaction, batch: Batch) -> None:
        for job in batch.jobs:
            outcome = guarded(tx, job.work)
            error = outcome.error
            if isinstance(error, sqlite3.Error):
                error = self._store.explained(error)
            if error is not None:
                self._courier.forget()  # it may have declared a topic
            batch.answers.append((job, outcome.result, error))

    def _append(self, tx: Transaction, batch: Batch) -> None:
        if not batch.parcels:
            return
        outcome = guarded(tx, lambda tx: self._courier.append(tx.db, batch.parcels, tx.wall))
        errors, parts, batch.totals = outcome.result or Appended({}, [], {})
        if outcome.error is not None:
            self._courier.forget()
            error = outcome.error
            why = str(self._store.explained(error)) if isinstance(error, sqlite3.Error) else repr(error)
            errors = {parcel: PublishError(why, refused=parcel.events) for parcel in batch.parcels}
        batch.owners = leases.live_owners(tx.db, parts, tx.now)  # in this transaction: the next may change ownership
        batch.answers.extend((parcel, None, errors.get(parcel)) for parcel in batch.parcels)
        if errors:
            batch.answers.extend(refused(self.queue.bring_down(list(errors)), BEHIND.why))

    def _roll_back(self, batch: Batch, why: BrokerError, *, certain: bool) -> None:
        """Fail the whole transaction. If it is not `certain` that it failed, its parcels are reported as unknown: they
        may be stored."""
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
        self._courier.forget()
        batch.after.clear()
        batch.owners.clear()
        batch.failed[:] = [(chore, why) for chore in batch.chores]
        # Keep the answers of parcels that were already refused, and of those behind them.
        batch.answers[:] = [entry for entry in batch.answers if isinstance(entry[0], Parcel) and entry[2] is not None]
        answered = {entry[0] for entry in batch.answers}
        batch.answers.extend((job, None, why) for job in batch.jobs)
        failed = [parcel for parcel in batch.parcels if parcel not in answered]
        for parcel in failed:
            named = {"refused": parcel.events} if certain else {"unknown": parcel.events}
            batch.answers.append((parcel, None, PublishError(str(why), **named)))
        batch.answers.extend(refused(self.queue.bring_down(failed), str(why)))
