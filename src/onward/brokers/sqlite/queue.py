"""What waits for the writer, and the rule that a failed publish takes down what stands behind it.

Callers enter jobs and parcels from their event loops; the writer's thread takes them. One lock guards it all.
"""

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from onward import clock
from onward.brokers.sqlite.outgoing import BEHIND, Parcel
from onward.brokers.sqlite.transaction import Chore, Transaction
from onward.errors import BrokerError, Closed, OnwardError, PublishError

T = TypeVar("T")

_MAX_JOBS = 1_000  # per transaction
_MAX_BYTES = 4 << 20  # of parcels per transaction, but always one parcel


class Job(Generic[T]):
    __slots__ = ("future", "loop", "work")

    def __init__(self, work: Callable[[Transaction], T], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()


Answer = tuple[Job[Any] | Parcel, Any, Exception | None]


class Batch:
    """What goes into one transaction, and what became of it."""

    def __init__(self, parcels: Sequence[Parcel], jobs: Sequence[Job[Any]], chores: Sequence[Chore]) -> None:
        self.parcels = parcels
        self.jobs = jobs
        self.chores = chores
        self.answers: list[Answer] = []
        self.after: list[Callable[[], None]] = []
        self.failed: list[tuple[Chore, Exception]] = []


class Queue:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Condition()
        self._parcels: deque[Parcel] = deque()
        self._failing: set[Parcel] = set()  # failed, and their callers have not heard of it yet
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
        """PublishError: an earlier event of the same topic has just failed, and its caller does not know yet."""
        with self._lock:
            self._check_open()
            for failing in self._failing:
                if any(not failing.topics.keys().isdisjoint(parcel.topics) for parcel in parcels):
                    raise PublishError(BEHIND, refused=[event for parcel in parcels for event in parcel.events])
            self._parcels.extend(parcels)
            self._lock.notify()

    def heard(self, parcels: Sequence[Parcel]) -> None:
        """Their callers have the answer, or wait for none any more."""
        with self._lock:
            for parcel in parcels:
                parcel.heard = True
                self._failing.discard(parcel)
                if not parcel.future.cancel() and not parcel.future.cancelled():
                    parcel.future.exception()  # nobody else asks, where the caller was cancelled

    def withdraw_job(self, job: Job[Any], why: str) -> None:
        self.take_back(job)
        settle([(job.future, None, BrokerError(why))])

    def take_back(self, job: Job[Any]) -> bool:
        """Take a job out of the queue; False: it is being done, or done."""
        with self._lock:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            return True

    def withdraw(self, parcels: Sequence[Parcel], why: str) -> None:
        """Take a call out, with all that stand behind it. What is being written already has an unknown fate."""
        with self._lock:
            open_ones = [parcel for parcel in parcels if not parcel.future.done() and parcel not in self._failing]
            queued = [parcel for parcel in open_ones if parcel in self._parcels]
            for parcel in queued:
                self._parcels.remove(parcel)
            behind = self._bring_down(open_ones)
        taken = [parcel for parcel in open_ones if parcel not in queued]
        settle([(parcel.future, None, PublishError(why, unknown=parcel.events)) for parcel in taken])
        answer(refused([*queued, *behind], why))

    def close(self) -> None:
        """Nothing is entered any more. What was, is still taken."""
        with self._lock:
            self._closed = True
            self._chores.clear()
            self._lock.notify()

    # Called from any thread

    @property
    def has_callers(self) -> bool:
        """Does somebody wait for an answer?"""
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
        """The chore falls due at this time, if not before."""
        with self._lock:
            if at < chore.due:
                chore.due = at
                self._lock.notify()

    def bring_down(self, failed: Sequence[Parcel]) -> list[Parcel]:
        """These have failed: take out of the queue, and answer, what stands behind them.

        Per key a failure takes down whatever was entered after it; what shares no topic shares no key. Their topics
        stay closed until each caller has heard of its failure, for until then it may enter the next event.
        """
        with self._lock:
            return self._bring_down(failed)

    def _bring_down(self, failed: Sequence[Parcel]) -> list[Parcel]:
        topics = {topic for parcel in failed for topic in parcel.topics}
        behind = []
        for parcel in tuple(self._parcels):
            if not topics.isdisjoint(parcel.topics):
                topics.update(parcel.topics)
                self._parcels.remove(parcel)
                behind.append(parcel)
        self._failing.update(parcel for parcel in (*failed, *behind) if not parcel.heard)
        return behind

    def fail_all(self, why: BrokerError, *, chores_at: float = math.inf) -> None:
        """Everything that waits has failed; chores are due again at some later time."""
        with self._lock:
            jobs, parcels = tuple(self._jobs), tuple(self._parcels)
            self._jobs.clear()
            self._parcels.clear()
            self._bring_down(parcels)
            for chore in self._chores:
                chore.due = max(chore.due, chores_at)
        answer([(job, None, why) for job in jobs])
        answer(refused(parcels, str(why)))

    # Called by the writer's thread

    def wait(self) -> bool:
        """Wait until there is something to do; False when there will be nothing more."""
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
        """What has queued up, as much as a short transaction can hold."""
        with self._lock:
            parcels: list[Parcel] = []
            room = _MAX_BYTES
            while self._parcels and len(parcels) < _MAX_JOBS and (not parcels or self._parcels[0].size <= room):
                parcels.append(self._parcels.popleft())
                room -= parcels[-1].size
            jobs = [self._jobs.popleft() for _ in range(min(_MAX_JOBS, len(self._jobs)))]
            now = clock.now()
            chores = [chore for chore in self._chores if chore.due <= now]
            for chore in chores:
                chore.due = math.inf
            return Batch(parcels, jobs, chores)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the broker on {self._name} is closed")


def refused(parcels: Iterable[Parcel], why: str) -> list[Answer]:
    return [(parcel, None, PublishError(why, refused=parcel.events)) for parcel in parcels]


def answer(answers: Iterable[Answer]) -> None:
    """Hand the answers to the waiting callers, with one call into each of their loops."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, Exception | None]]] = {}
    for job, result, error in answers:
        loops.setdefault(job.loop, []).append((job.future, result, error))
    for loop, settled in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the answer
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
    """Wait for all of them; answers those that failed."""
    failures: list[tuple[Parcel, Exception]] = []
    for parcel in parcels:
        try:
            await parcel.future
        except OnwardError as error:
            failures.append((parcel, error))
    return failures
