"""The queue of the writer, and the rule that a failed publish stops the later publishes of its keys.

Callers enter jobs and parcels from their event loops. The writer's thread takes them out. One lock guards everything.
"""

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from onward import clock
from onward.brokers.core.publishing import BEHIND
from onward.brokers.sqlite.outgoing import Parcel
from onward.brokers.sqlite.transaction import Chore, Transaction
from onward.errors import Backlogged, BrokerError, Closed, OnwardError, PublishError
from onward.event import Event

T = TypeVar("T")

_MAX_JOBS = 1_000  # per transaction
_MAX_BYTES = 4 << 20  # the bytes of parcels per transaction, but always at least one parcel


class Job(Generic[T]):
    __slots__ = ("future", "loop", "work")

    def __init__(self, work: Callable[[Transaction], T], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()


Answer = tuple[Job[Any] | Parcel, Any, Exception | None]


class Batch:
    """The contents of one transaction, and its results."""

    def __init__(self, parcels: Sequence[Parcel], jobs: Sequence[Job[Any]], chores: Sequence[Chore]) -> None:
        self.parcels = parcels
        self.jobs = jobs
        self.chores = chores
        self.answers: list[Answer] = []
        self.after: list[Callable[[], None]] = []
        self.failed: list[tuple[Chore, Exception]] = []
        self.owners: set[str] = set()  # the owners to wake, because their partitions got events
        self.totals: dict[str, int] = {}  # by log id: all bytes of its topic after this transaction


class WriteQueue:
    def __init__(self, name: str, max_bytes: int) -> None:
        self._name = name
        self._max_bytes = max_bytes  # the limit of waiting parcels, but one call is always accepted
        self._bytes = 0
        self._lock = threading.Condition()
        self._parcels: deque[Parcel] = deque()
        self._failing: set[Parcel] = set()  # they failed, and their callers do not have the answer yet
        self._jobs: deque[Job[Any]] = deque()
        self._chores: list[Chore] = []
        self._closed = False

    # Called from event loops

    def enter_job(self, job: Job[Any]) -> None:
        with self._lock:
            self._check_open()
            self._jobs.append(job)
            self._lock.notify()

    def enter(self, parcels: Sequence[Parcel]) -> None:
        """Queue the parcels of one call. Raises PublishError if an earlier event of the same key has just failed and
        its caller does not have the answer yet."""
        with self._lock:
            self._check_open()
            for failing in self._failing:
                if any(not failing.lanes.isdisjoint(parcel.lanes) for parcel in parcels):
                    raise PublishError(BEHIND.why, refused=_events(parcels))
            size = sum([parcel.size for parcel in parcels])
            if self._bytes and self._bytes + size > self._max_bytes:
                raise Backlogged(
                    f"{self._bytes:,} bytes wait to be written to {self._name}; slow down, or raise "
                    f"max_outgoing_bytes={self._max_bytes:,}",
                    refused=_events(parcels),
                )
            self._parcels.extend(parcels)
            self._bytes += size
            self._lock.notify()

    def answered(self, parcels: Sequence[Parcel]) -> None:
        """The caller of these has its answer, or no longer waits for it."""
        with self._lock:
            for parcel in parcels:
                parcel.answered = True
                self._failing.discard(parcel)
                if not parcel.future.cancel() and not parcel.future.cancelled():
                    parcel.future.exception()  # a cancelled caller does not fetch it, and asyncio would log that

    def withdraw_job(self, job: Job[Any], why: str) -> None:
        self.take_back(job)
        settle([(job.future, None, BrokerError(why))])

    def take_back(self, job: Job[Any]) -> bool:
        """Take a job out of the queue. False if the writer has already taken it."""
        with self._lock:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            return True

    def withdraw(self, parcels: Sequence[Parcel], why: str) -> None:
        """Fail a call, and all later calls that share a key with it. Parcels that are being written are reported as
        unknown: they may be stored."""
        with self._lock:
            open_ones = [parcel for parcel in parcels if not parcel.future.done() and parcel not in self._failing]
            queued = [parcel for parcel in open_ones if parcel in self._parcels]
            for parcel in queued:
                self._take_out(parcel)
            behind = self._bring_down(open_ones)
        taken = [parcel for parcel in open_ones if parcel not in queued]
        settle([(parcel.future, None, PublishError(why, unknown=parcel.events)) for parcel in taken])
        answer(refused([*queued, *behind], why))

    def close(self) -> None:
        """Accept nothing more. The writer still takes what is in the queue."""
        with self._lock:
            self._closed = True
            self._chores.clear()
            self._lock.notify()

    # Called from any thread

    @property
    def has_callers(self) -> bool:
        """Whether a caller waits for an answer."""
        with self._lock:
            return bool(self._parcels or self._jobs)

    def add(self, chore: Chore) -> None:
        with self._lock:
            self._check_open()
            self._chores.append(chore)
            self._lock.notify()

    def remove(self, chore: Chore) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._chores.remove(chore)

    def kick(self, chore: Chore, at: float = 0.0) -> None:
        """Make the chore due at this time, if it is not due earlier."""
        with self._lock:
            if at < chore.due:
                chore.due = at
                self._lock.notify()

    def bring_down(self, failed: Sequence[Parcel]) -> list[Parcel]:
        """These parcels have failed. Take the parcels behind them out of the queue, and return those.

        Either all events of a parcel are written or none. So if a parcel with a key fails, every later parcel with an
        event of that key fails too. The key stays closed until the caller has its answer, because until then the caller
        may enter the next event.
        """
        with self._lock:
            return self._bring_down(failed)

    def _bring_down(self, failed: Sequence[Parcel]) -> list[Parcel]:
        lanes = set().union(*[parcel.lanes for parcel in failed])
        behind = []
        for parcel in tuple(self._parcels) if lanes else ():
            if not lanes.isdisjoint(parcel.lanes):
                lanes |= parcel.lanes
                self._take_out(parcel)
                behind.append(parcel)
        self._failing.update(parcel for parcel in (*failed, *behind) if not parcel.answered)
        return behind

    def _take_out(self, parcel: Parcel) -> None:
        self._parcels.remove(parcel)
        self._bytes -= parcel.size

    def fail_all(self, why: BrokerError, *, chores_at: float = math.inf) -> None:
        """Fail everything that waits. Chores become due at `chores_at`, not earlier."""
        with self._lock:
            jobs, parcels = tuple(self._jobs), tuple(self._parcels)
            self._jobs.clear()
            self._parcels.clear()
            self._bytes = 0
            self._bring_down(parcels)
            for chore in self._chores:
                chore.due = max(chore.due, chores_at)
        answer([(job, None, why) for job in jobs])
        answer(refused(parcels, str(why)))

    # Called by the writer's thread

    def wait(self) -> bool:
        """Wait until there is work. False if the queue is closed and empty."""
        with self._lock:
            while not self._parcels and not self._jobs:
                if self._closed:
                    return False
                rest = min((chore.due for chore in self._chores), default=math.inf) - clock.now()
                if rest <= 0:
                    break
                self._lock.wait(None if rest == math.inf else rest)
        return True

    def take(self) -> Batch:
        """Take as much out of the queue as fits into a short transaction."""
        with self._lock:
            parcels: list[Parcel] = []
            room = _MAX_BYTES
            while self._parcels and len(parcels) < _MAX_JOBS and (not parcels or self._parcels[0].size <= room):
                parcels.append(self._parcels.popleft())
                room -= parcels[-1].size
                self._bytes -= parcels[-1].size
            jobs = [self._jobs.popleft() for _ in range(min(_MAX_JOBS, len(self._jobs)))]
            now = clock.now()
            chores = [chore for chore in self._chores if chore.due <= now]
            for chore in chores:
                chore.due = math.inf
            return Batch(parcels, jobs, chores)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the broker on {self._name} is closed")


def _events(parcels: Iterable[Parcel]) -> list[Event]:
    return [event for parcel in parcels for event in parcel.events]


def refused(parcels: Iterable[Parcel], why: str) -> list[Answer]:
    return [(parcel, None, PublishError(why, refused=parcel.events)) for parcel in parcels]


def answer(answers: Iterable[Answer]) -> None:
    """Give the answers to the waiting callers, with one call into each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, Exception | None]]] = {}
    for job, result, error in answers:
        loops.setdefault(job.loop, []).append((job.future, result, error))
    for loop, settled in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits for the answer
            loop.call_soon_threadsafe(settle, settled)


def settle(answers: Iterable[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
    for future, result, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


async def outcomes(parcels: Sequence[Parcel]) -> list[tuple[Parcel, Exception]]:
    """Wait for all parcels, and return those that failed."""
    failures: list[tuple[Parcel, Exception]] = []
    for parcel in parcels:
        try:
            await parcel.future
        except OnwardError as error:
            failures.append((parcel, error))
    return failures
