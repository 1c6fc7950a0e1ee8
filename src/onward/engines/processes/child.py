"""The code of a worker process: it imports the handler, runs its work, one at a time, and ends with its parent.

The main thread reads the socket when it has no work left, so work that arrives during a run wakes no thread. A second
thread waits on the leash, a pipe from the parent. Each byte on it is an order (`wire.RECALL`, `wire.LOCATE`). When the
pipe closes, the parent has ended, and this process ends at once.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from types import CoroutineType
from typing import Any

import msgspec

from onward import context as run_context
from onward.clock import now
from onward.engines import forks
from onward.engines.base import Call, Work
from onward.engines.processes import wire
from onward.engines.steps import in_context
from onward.engines.target import follow, import_main, public_name
from onward.engines.where import in_coroutine, in_thread
from onward.error_report import report, trace_of
from onward.handler import bind

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 18

Task = tuple[int, Work, float]  # its number, and until when it may begin


def main(link: int, page: int, leash: int, parent: int) -> None:
    _die_with(parent)
    _ignore_signals()
    faulthandler.enable()  # after a segmentation fault, stderr has the line
    worker = WorkerLoop(socket.socket(fileno=link), wire.StatusPage(page))
    threading.Thread(target=worker.watch, args=(leash,), name="onward-leash", daemon=True).start()
    worker.run()


class WorkerLoop:
    def __init__(self, link: socket.socket, page: wire.StatusPage) -> None:
        self._link = link
        self._page = page
        self._inbox: deque[Task] = deque()
        self._retiring = False
        self._splitter = wire.Splitter()
        self._reading = threading.Lock()
        self._sending = threading.Lock()
        self._taking = threading.Lock()
        self._forks = forks.count
        self._steps: CoroutineType[Any, Any, Any] | None = None  # of the current run, if the handler is `async def`

    def run(self) -> None:
        setup = self._setup()
        try:
            function = _load(setup)
            call = bind(function, batch=setup.batch)
        except BaseException as error:
            self._send(wire.Unfit(trace_of(error).rstrip()))
            raise SystemExit(1) from error
        self._send(wire.Ready())
        if inspect.iscoroutinefunction(function):
            asyncio.run(self._serve_coroutines(call, setup.timeout_s))
        else:
            self._serve(call, setup.timeout_s)

    def _setup(self) -> wire.Setup:
        while True:
            for body in self._splitter.feed(self._receive()):
                setup = wire.from_engine(body)
                assert isinstance(setup, wire.Setup)
                return setup

    # -- the main thread ----------------------------------------------------------------------------------------

    def _serve(self, call: Call, timeout_s: float | None) -> None:
        base, begin, finish = copy_context(), self._page.begin, self._page.finish
        while not self._retiring:
            if not self._refill():
                self._send(wire.Idle())
                self._link.recv(1, socket.MSG_PEEK)  # wait for more
            at = now()  # the end of one run is also the beginning of the next
            while (task := self._next()) is not None:
                number, work, until = task
                if at >= until:
                    self._send(wire.Returned([number]))
                    continue
                begin(number, at)
                try:
                    base.copy().run(run_context.enter, call, work, timeout_s and at + timeout_s)
                except BaseException as error:
                    self._check_fork(error)
                    self._send(_failed(number, error))
                else:
                    self._check_fork(None)
                at = now()
                finish(number, at)

    async def _serve_coroutines(self, call: Call, timeout_s: float | None) -> None:
        base = copy_context()
        while not self._retiring:
            if not self._refill():
                self._send(wire.Idle())
                await _readable(self._link)
            while (task := self._next()) is not None:
                number, work, until = task
                started = now()
                if started >= until:
                    self._send(wire.Returned([number]))
                    continue
                self._page.begin(number, started)
                context = base.copy()
                try:
                    steps = context.run(run_context.enter, call, work, timeout_s and started + timeout_s)
                    self._steps = steps
                    await in_context(steps, context)
                except BaseException as error:
                    self._check_fork(error)
                    self._send(_failed(number, error))
                else:
                    self._check_fork(None)
                await _calm()
                self._page.finish(number, now())

    def _check_fork(self, error: BaseException | None) -> None:
        if forks.count != self._forks:
            forks.end(error)

    def _next(self) -> Task | None:
        with self._taking:
            return self._inbox.popleft() if self._inbox else None  # None: all work is done or recalled

    def _refill(self) -> bool:
        """Read what the engine has sent. False: there is nothing to do."""
        with self._reading, contextlib.suppress(BlockingIOError):
            while True:
                for body in self._splitter.feed(self._receive(socket.MSG_DONTWAIT)):
                    self._take_in(wire.from_engine(body))
        return bool(self._inbox)

    def _take_in(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Events() | wire.Batches():
                works: Sequence[Work] = message.works
                self._inbox.extend((number, work, message.until) for number, work in enumerate(works, message.first))
            case wire.Retire():
                self._retiring = True

    # -- the thread on the leash --------------------------------------------------------------------------------

    def watch(self, leash: int) -> None:
        while order := os.read(leash, 1):
            if order == wire.LOCATE:
                self._send(wire.At(self._page.started - 1, self._where()))
                continue
            # Send the answer before the main thread continues. Otherwise a later run could end first, and the engine
            # would count the returned work as ended too.
            with self._taking:
                self._refill()
                unstarted: list[int] = []
                while self._inbox:
                    unstarted.append(self._inbox.popleft()[0])
                self._send(wire.Returned(unstarted))
        os._exit(1)

    def _where(self) -> str:
        """The line that the current run has reached."""
        steps = self._steps
        if steps is not None and not steps.cr_running:
            return in_coroutine(steps)
        return in_thread(threading.main_thread().ident)

    # -- the socket ---------------------------------------------------------------------------------------------

    def _receive(self, flags: int = 0) -> bytes:
        piece = self._link.recv(_READ_BYTES, flags)
        if not piece:
            os._exit(1)  # the parent has ended, so no engine owns this run any more
        return piece

    def _send(self, message: wire.Up) -> None:
        with self._sending:
            self._link.sendall(wire.frame(message))


async def _calm() -> None:
    """A handler may have cancelled its own task. The next run must not be cancelled by that."""
    me = asyncio.current_task()
    if me is not None and me.cancelling():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        while me.cancelling():
            me.uncancel()


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(link, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(link)


def _load(setup: wire.Setup) -> Callable[..., Any]:
    run_context.in_worker = True
    sys.argv = setup.argv
    if setup.main is not None:
        import_main(*setup.main)
    function = follow(setup.target)
    if setup.log_level is not None and not logging.getLogger().handlers:
        logging.basicConfig(level=setup.log_level, format=setup.log_format)
    return function  # type: ignore[no-any-return]


def _failed(number: int, error: BaseException) -> wire.Failed:
    with contextlib.suppress(BaseException):  # without the frame of this file
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    found = report(error)
    return wire.Failed(number, msgspec.structs.replace(found, kinds=[public_name(kind) for kind in found.kinds]))


def _die_with(parent: int) -> None:
    """Die with the parent, even in code that never lets the thread on the leash run."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)


def _ignore_signals() -> None:
    """Ignore Ctrl-C, and signals that a service manager sends to the whole process group: the parent drains, then ends
    this process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)  # not SIG_IGN: programs that a handler starts would inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _ignore(number: int, frame: object) -> None: ...
