"""The task engine: asyncio handlers on standing workers."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextvars import Context, copy_context
from typing import Any

from onward.engines.base import Call, Ended, Health, Work
from onward.errors import HandlerTimeout

_CLOSE_S = 5.0  # how long close waits for handlers that swallow their cancellation
_TURN_S = 0.005  # handlers start in one turn of the event loop for so long; then others are served


class TaskEngine:
    """Runs `async def` handlers, `concurrency` at once, each in a fresh copy of the context.

    Workers stand ready because a task per event costs as much as the rest of the path; a handler that never
    suspends costs none. Timeouts are one sweep over the oldest runs, not a timer per event.
    """

    def __init__(self, *, concurrency: int, timeout_s: float | None) -> None:
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._queue: deque[Work] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._workers: set[asyncio.Task[None]] = set()
        self._running: dict[asyncio.Task[None], tuple[Work, float]] = {}  # oldest first
        self._late: set[asyncio.Task[None]] = set()  # cancelled because their time was over
        self._results: list[Ended] = []
        self._context = copy_context()
        self._sweeper: asyncio.TimerHandle | None = None
        self._turn_began: float | None = None
        self._closing = False
        self._closed = False

    def start(self, call: Call, ended: Callable[[Sequence[Ended]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._call = call
        self._ended = ended

    def submit(self, work: Sequence[Work]) -> None:
        self._queue.extend(work)
        self._wake(1)

    def health(self) -> Health:
        oldest = next(iter(self._running.values()), None)
        age_s = self._loop.time() - oldest[1] if oldest else None
        return Health(workers=len(self._workers), busy=len(self._running), restarted=0, oldest_running_s=age_s)

    async def drain(self, deadline_s: float) -> bool:
        deadline = self._loop.time() + deadline_s
        while self._running or self._queue:
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

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
        self._results.extend(Ended(work, cancelled=True) for work, _ in self._running.values())
        self._flush()
        self._closed = True

    def _wake(self, count: int) -> None:
        """Wake up to `count` workers, hiring while there are fewer than allowed."""
        for _ in range(min(count, len(self._queue))):
            waiter = self._next_idle()
            if waiter is not None:
                waiter.set_result(None)
            elif len(self._workers) < self._concurrency and not self._closing:
                worker = self._loop.create_task(self._work(), context=self._context)
                self._workers.add(worker)
                worker.add_done_callback(self._workers.discard)

    def _next_idle(self) -> asyncio.Future[None] | None:
        while self._idle:
            waiter = self._idle.pop()
            if not waiter.done():  # else its worker is gone: something of a handler's cancelled it
                return waiter
        return None

    async def _work(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        while not self._closing:
            if not self._queue:
                waiter = self._loop.create_future()
                self._idle.append(waiter)
                await waiter
                continue
            # Each worker that finds work wakes two more: handlers that suspend are all running after a few turns
            # of the loop, while handlers that never do are all served by the first worker.
            self._wake(2)
            while self._queue and not self._closing:
                if self._turn_is_over():
                    await asyncio.sleep(0)
                else:
                    await self._run(me, self._queue.popleft())

    def _turn_is_over(self) -> bool:
        """Have we kept the loop busy for long enough? Handlers may block it, and signals must be heard."""
        now = self._loop.time()
        if self._turn_began is None:
            self._turn_began = now
            self._loop.call_soon(self._next_turn)
        return now - self._turn_began > _TURN_S

    def _next_turn(self) -> None:
        self._turn_began = None

    async def _run(self, me: asyncio.Task[None], work: Work) -> None:
        error: BaseException | None = None
        self._running[me] = (work, self._loop.time())
        if self._sweeper is None and self._timeout_s is not None:
            self._sweeper = self._loop.call_later(self._timeout_s, self._sweep)
        try:
            context = self._context.copy()
            result = context.run(self._call, work)
            if result is not None:
                await _InContext(result, context)
        except BaseException as raised:
            error = raised
        del self._running[me]
        self._finish(work, self._verdict(me, error))

    def _verdict(self, me: asyncio.Task[None], error: BaseException | None) -> BaseException | None:
        """What the run's error means: a cancellation of ours is a timeout, one of shutdown stays what it is."""
        if me in self._late:
            self._late.discard(me)
            me.uncancel()
            if isinstance(error, asyncio.CancelledError):
                return HandlerTimeout(f"the handler ran longer than timeout_s={self._timeout_s:g}")
        return error

    def _finish(self, work: Work, error: BaseException | None) -> None:
        if self._closed:
            return  # it outlived close, which has reported it
        cancelled = self._closing and isinstance(error, asyncio.CancelledError)
        if not self._results:
            self._loop.call_soon(self._flush)
        self._results.append(Ended(work, None if cancelled else error, cancelled))

    def _flush(self) -> None:
        if self._results:
            results, self._results = self._results, []
            self._ended(results)

    def _sweep(self) -> None:
        """Cancel what is over its time; then sleep until the next could be."""
        assert self._timeout_s is not None
        now = self._loop.time()
        next_s = self._timeout_s
        for worker, (_, started) in self._running.items():
            over_s = now - started - self._timeout_s
            if over_s < 0:
                next_s = -over_s
                break
            if worker not in self._late:
                self._late.add(worker)
                worker.cancel()
        self._sweeper = self._loop.call_later(max(next_s, 0.001), self._sweep) if self._running else None


class _InContext:
    """Awaits a coroutine so that each of its steps runs in the given context, within the current task."""

    __slots__ = ("_awaitable", "_context")

    def __init__(self, awaitable: Awaitable[Any], context: Context) -> None:
        self._awaitable = awaitable
        self._context = context

    def __await__(self) -> Generator[Any, Any, Any]:
        run = self._context.run
        steps = self._awaitable.__await__()
        send, throw = steps.send, steps.throw
        try:
            yielded = run(send, None)
            while True:
                try:
                    answer = yield yielded
                except BaseException as error:
                    yielded = run(throw, error)
                else:
                    yielded = run(send, answer)
        except StopIteration as end:
            return end.value
