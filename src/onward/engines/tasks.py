"""The task engine: asyncio handlers on standing workers."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine, Generator, Iterable, Sequence
from contextvars import Context
from types import coroutine
from typing import Any

from onward.clock import now
from onward.context import enter
from onward.engines import forks
from onward.engines.base import Call, Ended, EngineHealth, MayStartUntil, Report, Work, always, drained
from onward.engines.runner import Runner, described
from onward.engines.where import in_coroutine
from onward.error_report import harmless

_CLOSE_S = 2.0  # how long close waits for handlers that catch their cancellation
_TURN_S = 0.01  # how long handlers may start within one turn of the event loop, before other callbacks run

log = logging.getLogger("onward")

Task = asyncio.Task[None]
Steps = Coroutine[Any, Any, Any]


class StandingWorkers:
    """The tasks that run handlers, at most `most` of them. A worker without work waits to be called."""

    def __init__(self, most: int) -> None:
        self.tasks: set[Task] = set()
        self.coming = 0  # called or started, and not yet at the queue
        self._most = most
        self._idle: list[asyncio.Future[None]] = []

    @property
    def full(self) -> bool:
        return len(self.tasks) >= self._most

    def call(self) -> bool:
        """Send a waiting worker to the queue. False: none waits."""
        while self._idle:
            waiter = self._idle.pop()
            if not waiter.done():  # otherwise a handler's code has cancelled this worker
                waiter.set_result(None)
                self.coming += 1
                return True
        return False

    def hire(self, work: Coroutine[Any, Any, None], context: Context) -> Task:
        task = asyncio.get_running_loop().create_task(work, context=context)
        self.tasks.add(task)
        self.coming += 1
        return task

    def wait(self) -> asyncio.Future[None]:
        """A future for a worker to await. It is done when the worker is called."""
        waiter = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        return waiter


class Runs:
    """The runs in progress, oldest first, and one timer that cancels those that exceed `timeout_s`."""

    def __init__(self, timeout_s: float | None) -> None:
        self.running: dict[Task, tuple[Work, float, Steps | None]] = {}  # None: it has not suspended
        self.late: dict[Task, str] = {}  # runs that the timer cancelled, and the line that each had reached
        self.timer: asyncio.TimerHandle | None = None
        self._timeout_s = timeout_s
        self._named: set[Task] = set()  # late runs that have been logged

    def oldest_s(self) -> float | None:
        oldest = next(iter(self.running.values()), None)
        return now() - oldest[1] if oldest else None

    def start_timer(self, after_s: float) -> None:
        self.timer = asyncio.get_running_loop().call_later(after_s, self._sweep)

    def was_late(self, worker: Task) -> str | None:
        """The worker's run has ended. Returns the line it had reached when the timer cancelled it; None: in time."""
        self._named.discard(worker)
        return self.late.pop(worker, None)

    def abandon(self) -> list[Work]:
        """Forget all runs: their handlers caught the cancellation. Returns their work."""
        if self.timer is not None:
            self.timer.cancel()
        works = [work for work, *_ in self.running.values()]
        self.running.clear()
        return works

    def _sweep(self) -> None:
        """Cancel the runs that exceed `timeout_s`, and log those that caught an earlier cancellation. Then set the
        timer for the next one."""
        assert self._timeout_s is not None
        at = now()
        next_s = self._timeout_s
        for worker, (work, started, steps) in self.running.items():
            over_s = at - started - self._timeout_s
            if over_s < 0:
                next_s = -over_s
                break
            if worker not in self.late:
                self.late[worker] = in_coroutine(steps)
                worker.cancel()
            elif worker not in self._named:
                self._named.add(worker)
                log.warning(
                    "%s has caught its cancellation after timeout_s=%g, and is at %s; a coroutine cannot be killed, so "
                    "its slot and its key stay blocked until it returns",
                    *(described(work), self._timeout_s, in_coroutine(steps)),
                )
        self.timer = None
        if self.running:
            self.start_timer(max(next_s, 0.001))


class Results:
    """Runs that have ended and are not reported yet. The next turn of the event loop reports all of them at once."""

    def __init__(self) -> None:
        self.pending: list[Ended] = []

    def start(self, ended: Report) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended

    def add(self, ended: Ended) -> None:
        if not self.pending:
            self.schedule()
        self.pending.append(ended)

    def schedule(self) -> None:
        """The first one is about to be added."""
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        if self.pending:
            ended = self.pending[:]
            self.pending.clear()  # never a new list: a worker that runs many handlers holds a reference to this one
            self._ended(ended)


class TaskEngine:
    """Runs `async def` handlers, `concurrency` at once, each in a fresh copy of the context.

    Workers are started once and reused, because a task per event would cost as much as the rest of the path. A handler
    that never suspends needs no task of its own. One timer watches all runs, because a timer per event would cost too
    much.
    """

    failure: BaseException | None = None

    def __init__(self, call: Call, *, concurrency: int, timeout_s: float | None) -> None:
        self._runner = Runner(call, timeout_s)
        self._queue: deque[Work] = deque()
        self._workers = StandingWorkers(concurrency)
        self._runs = Runs(timeout_s)
        self._results = Results()
        self._turn_began: float | None = None
        self._closing = False

    def start(self, ended: Report, may_start_until: MayStartUntil = always) -> None:
        self._runner.start()
        self._results.start(ended)
        self._may_start_until = may_start_until

    def submit(self, work: Sequence[Work]) -> None:
        if self._closing:
            self._cancel(work)
            return
        self._queue.extend(work)
        self._wake(1)

    def health(self) -> EngineHealth:
        workers, busy = len(self._workers.tasks), len(self._runs.running)
        return EngineHealth(workers, busy, restarted=0, oldest_running_s=self._runs.oldest_s())

    async def drain(self, deadline_s: float) -> bool:
        return await drained(lambda: not (self._runs.running or self._queue or self._results.pending), deadline_s)

    async def close(self) -> None:
        self._closing = True
        self._cancel(self._queue)
        self._queue.clear()
        workers = self._workers.tasks
        for worker in workers:
            worker.cancel()
        if workers:
            await asyncio.wait(workers, timeout=_CLOSE_S)
        self._cancel(self._runs.abandon())
        self._results.flush()

    def _cancel(self, work: Iterable[Work]) -> None:
        for each in work:
            self._results.add(Ended(each, cancelled=True))

    def _wake(self, count: int) -> None:
        """Send up to `count` more workers to the queue, and start new ones while there are fewer than allowed."""
        workers = self._workers
        for _ in range(min(count, len(self._queue) - workers.coming)):
            if workers.call():
                continue
            if self._closing or workers.full:
                break
            workers.hire(self._work(), self._runner.context).add_done_callback(self._leave)

    def _leave(self, worker: Task) -> None:
        self._workers.tasks.discard(worker)
        self._wake(1)  # if a handler's code cancelled this worker on its way to the queue, another one must go

    async def _work(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        queue, workers = self._queue, self._workers
        workers.coming -= 1
        while not self._closing:
            if not queue or self._turn_is_over(now()):
                waiter = workers.wait()
                try:
                    await waiter
                finally:
                    workers.coming -= not waiter.cancelled()
                continue
            # A worker that finds more work than workers on their way calls two more. So handlers that suspend are all
            # running after a few turns of the loop. Handlers that never suspend are all run by the first worker.
            if len(queue) > workers.coming:
                self._wake(2)
            await self._serve(me)

    def _turn_is_over(self, at: float) -> bool:
        """Whether handlers have used the loop for long enough. They may block it, and it must also handle signals."""
        if self._turn_began is None:
            self._turn_began = at
            asyncio.get_running_loop().call_soon(self._next_turn)
        return at - self._turn_began > _TURN_S

    def _next_turn(self) -> None:
        self._turn_began = None
        self._wake(2)

    @coroutine
    def _serve(self, me: Task) -> Generator[Any, Any, None]:
        """Run the queued work. This is one flat generator, because each step of a handler that suspends passes through
        every frame between the loop and the handler."""
        queue, runs, runner, results = self._queue, self._runs, self._runner, self._results
        running, timeout_s, call, clean = runs.running, runner.timeout_s, runner.call, runner.context
        ran: Work | None = None  # its handler did not suspend, so its run lasted until the next one starts
        began = 0.0
        while queue and not self._turn_is_over(started := now()):
            if ran is not None:
                results.add(Ended(ran, None, False, started - began))
                ran = None
            work = queue.popleft()
            if started >= self._may_start_until(work):
                results.add(Ended(work, cancelled=True))
                continue
            error: BaseException | None = None
            begun = None
            run = clean.copy().run
            running[me] = (work, started, None)
            deadline = None
            if timeout_s is not None:
                deadline = started + timeout_s
                if runs.timer is None:
                    runs.start_timer(timeout_s)
            try:
                begun = run(_begin, call, work, deadline)
                if begun is not None:
                    steps, yielded = begun
                    running[me] = (work, started, steps)
                    try:
                        while True:
                            try:
                                answer = yield yielded
                            except GeneratorExit:  # the loop has ended, and this task with it
                                steps.close()
                                return
                            except BaseException as thrown:
                                yielded = run(steps.throw, thrown)
                            else:
                                yielded = run(steps.send, answer)
                    except StopIteration:
                        pass  # how a coroutine returns
            except BaseException as raised:
                error = harmless(raised)
            if forks.count != runner.forks:
                forks.end(error)
            if running.pop(me, None) is None:
                return  # it outlived `close`, which has reported it
            cancelling = me.cancelling()
            if error is not None or runs.late:
                results.add(self._verdict(me, work, error, now() - started))
            elif begun is None and not cancelling:
                ran, began = work, started
            else:
                results.add(Ended(work, None, False, now() - started))
            if cancelling and not self._closing:
                yield from _calm(me)
        if ran is not None:
            results.add(Ended(ran, None, False, now() - began))

    def _verdict(self, me: Task, work: Work, error: BaseException | None, took_s: float) -> Ended:
        """The end of a run with an error: a cancellation by the timer is a timeout, one by shutdown is no failure."""
        cancelled, where = isinstance(error, asyncio.CancelledError), self._runs.was_late(me)
        if cancelled and self._closing and where is None:
            return Ended(work, cancelled=True)
        if where is not None and error is None:
            text = "%s has caught its cancellation after timeout_s=%g, and returned after %.1f s; its event has failed"
            log.warning(text, described(work), self._runner.timeout_s, took_s)
        if where is not None and (cancelled or error is None):
            error = self._runner.overrun(where, None)
        return Ended(work, error, False, took_s)


def _begin(call: Call, work: Work, deadline: float | None) -> tuple[Steps, Any] | None:
    """Call the handler and run its first step, in the run's own context. None: the handler has returned."""
    steps = enter(call, work, deadline)
    if steps is None:
        return None
    try:
        return steps, steps.send(None)
    except StopIteration:
        return None


def _calm(me: Task) -> Generator[None, Any, None]:
    """The run was cancelled, by the engine or by itself. The next run of this worker must not be cancelled by that."""
    with contextlib.suppress(asyncio.CancelledError):
        yield  # a cancellation requested during the run arrives here
    while me.cancelling():
        me.uncancel()
