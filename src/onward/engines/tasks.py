"""The task engine: asyncio handlers on standing workers."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine, Generator, Sequence
from contextvars import copy_context
from types import coroutine
from typing import Any

from onward.clock import now
from onward.context import enter
from onward.engines import forks
from onward.engines.base import Call, Ended, EngineHealth, MayStartUntil, Report, Work, always, drained
from onward.errors import HandlerTimeout

_CLOSE_S = 5.0  # how long close waits for handlers that swallow their cancellation
_TURN_S = 0.01  # handlers start in one turn of the event loop for so long; then others are served

Task = asyncio.Task[None]


class TaskEngine:
    """Runs `async def` handlers, `concurrency` at once, each in a fresh copy of the context.

    Workers stand ready because a task per event costs as much as the rest of the path; a handler that never
    suspends costs none. Timeouts are one sweep over the oldest runs, not a timer per event.
    """

    failure: BaseException | None = None

    def __init__(self, call: Call, *, concurrency: int, timeout_s: float | None) -> None:
        self._call = call
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._queue: deque[Work] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._waking = 0  # workers on their way to the queue
        self._workers: set[Task] = set()
        self._running: dict[Task, tuple[Work, float]] = {}  # oldest first
        self._late: set[Task] = set()  # cancelled because their time was over
        self._results: list[Ended] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._turn_began: float | None = None
        self._closing = False
        self._closed = False

    def start(self, ended: Report, may_start_until: MayStartUntil = always) -> None:
        self._loop = asyncio.get_running_loop()
        self._forks = forks.count
        self._context = copy_context()
        self._ended = ended
        self._may_start_until = may_start_until

    def submit(self, work: Sequence[Work]) -> None:
        if self._closing:
            self._tell([Ended(each, cancelled=True) for each in work])
            return
        self._queue.extend(work)
        self._wake(1)

    def health(self) -> EngineHealth:
        oldest = next(iter(self._running.values()), None)
        age_s = now() - oldest[1] if oldest else None
        return EngineHealth(workers=len(self._workers), busy=len(self._running), restarted=0, oldest_running_s=age_s)

    async def drain(self, deadline_s: float) -> bool:
        return await drained(lambda: not (self._running or self._queue or self._results), deadline_s)

    async def close(self) -> None:
        self._closing = True
        self._results.extend(Ended(work, cancelled=True) for work in self._queue)
        self._queue.clear()
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers, timeout=_CLOSE_S)
        if self._sweeper is not None:
            self._sweeper.cancel()
        if not self._closed:
            self._closed = True
            self._results.extend(Ended(work, cancelled=True) for work, _ in self._running.values())
        self._flush()

    def _wake(self, count: int) -> None:
        """Send up to `count` more workers to the queue, hiring while there are fewer than allowed."""
        for _ in range(min(count, len(self._queue) - self._waking)):
            waiter = self._next_idle()
            if waiter is not None:
                waiter.set_result(None)
            elif len(self._workers) < self._concurrency and not self._closing:
                worker = self._loop.create_task(self._work(), context=self._context)
                self._workers.add(worker)
                worker.add_done_callback(self._leave)
            else:
                break
            self._waking += 1

    def _leave(self, worker: Task) -> None:
        self._workers.discard(worker)
        self._wake(1)  # if something of a handler's cancelled it on its way, another has to go

    def _next_idle(self) -> asyncio.Future[None] | None:
        while self._idle:
            waiter = self._idle.pop()
            if not waiter.done():  # else its worker is gone: something of a handler's cancelled it
                return waiter
        return None

    async def _work(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._waking -= 1
        while not self._closing:
            if not self._queue or self._turn_is_over(now()):
                waiter = self._loop.create_future()
                self._idle.append(waiter)
                try:
                    await waiter
                finally:
                    self._waking -= not waiter.cancelled()
                continue
            # Each worker that finds more work than others are coming for sends two more: handlers that suspend are
            # all running after a few turns of the loop, while handlers that never do are all served by the first.
            if len(self._queue) > self._waking:
                self._wake(2)
            await self._serve(me)

    def _turn_is_over(self, at: float) -> bool:
        """Have we kept the loop busy for long enough? Handlers may block it, and signals must be heard."""
        if self._turn_began is None:
            self._turn_began = at
            self._loop.call_soon(self._next_turn)
        return at - self._turn_began > _TURN_S

    def _next_turn(self) -> None:
        self._turn_began = None
        self._wake(2)

    @coroutine
    def _serve(self, me: Task) -> Generator[Any, Any, None]:
        """Run what is queued. One flat generator, because every frame between the loop and a handler that
        suspends is paid for at each of its steps."""
        queue, running, clean, timeout_s = self._queue, self._running, self._context, self._timeout_s
        ran: Work | None = None  # by a handler that did not suspend: it took until the next one starts
        began = 0.0
        while queue and not self._turn_is_over(started := now()):
            if ran is not None:
                if not self._results:
                    self._loop.call_soon(self._flush)
                self._results.append(Ended(ran, None, False, started - began))
                ran = None
            work = queue.popleft()
            if started >= self._may_start_until(work):
                self._tell([Ended(work, cancelled=True)])
                continue
            error: BaseException | None = None
            begun = None
            run = clean.copy().run
            running[me] = (work, started)
            deadline = None
            if timeout_s is not None:
                deadline = started + timeout_s
                if self._sweeper is None:
                    self._sweeper = self._loop.call_later(timeout_s, self._sweep)
            try:
                begun = run(_begin, self._call, work, deadline)
                if begun is not None:
                    steps, yielded = begun
                    try:
                        while True:
                            try:
                                answer = yield yielded
                            except GeneratorExit:  # the loop is gone, and this task with it
                                steps.close()
                                return
                            except BaseException as thrown:
                                yielded = run(steps.throw, thrown)
                            else:
                                yielded = run(steps.send, answer)
                    except StopIteration:
                        pass  # how a coroutine returns
            except BaseException as raised:
                error = raised
            if forks.count != self._forks:
                forks.end(error)
            del running[me]
            if self._closed:
                return  # it outlived close, which has reported it
            cancelling = me.cancelling()
            if error is not None or self._late:
                self._tell([self._verdict(me, work, error, now() - started)])
            elif begun is None and not cancelling:
                ran, began = work, started
            else:
                if not self._results:
                    self._loop.call_soon(self._flush)
                self._results.append(Ended(work, None, False, now() - started))
            if cancelling and not self._closing:
                yield from _calm(me)
        if ran is not None:
            self._tell([Ended(ran, None, False, now() - began)])

    def _verdict(self, me: Task, work: Work, error: BaseException | None, took_s: float) -> Ended:
        """What the run's error means: a cancellation of ours is a timeout, one by shutdown is no failure."""
        cancelled, late = isinstance(error, asyncio.CancelledError), me in self._late
        self._late.discard(me)
        if cancelled and self._closing and not late:
            return Ended(work, cancelled=True)
        if cancelled and late:
            error = HandlerTimeout(f"the handler ran longer than timeout_s={self._timeout_s:g}")
        return Ended(work, error, False, took_s)

    def _tell(self, ended: Sequence[Ended]) -> None:
        if ended and not self._results:
            self._loop.call_soon(self._flush)
        self._results.extend(ended)

    def _flush(self) -> None:
        if self._results:
            results, self._results = self._results, []
            self._ended(results)

    def _sweep(self) -> None:
        """Cancel what is over its time; then sleep until the next could be."""
        assert self._timeout_s is not None
        at = now()
        next_s = self._timeout_s
        for worker, (_, started) in self._running.items():
            over_s = at - started - self._timeout_s
            if over_s < 0:
                next_s = -over_s
                break
            if worker not in self._late:
                self._late.add(worker)
                worker.cancel()
        self._sweeper = self._loop.call_later(max(next_s, 0.001), self._sweep) if self._running else None


def _begin(call: Call, work: Work, deadline: float | None) -> tuple[Coroutine[Any, Any, Any], Any] | None:
    """Call the handler and take its first step, in the run's own context. None: it has ended with that."""
    steps = enter(call, work, deadline)
    if steps is None:
        return None
    try:
        return steps, steps.send(None)
    except StopIteration:
        return None


def _calm(me: Task) -> Generator[None, Any, None]:
    """The run was cancelled, by us or by itself: the next event of this worker must not feel it."""
    with contextlib.suppress(asyncio.CancelledError):
        yield  # a cancellation that was asked for while it ran arrives here
    while me.cancelling():
        me.uncancel()
