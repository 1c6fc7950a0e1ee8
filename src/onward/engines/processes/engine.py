"""The process engine: who gets what, when, and what happens when a worker is late or dies."""

import asyncio
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Sequence

from onward.clock import now
from onward.engines.base import Ended, EngineHealth, MayStartUntil, Report, Work, always, drained
from onward.engines.processes import wire
from onward.engines.processes.pace import Pace
from onward.engines.processes.worker import WorkerHandle, size_of
from onward.engines.target import main_file
from onward.errors import BadHandler, HandlerTimeout, WorkerDied

log = logging.getLogger("onward")

_AHEAD_BYTES = 1 << 20  # what a worker has at hand, unless one event has more
_SLOW_S = 0.03  # behind a run that takes longer nothing waits, if others could run it
_START_S = 60.0  # importing the handler may take so long
_LEAVE_S = 5.0  # a worker that was told to end does so within
_CLOSE_S = 1.0
_SWEEP_S = 0.05  # how often what waits is asked about: a partition that was lost is not to be waited for
_REAP_S = 0.02  # how long a worker that closed its socket may take to be gone
_TRIES = 4  # workers in a row that did nothing but die, after which the engine gives up
_BACKOFF_S = 0.2
_YOUNG_S = 30.0  # a worker that lived longer did not die of its start


class ProcessEngine:
    """Runs a handler, `def` or `async def`, in `workers` processes, one call at a time in each.

    The handler is named by its import path. What is not started yet stays here, but for the little that a worker
    has at hand. A worker that dies, or is killed because its run is over its time, costs that run alone: the rest of
    what it had is run by others, in order. With `max_events_per_worker` a worker is replaced after so many.
    """

    def __init__(
        self,
        target: str,
        *,
        batch: bool = False,
        workers: int,
        concurrency: int,
        timeout_s: float | None,
        max_events_per_worker: int | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self._size = min(workers, concurrency)
        self._timeout_s = timeout_s
        self._max_events = max_events_per_worker or sys.maxsize
        self._setup = _setup(target, batch, timeout_s)
        self._queue: deque[Work] = deque()
        self._workers: list[WorkerHandle] = []
        self._pace = Pace()
        self._failures = 0  # workers in a row that did nothing but die
        self._restarted = 0
        self._gone: list[WorkerHandle] = []  # buried, and not ended yet
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        self._swept_at = 0.0
        self._closing = False

    def start(self, ended: Report, may_start_until: MayStartUntil = always) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._may_start_until = may_start_until
        for _ in range(self._size):
            self._hire()

    def submit(self, work: Sequence[Work]) -> None:
        if self._closing or self.failure is not None:
            self._loop.call_soon(self._report, [Ended(each, cancelled=True) for each in work])
            return
        self._queue.extend(work)
        self._feed()
        self._watch()

    def health(self) -> EngineHealth:
        at = now()
        ages = [age_s for worker in self._workers if (age_s := worker.running_s(at)) is not None]
        alive = sum(worker.ready for worker in self._workers)
        return EngineHealth(alive, len(ages), self._restarted, max(ages, default=None))

    async def drain(self, deadline_s: float) -> bool:
        return await drained(lambda: not self._queue and not any(worker.owned for worker in self._workers), deadline_s)

    async def close(self) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        workers, self._workers = self._workers, []
        ended: list[Ended] = []
        for worker in workers:
            worker.mute()
            ended += worker.hear()
            self._queue.extendleft(reversed([*worker.returned, *worker.owned.values()]))
            if worker.owned or not worker.ready:
                worker.kill()
            elif not worker.retired:
                worker.retire()
        self._report(ended + self._cancelled())
        await _see_off(workers + self._gone)

    # -- giving out ---------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give workers something to do: as evenly as there is work, and no more than they have at hand."""
        if not self._queue:
            return
        at = now()
        rooms = [(worker, room) for worker in self._workers if (room := self._room(worker, at))]
        for left, (worker, room) in zip(range(len(rooms), 0, -1), rooms, strict=True):
            share = -(-len(self._queue) // left)
            works, until = self._next(min(room, share), at)
            if not works:
                break
            worker.give(works, until)
            if worker.given >= self._max_events:
                worker.leaving = True
                self._hire()

    def _room(self, worker: WorkerHandle, at: float) -> int:
        """How many events a worker may get now."""
        room = min(self._pace.window - len(worker.owned), self._max_events - worker.given)
        if room <= 0 or not worker.ready or worker.dead or worker.clogged:
            return 0
        if worker.owned and (worker.bytes >= _AHEAD_BYTES or (worker.running_s(at) or 0.0) > _SLOW_S):
            return 0
        return room

    def _next(self, count: int, at: float) -> tuple[list[Work], float]:
        """The first works of the queue that may still start, as many as fit, and until when they may."""
        works: list[Work] = []
        size, until = 0, math.inf
        while self._queue and len(works) < count:
            size += size_of(self._queue[0])
            if works and size > _AHEAD_BYTES:
                break
            work = self._queue.popleft()
            limit = self._may_start_until(work)
            if at < limit:
                works.append(work)
                until = min(until, limit)
            else:
                self._loop.call_soon(self._report, [Ended(work, cancelled=True)])
        return works, until

    def _sweep(self, at: float) -> None:
        """Hand back what waits and may not start any more, also what a worker has at hand."""
        self._swept_at = at
        lost = [work for work in self._queue if at >= self._may_start_until(work)]
        if lost:
            known = set(map(id, lost))
            self._queue = deque(work for work in self._queue if id(work) not in known)
            self._report([Ended(work, cancelled=True) for work in lost])
        for worker in self._workers:
            if any(at >= self._may_start_until(work) for work in worker.owned.values()):
                worker.recall()

    # -- hearing ------------------------------------------------------------------------------------------------

    def _heard(self, worker: WorkerHandle) -> None:
        """A worker's socket can be read."""
        self._take(worker, worker.hear())
        self._feed()
        self._watch()

    def _take(self, worker: WorkerHandle, ended: list[Ended]) -> None:
        count, busy_s = worker.pace()
        if count:
            self._pace.ran(count, busy_s)
        if worker.returned:
            self._queue.extendleft(reversed(worker.returned))
            worker.returned = []
        if worker.unfit is not None or worker.dead:
            ended += self._bury(worker, None)
        elif worker.leaving and not worker.owned and not worker.retired:
            worker.retire()
            self._loop.call_later(_LEAVE_S, worker.kill)
        self._report(ended)

    def _report(self, ended: Sequence[Ended]) -> None:
        if ended:
            self._ended(ended)

    def _watch(self) -> None:
        """Look at busy workers again: soon while they get on and have more to do, seldom while they do not."""
        most = max([len(worker.owned) for worker in self._workers], default=0)
        if not most:
            return
        look_at = self._loop.time() + self._pace.next_look_s(most)
        if self._timer is not None:
            if self._look_at <= look_at:
                return
            self._timer.cancel()
        self._look_at = look_at
        self._timer = self._loop.call_at(look_at, self._look)

    def _look(self) -> None:
        self._timer = None
        self._pace.looked(self._loop.time() - self._look_at)
        at = now()
        for worker in list(self._workers):
            self._take(worker, worker.glance())
            if worker.owned and worker in self._workers:
                self._check(worker, at)
        if at - self._swept_at > _SWEEP_S:
            self._sweep(at)
        self._feed()
        self._watch()

    def _check(self, worker: WorkerHandle, at: float) -> None:
        """A worker that runs: is it late, gone or slow?"""
        running_s = worker.running_s(at) or 0.0
        if self._timeout_s is not None and running_s > self._timeout_s:
            worker.kill()
            timeout = HandlerTimeout(
                f"the handler ran longer than timeout_s={self._timeout_s:g}; its worker was killed"
            )
            self._report(self._bury(worker, timeout))
        elif self._pace.resting and worker.ended():
            self._report(self._bury(worker, None))  # a process that it forked still holds its end of the line
        elif running_s > _SLOW_S and len(worker.owned) > 1 and len(self._workers) > 1:
            worker.recall()

    # -- coming and going ---------------------------------------------------------------------------------------

    def _hire(self) -> None:
        if self._closing or self.failure is not None:
            return
        try:
            worker = WorkerHandle(self._setup, self._heard)
        except OSError as error:
            self._retry(f"a worker process cannot be started: {error}")
            return
        self._workers.append(worker)
        self._loop.call_later(_START_S, self._check_start, worker)

    def _check_start(self, worker: WorkerHandle) -> None:
        if not worker.ready and worker in self._workers:
            worker.unfit = f"importing {self._setup.target} took more than {_START_S:g} s"
            self._take(worker, [])

    def _bury(self, worker: WorkerHandle, timeout: HandlerTimeout | None) -> list[Ended]:
        """A worker is gone or has to go: charge what it was running, and have the rest run by others."""
        self._workers.remove(worker)
        worker.mute()
        if not worker.retired:
            _wait(worker)
        ended = worker.hear()
        begun = worker.begun()
        fate = "was killed, because its run was over its time" if timeout else worker.epitaph()
        if begun is not None:
            died = WorkerDied(f"worker process {worker.pid} {fate} while it ran this event")
            ended.append(Ended(begun, timeout or died))
        self._queue.extendleft(reversed([*worker.returned, *worker.owned.values()]))
        useful = begun is not None or worker.finished > 0 or now() - worker.born > _YOUNG_S
        worker.close()
        self._reap(worker)
        if not worker.retired:
            self._replace(worker, fate, useful)
        return ended + (self._cancelled() if self.failure is not None else [])

    def _replace(self, worker: WorkerHandle, fate: str, useful: bool) -> None:
        self._restarted += 1
        if not useful:
            self._retry(worker.unfit or f"worker process {worker.pid} {fate} before it ran anything")
            return
        log.warning("%s: worker process %d %s; another takes its place", self._setup.target, worker.pid, fate)
        self._failures = 0
        if not worker.leaving:  # or that has happened already
            self._hire()

    def _retry(self, why: str) -> None:
        """A worker could not do anything: try another after a while, or give up."""
        self._failures += 1
        if self._failures < _TRIES:
            log.error("%s: %s", self._setup.target, why)
            self._loop.call_later(_BACKOFF_S * 2**self._failures, self._hire)
        elif self.failure is None:
            self.failure = BadHandler(f"worker processes of {self._setup.target} do not start: {why}")
            # Even if there is nothing to report: somebody has to hear that nothing more will come.
            self._loop.call_soon(self._ended, self._cancelled())

    def _cancelled(self) -> list[Ended]:
        waiting, self._queue = self._queue, deque()
        return [Ended(work, cancelled=True) for work in waiting]

    def _reap(self, worker: WorkerHandle) -> None:
        """Leave no zombie: look after a buried worker until its process is gone."""
        self._gone = [each for each in self._gone if each is not worker and not each.ended()]
        if not worker.ended():
            self._gone.append(worker)
            self._loop.call_later(_LEAVE_S, self._reap, worker)


def _setup(target: str, batch: bool, timeout_s: float | None) -> wire.Setup:
    root = logging.getLogger()
    shown = next((each for each in root.handlers if type(each) is logging.StreamHandler), None)
    return wire.Setup(
        target=target,
        batch=batch,
        timeout_s=timeout_s,
        argv=sys.argv,
        main=main_file() if target.startswith("__main__:") else None,
        log_level=root.level if shown else None,
        log_format=getattr(shown and shown.formatter, "_fmt", None) or logging.BASIC_FORMAT,
    )


def _wait(worker: WorkerHandle) -> None:
    """For the end of a process that closed its socket or was killed. It is a matter of microseconds."""
    deadline = time.monotonic() + _REAP_S
    while not worker.ended() and time.monotonic() < deadline:
        time.sleep(0.0005)
    worker.kill()


async def _see_off(workers: Sequence[WorkerHandle]) -> None:
    """Wait for the ends of these processes, and end what does not end by itself."""
    try:
        for patience_s in (_CLOSE_S, _LEAVE_S):
            deadline = now() + patience_s
            while now() < deadline and not all(worker.ended() for worker in workers):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            for worker in workers:
                worker.kill()
    finally:
        for worker in workers:
            worker.kill()
            worker.close()
