"""The thread engine: `def` handlers on a bounded pool of threads."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextvars import copy_context
from queue import Empty, SimpleQueue

from onward.clock import now
from onward.context import enter
from onward.engines import forks
from onward.engines.base import Call, Ended, EngineHealth, MayStartUntil, Report, Work, always, drained
from onward.errors import HandlerTimeout
from onward.event import Delivery

log = logging.getLogger("onward")

_CLOSE_S = 1.0  # how long close waits for what runs: nothing can end a thread
_SWEEP_S = 1.0  # the running are looked at this often, or four times within their time


class _Seat:
    """One thread of the pool. The thread writes `work` and `started`; the loop reads them."""

    __slots__ = ("overdue", "started", "work")

    def __init__(self) -> None:
        self.work: Work | None = None
        self.started = 0.0
        self.overdue: Work | None = None  # what was named as over its time; the loop's own


class ThreadEngine:
    """Runs `def` handlers, `concurrency` at once, each in a fresh copy of the context.

    Threads are daemons, hired when needed. Completions go to the loop in bursts, with one wake-up for each. A thread
    that overruns its time cannot be ended: it is named in the log and keeps its place in the pool, and its event is
    reported as failed when the thread is really done with it, so nothing of its key runs beside it.
    """

    failure: BaseException | None = None

    def __init__(self, call: Call, *, concurrency: int, timeout_s: float | None) -> None:
        self._call = call
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._queue: SimpleQueue[Work | None] = SimpleQueue()  # None: the thread that takes it ends
        self._seats: list[_Seat] = []
        self._open = 0  # submitted and not reported
        self._results: deque[Ended] = deque()
        self._called = False  # the loop has been asked to collect the results
        self._sweeper: asyncio.TimerHandle | None = None
        self._closing = False
        self._closed = False

    def start(self, ended: Report, may_start_until: MayStartUntil = always) -> None:
        self._loop = asyncio.get_running_loop()
        self._forks = forks.count
        self._context = copy_context()
        self._ended = ended
        self._may_start_until = may_start_until

    def submit(self, work: Sequence[Work]) -> None:
        self._open += len(work)
        if self._closing:
            self._loop.call_soon(self._report, [Ended(each, cancelled=True) for each in work])
            return
        for each in work:
            self._queue.put(each)
        self._hire()
        self._sweep_later()

    def health(self) -> EngineHealth:
        started = [seat.started for seat in self._seats if seat.work is not None]
        age_s = max(0.0, now() - min(started)) if started else None
        return EngineHealth(workers=len(self._seats), busy=len(started), restarted=0, oldest_running_s=age_s)

    async def drain(self, deadline_s: float) -> bool:
        return await drained(lambda: not self._open, deadline_s)

    async def close(self) -> None:
        self._closing = True
        self._report([Ended(work, cancelled=True) for work in self._unstarted()])
        for _ in self._seats:
            self._queue.put(None)
        if not self._closed:
            await self.drain(_CLOSE_S)
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._seats, left = [], [seat.work for seat in self._seats if seat.work is not None]
        # Read after the seats: a thread tells before it clears its seat, so each run is in one of them or in both.
        told, self._results = list(self._results), deque()
        known = {id(ended.work) for ended in told}
        self._report([*told, *(Ended(work, cancelled=True) for work in left if id(work) not in known)])

    # -- on the loop --------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        """As many threads as there is work for, up to the limit."""
        while len(self._seats) < min(self._open, self._concurrency):
            seat = _Seat()
            self._seats.append(seat)
            threading.Thread(target=self._work, args=(seat,), name=f"onward-{len(self._seats)}", daemon=True).start()

    def _unstarted(self) -> list[Work]:
        works: list[Work] = []
        with contextlib.suppress(Empty):
            while True:
                work = self._queue.get_nowait()
                if work is not None:
                    works.append(work)
        return works

    def _collect(self) -> None:
        """Report what has ended. The flag falls first: a thread that saw it up has put its result in before."""
        self._called = False
        results: list[Ended] = []
        with contextlib.suppress(IndexError):
            while not self._closed:
                results.append(self._results.popleft())
        self._report(results)

    def _report(self, results: Sequence[Ended]) -> None:
        if results:
            self._open -= len(results)
            self._ended(results)

    def _sweep_later(self) -> None:
        if self._sweeper is None and self._timeout_s is not None and self._open:
            self._sweeper = self._loop.call_later(min(self._timeout_s / 4, _SWEEP_S), self._sweep)

    def _sweep(self) -> None:
        """Name what is over its time, once."""
        assert self._timeout_s is not None
        at = now()
        for seat in self._seats:
            work = seat.work
            if work is not None and work is not seat.overdue and at - seat.started > self._timeout_s:
                seat.overdue = work
                log.warning(
                    "%s runs longer than timeout_s=%g; a thread cannot be ended: its place and its key stay taken "
                    "until it is done",
                    *(_name(work), self._timeout_s),
                )
        self._sweeper = None
        self._sweep_later()

    # -- in the threads -----------------------------------------------------------------------------------------

    def _work(self, seat: _Seat) -> None:
        get, timeout_s = self._queue.get, self._timeout_s
        while (work := get()) is not None:
            error: BaseException | None = None
            started = seat.started = now()
            if started >= self._may_start_until(work):
                self._tell(Ended(work, cancelled=True))
                continue
            seat.work = work
            deadline = None if timeout_s is None else started + timeout_s
            try:
                self._context.copy().run(enter, self._call, work, deadline)
            except BaseException as raised:
                error = raised
            if forks.count != self._forks:
                forks.end(error)
            over = now()
            if deadline is not None and over > deadline:
                error = _overrun(timeout_s, error)
            self._tell(Ended(work, error, took_s=over - started))
            seat.work = None
            del work, error  # or they would live until the next event comes

    def _tell(self, ended: Ended) -> None:
        self._results.append(ended)
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
                self._loop.call_soon_threadsafe(self._collect)


def _overrun(timeout_s: float | None, error: BaseException | None) -> HandlerTimeout:
    timeout = HandlerTimeout(f"the handler ran longer than timeout_s={timeout_s:g}")
    timeout.__cause__ = error
    return timeout


def _name(work: Work) -> str:
    first = work if isinstance(work, Delivery) else work[0]
    return f"the handler of {first.partition} position {first.position} key {first.event.key!r}"
