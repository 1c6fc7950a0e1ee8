"""One worker process, as the engine sees it: what it was given, what it has answered, how it ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]  # as multiprocessing does

from onward.clock import now
from onward.engines.base import Ended, Work
from onward.engines.processes import wire
from onward.engines.processes.line import Line
from onward.errors import GiveUp, RemoteError, RetryLater, Skip, Undecodable
from onward.event import Delivery

_BOOT = (
    "import sys; numbers = map(int, sys.argv[2:6]); sys.path[:] = sys.argv[6:]; "
    "from onward.engines.processes.child import main; main(*numbers)"
)
_PARENTS_BUSINESS = {signal.SIGINT, signal.SIGTERM}


class WorkerHandle:
    """Owns its process, its line and every work given to it until that is answered or handed back."""

    def __init__(self, setup: wire.Setup, heard: Callable[["WorkerHandle"], None]) -> None:
        self.owned: dict[int, Work] = {}  # by number, in the order of their runs
        self.bytes = 0  # of what is owned
        self.given = 0  # how many works it ever got; the number of the next
        self.returned: list[Work] = []  # handed back unstarted
        self.ready = False
        self.unfit: str | None = None
        self.leaving = False  # it has had all the events it may have
        self.retired = False  # and was told to end
        self.born = self._given_at = now()
        self._failed: dict[int, BaseException] = {}
        self._recalled: int | None = None  # the run behind which work was called back
        self._heard = (0, 0.0)  # finished and busy_s, when it was last heard
        self._paced = (0, 0.0)  # finished and busy_s, when the pace was last asked for
        ours, theirs = socket.socketpair()
        leash, self._leash = os.pipe()
        page = wire.new_page()
        self._page = wire.StatusPage(page)
        self._line = Line(ours, lambda: heard(self))
        try:
            self._process = _spawn(setup.target, (theirs.fileno(), page, leash))
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(leash)
            os.close(page)
        self.pid = self._process.pid
        self._line.send(setup)

    # -- to the worker ------------------------------------------------------------------------------------------

    @property
    def clogged(self) -> bool:
        """It has not taken all that was sent."""
        return self._line.clogged

    def give(self, works: Sequence[Work], until: float) -> None:
        first = self.given
        for number, work in enumerate(works, first):
            self.owned[number] = work
            self.bytes += size_of(work)
        self.given += len(works)
        self._given_at = now()
        batch = isinstance(works[0], tuple)
        whole = [wire.whole(work) for work in works]
        self._line.send((wire.Batches if batch else wire.Events)(first, until, whole))  # type: ignore[arg-type]

    def recall(self) -> None:
        """Ask for what it has not started, once for each run that lasts."""
        run = self.run
        if run is not None and self._recalled != run:
            self._recalled = run
            with contextlib.suppress(OSError):  # it is dead, and reading will say so
                os.write(self._leash, b"r")

    def retire(self) -> None:
        """Nothing more will come; it ends by itself."""
        self.retired = True
        self._line.send(wire.Retire())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    # -- from the worker ----------------------------------------------------------------------------------------

    def hear(self) -> list[Ended]:
        """Everything it has answered until now; says too whether it is ready, unfit or dead."""
        # The page first: the failures among what it calls finished are then on the line already.
        finished, busy_s = self._page.finished, self._page.busy_s
        for message in self._line.receive():
            self._heed(message)
        ended: list[Ended] = []
        # The page has no more than the sum: each of those that ended since the last look took the mean.
        took_s = (busy_s - self._heard[1]) / max(1, finished - self._heard[0])
        for number in list(self.owned):
            if number >= finished:
                break
            ended.append(Ended(self._take_back(number), self._failed.pop(number, None), took_s=took_s))
        self._heard = (finished, busy_s)
        return ended

    def glance(self) -> list[Ended]:
        """The same, when the line has not called: usually it costs no system call."""
        return self.hear() if self._page.finished > self._heard[0] else []

    def mute(self) -> None:
        """From now on it calls nobody; it may still be heard."""
        self._line.mute()

    def _take_back(self, number: int) -> Work:
        work = self.owned.pop(number)
        self.bytes -= size_of(work)
        return work

    def _heed(self, message: wire.FromWorker) -> None:
        match message:
            case wire.Ready():
                self.ready = True
            case wire.Unfit():
                self.unfit = message.why
            case wire.Returned():
                self.returned += [self._take_back(number) for number in message.numbers if number in self.owned]
            case wire.Failed():
                self._failed[message.number] = _error(message)

    # -- how it fares -------------------------------------------------------------------------------------------

    @property
    def finished(self) -> int:
        """How many runs have ended here, those that were called back included."""
        return self._page.finished

    @property
    def run(self) -> int | None:
        """The number of the run that it is in."""
        started = self._page.started
        return started - 1 if started > self._page.finished else None

    def running_s(self, at: float) -> float | None:
        """How long its present run takes already, or for how long it has not begun with what it was given."""
        if not self.owned:
            return None
        since = self._page.since
        return at - (since if self.run is not None else max(since, self._given_at))

    def pace(self) -> tuple[int, float]:
        """Runs ended since this was last asked, and how long they took together."""
        before, self._paced = self._paced, (self._page.finished, self._page.busy_s)
        return self._paced[0] - before[0], self._paced[1] - before[1]

    # -- its end ------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Its end of the line is closed."""
        return self._line.cut

    def ended(self) -> bool:
        """Has the process ended? Reaps it."""
        return self._process.poll() is not None

    def begun(self) -> Work | None:
        """Of what it owns, that which it had begun."""
        run = self.run
        return self._take_back(run) if run in self.owned else None

    def epitaph(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        if code is None:
            return "went away"
        if code >= 0:
            return f"exited with {code}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"was killed by signal {-code}"

    def close(self) -> None:
        """Let go of the line, the leash and the page; the process, if there still is one, ends by that."""
        self._line.close()
        if self._leash >= 0:
            os.close(self._leash)
            self._leash = -1
            self._page.close()


def size_of(work: Work) -> int:
    if isinstance(work, Delivery):
        return work.event.size
    return sum(delivery.event.size for delivery in work)


def _spawn(target: str, descriptors: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    """A fresh interpreter. It starts deaf to the signals that mean its parent, until it can ignore them itself."""
    numbers = [str(number) for number in (*descriptors, os.getpid())]
    boot = ["-c", _BOOT, f"onward worker {target}", *numbers, *sys.path]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_BUSINESS)
    try:
        return subprocess.Popen(
            [sys.executable, *_args_from_interpreter_flags(), *boot], stdin=subprocess.DEVNULL, pass_fds=descriptors
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _error(told: wire.Failed) -> BaseException:
    error = RemoteError(told.name, told.message, told.kinds, told.trace)
    decision = _decision(told)
    if decision is None:
        return error
    decision.__cause__ = error
    return decision


def _decision(told: wire.Failed) -> BaseException | None:
    if told.ours == RetryLater.__name__:
        return RetryLater(told.after_s, told.message)
    others: list[type[BaseException]] = [Undecodable, GiveUp, Skip]
    return next((kind(told.message) for kind in others if kind.__name__ == told.ours), None)
