"""The thread engine: `def` handlers on a bounded pool of threads."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from onward.clock import now
from onward.engines.base import Call, Ended, EngineHealth, MayStartUntil, Report, Work, always, drained
from onward.engines.runner import Runner, described
from onward.engines.where import in_thread

log = logging.getLogger("onward")

_CLOSE_S = 1.0  # how long close waits for running handlers: a thread cannot be killed
_SWEEP_S = 1.0  # how often the engine looks for overdue runs, but at least four times within timeout_s


class _Seat:
    """One thread of the pool. The thread writes `thread_id`, `work` and `started`; the loop writes the other two."""

    __slots__ = ("overdue", "started", "thread_id", "where", "work")

    def __init__(self) -> None:
        self.thread_id: int | None = None
        self.work: Work | None = None
        self.started = 0.0
        self.overdue: Work | None = None  # the work that was logged as overdue
        self.where = ""  # the line that it had reached then


class Completions:
    """The runs that have ended. Threads add them; the loop reports them in bursts, with one wake-up per burst."""

    def __init__(self) -> None:
        self.open = 0  # submitted and not reported
        self.closed = False
        self._pending: deque[Ended] = deque()
        self._called = False  # a thread has asked the loop to collect

    def start(self, ended: Report) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended

    def add(self, ended: Ended) -> None:
        """Add a result. Any thread may call this."""
        self._pending.append(ended)
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits for this
                self._loop.call_soon_threadsafe(self._collect)

    def report(self, results: Sequence[Ended]) -> None:
        if results:
            self.open -= len(results)
            self._ended(results)

    def close(self, running: Sequence[Work]) -> None:
        """Report the last results, and runs that have not ended as cancelled. A thread that ends later is ignored.

        The caller reads `running` first. A thread adds its result before it clears its seat, so each run is in
        `running`, among the results, or in both.
        """
        self.closed = True
        last, self._pending = list(self._pending), deque()
        known = {id(ended.work) for ended in last}
        self.report([*last, *(Ended(work, cancelled=True) for work in running if id(work) not in known)])

    def _collect(self) -> None:
        """Report the ended runs. The flag is cleared first: a thread that saw it set had already added its result."""
        self._called = False
        results: list[Ended] = []
        with contextlib.suppress(IndexError):
            while not self.closed:
                results.append(self._pending.popleft())
        self.report(results)


class ThreadEngine:
    """Runs `def` handlers, `concurrency` at once, each in a fresh copy of the context.

    Threads are daemons, started when needed. Onward cannot kill a thread that runs longer than `timeout_s`: it logs the
    run, which keeps its place in the pool. The event is reported as failed when the thread has really finished, so no
    other event of its key runs at the same time.
    """

    failure: BaseException | None = None

    def __init__(self, call: Call, *, concurrency: int, timeout_s: float | None) -> None:
        self._runner = Runner(call, timeout_s)
        self._concurrency = concurrency
        self._queue: SimpleQueue[Work | None] = SimpleQueue()  # None: the thread that takes it ends
        self._seats: list[_Seat] = []
        self._completions = Completions()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closing = False

    def start(self, ended: Report, may_start_until: MayStartUntil = always) -> None:
        self._runner.start()
        self._completions.start(ended)
        self._may_start_until = may_start_until

    def submit(self, work: Sequence[Work]) -> None:
        self._completions.open += len(work)
        if self._closing:
            cancelled = [Ended(each, cancelled=True) for each in work]
            asyncio.get_running_loop().call_soon(self._completions.report, cancelled)
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
        return await drained(lambda: not self._completions.open, deadline_s)

    async def close(self) -> None:
        self._closing = True
        self._completions.report([Ended(work, cancelled=True) for work in self._unstarted()])
        for _ in self._seats:
            self._queue.put(None)
        if not self._completions.closed:
            await self.drain(_CLOSE_S)
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._seats, running = [], [seat.work for seat in self._seats if seat.work is not None]
        self._completions.close(running)

    # -- on the loop --------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        """Start as many threads as there is work for, up to the limit."""
        while len(self._seats) < min(self._completions.open, self._concurrency):
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

    def _sweep_later(self) -> None:
        timeout_s = self._runner.timeout_s
        if self._sweeper is None and timeout_s is not None and self._completions.open:
            self._sweeper = asyncio.get_running_loop().call_later(min(timeout_s / 4, _SWEEP_S), self._sweep)

    def _sweep(self) -> None:
        """Log each overdue run once."""
        timeout_s = self._runner.timeout_s
        assert timeout_s is not None
        at = now()
        for seat in self._seats:
            work = seat.work
            if work is not None and work is not seat.overdue and at - seat.started > timeout_s:
                where = in_thread(seat.thread_id)
                if seat.work is not work:
                    continue  # it has just ended
                seat.where, seat.overdue = where, work
                log.warning(
                    "%s has run longer than timeout_s=%g, at %s; a thread cannot be killed, so its slot and its key "
                    "stay blocked until it returns",
                    *(described(work), timeout_s, where),
                )
        self._sweeper = None
        self._sweep_later()

    # -- in the threads -----------------------------------------------------------------------------------------

    def _work(self, seat: _Seat) -> None:
        seat.thread_id = threading.get_ident()
        get, add, runner, timeout_s = self._queue.get, self._completions.add, self._runner, self._runner.timeout_s
        while (work := get()) is not None:
            started = seat.started = now()
            if started >= self._may_start_until(work):
                add(Ended(work, cancelled=True))
                continue
            seat.work = work
            deadline = None if timeout_s is None else started + timeout_s
            error = runner.run(work, deadline)
            over = now()
            if deadline is not None and over > deadline:
                error = runner.overrun(seat.where if seat.overdue is work else "", error)
            add(Ended(work, error, took_s=over - started))
            seat.work = None
            del work, error  # or they would live until the next event arrives
