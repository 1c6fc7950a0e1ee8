"""The process engine: gives work to its workers, and replaces a worker that exceeds its time or dies."""

import asyncio
import logging
import sys
from collections.abc import Iterable, Sequence

from onward.clock import now
from onward.engines.base import Ended, EngineHealth, MayStartUntil, Report, Work, always, drained
from onward.engines.processes import wire
from onward.engines.processes.pace import Pace
from onward.engines.processes.pool import WorkerPool
from onward.engines.processes.timer import LookTimer
from onward.engines.processes.work_queue import WorkQueue
from onward.engines.processes.worker import WorkerHandle
from onward.engines.runner import overrun
from onward.engines.target import main_file
from onward.errors import BadHandler, HandlerTimeout, WorkerDied
from onward.event import Delivery

_AHEAD_BYTES = 1 << 20  # the most that a worker has at hand, unless one event is larger
_SLOW_S = 0.03  # no work waits behind a run that takes longer, if another worker could run it
_LOCATE_S = 0.5  # how long a worker that exceeds its time may take to report its handler's line
_SWEEP_S = 0.05  # how often the engine checks whether waiting work may still start: its partition may be lost


class ProcessEngine:
    """Runs a handler, `def` or `async def`, in `workers` processes, one call at a time in each.

    The handler is named by its import path. Work waits here, except the little that each worker has at hand. If a
    worker dies, or is killed because its run exceeded `timeout_s`, only that run fails: other workers run the rest of
    its work, in order. With `max_events_per_worker` a worker is replaced after that many events.
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
        self._timeout_s = timeout_s
        self._queue = WorkQueue()
        self._pool = WorkerPool(
            _setup(target, batch, timeout_s),
            size=min(workers, concurrency),
            max_events=max_events_per_worker or sys.maxsize,
            readable=self._on_readable,
            gave_up=self._gave_up,
        )
        self._pace = Pace()
        self._timer = LookTimer(self._look)
        self._swept_at = 0.0
        self._closing = False

    def start(self, ended: Report, may_start_until: MayStartUntil = always) -> None:
        self._ended = ended
        self._queue.may_start_until = may_start_until
        self._pool.start()

    def submit(self, work: Sequence[Work]) -> None:
        if self._closing or self.failure is not None:
            self._report_soon(_cancelled(work))
            return
        self._queue.add(work)
        self._feed()
        self._watch()

    def health(self) -> EngineHealth:
        at, workers = now(), self._pool.workers
        ages = [age_s for worker in workers if (age_s := worker.running_s(at)) is not None]
        alive = sum(worker.ready for worker in workers)
        return EngineHealth(alive, len(ages), self._pool.restarted, max(ages, default=None))

    async def drain(self, deadline_s: float) -> bool:
        return await drained(lambda: not self._queue and not any(each.owned for each in self._pool.workers), deadline_s)

    async def close(self) -> None:
        self._closing = True
        self._timer.cancel()
        ended: list[Ended] = []
        for worker in self._pool.close():
            worker.mute()
            ended += worker.read()
            self._queue.put_back(worker.unstarted())
            if worker.owned or not worker.ready:
                worker.kill()
            elif not worker.retired:
                worker.retire()
        self._report(ended + _cancelled(self._queue.take_all()))
        await self._pool.wait_ended()

    # -- giving work to workers ---------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Divide the work evenly, and give no worker more than it should have at hand."""
        if not self._queue:
            return
        at = now()
        rooms = [(worker, room) for worker in self._pool.workers if (room := self._room(worker, at))]
        for sharers, (worker, room) in zip(range(len(rooms), 0, -1), rooms, strict=True):
            share = -(-len(self._queue) // sharers)
            works, until, late = self._queue.take(min(room, share), _AHEAD_BYTES, at)
            if late:
                self._report_soon(_cancelled(late))
            if not works:
                break
            worker.give(works, until)
            if not worker.left:
                self._pool.hire()

    def _room(self, worker: WorkerHandle, at: float) -> int:
        """How many events a worker may get now."""
        room = min(self._pace.window - len(worker.owned), worker.left)
        if room <= 0 or not worker.ready or worker.dead or worker.clogged:
            return 0
        if worker.owned and (worker.bytes >= _AHEAD_BYTES or (worker.running_s(at) or 0.0) > _SLOW_S):
            return 0
        return room

    def _sweep(self, at: float) -> None:
        """Cancel waiting work that may not start any more, and recall it from the workers."""
        self._swept_at = at
        self._report(_cancelled(self._queue.take_late(at)))
        for worker in self._pool.workers:
            if any(self._queue.is_late(work, at) for work in worker.owned.values()):
                worker.ask(wire.RECALL)

    # -- reading results ----------------------------------------------------------------------------------------

    def _on_readable(self, worker: WorkerHandle) -> None:
        """A worker's socket can be read."""
        self._take(worker, worker.read())
        if worker.where is not None and worker in self._pool.workers:
            self._check(worker, now())
        self._feed()
        self._watch()

    def _take(self, worker: WorkerHandle, ended: list[Ended]) -> None:
        if ended:
            self._pace.ran(ended[0].took_s or 0.0)  # a worker reports the mean for each of its runs
        if worker.returned:
            self._queue.put_back(worker.returned)
            worker.returned = []
        if worker.unfit is not None or worker.dead:
            ended += self._end_worker(worker, None)
        elif not worker.left and not worker.owned and not worker.retired:
            self._pool.retire(worker)
        self._report(ended)

    def _report(self, ended: Sequence[Ended]) -> None:
        if ended:
            self._ended(ended)

    def _report_soon(self, ended: Sequence[Ended]) -> None:
        asyncio.get_running_loop().call_soon(self._report, ended)

    def _watch(self) -> None:
        """Set the timer for the next check of busy workers: soon while they make progress and have more to do, later
        otherwise."""
        most = max([len(worker.owned) for worker in self._pool.workers], default=0)
        if most:
            self._timer.set(self._pace.next_look_s(most))

    def _look(self, late_s: float) -> None:
        self._pace.looked(late_s)
        at = now()
        for worker in list(self._pool.workers):
            self._take(worker, worker.glance())
            if worker.owned and worker in self._pool.workers:
                self._check(worker, at)
        if at - self._swept_at > _SWEEP_S:
            self._sweep(at)
        self._feed()
        self._watch()

    def _check(self, worker: WorkerHandle, at: float) -> None:
        """Check a worker with work: kill it if its run exceeds `timeout_s`, replace it if it is dead, and recall
        waiting work from a slow one."""
        running_s = worker.running_s(at) or 0.0
        if self._timeout_s is not None and running_s > self._timeout_s:
            worker.ask(wire.LOCATE)
            if worker.where is not None or running_s > self._timeout_s + _LOCATE_S:
                worker.kill()
                text = overrun(self._timeout_s, worker.where or "")
                self._report(self._end_worker(worker, HandlerTimeout(f"{text}; its worker was killed")))
        elif self._pace.resting and worker.ended():
            self._report(self._end_worker(worker, None))  # it is dead, but a process that it forked has its socket open
        elif running_s > _SLOW_S and len(worker.owned) > 1 and len(self._pool.workers) > 1:
            worker.ask(wire.RECALL)

    # -- losing a worker ----------------------------------------------------------------------------------------

    def _end_worker(self, worker: WorkerHandle, timeout: HandlerTimeout | None) -> list[Ended]:
        """A worker is dead or must end: its current run fails, and other workers run the rest of its work."""
        self._pool.remove(worker)
        ended = worker.read()
        begun = worker.begun()
        fate = "was killed, because its run exceeded timeout_s" if timeout else worker.ending()
        if begun is not None:
            died = WorkerDied(f"worker process {worker.pid} {fate} while it ran {_named(begun)}")
            ended.append(Ended(begun, timeout or died))
        self._queue.put_back(worker.unstarted())
        self._pool.replace(worker, fate, ran=begun is not None or worker.finished > 0)
        return ended + (_cancelled(self._queue.take_all()) if self.failure is not None else [])

    def _gave_up(self, failure: BadHandler) -> None:
        self.failure = failure
        # Report even an empty list: the caller must notice `failure`, because no more results will follow.
        asyncio.get_running_loop().call_soon(self._ended, _cancelled(self._queue.take_all()))


def _named(work: Work) -> str:
    return f"event {work.event.id}" if isinstance(work, Delivery) else f"{len(work)} events, {work[0].event.id} first"


def _cancelled(works: Iterable[Work]) -> list[Ended]:
    return [Ended(work, cancelled=True) for work in works]


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
