"""The engine's view of one worker process: the work it was given, its answers, and how it ended."""

from collections.abc import Callable, Sequence

from onward.clock import now
from onward.engines.base import Ended, Work
from onward.engines.processes import wire
from onward.engines.processes.process import WorkerProcess
from onward.error_report import revived
from onward.event import Delivery


class GivenWork:
    """The work that a worker was given and has not answered, by number, in the order of the runs. `most`: how many
    works the worker may get in its life."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.works: dict[int, Work] = {}
        self.bytes = 0
        self.count = 0  # how many works the worker ever got; the number of the next
        self.at = now()

    def add(self, works: Sequence[Work]) -> int:
        """Returns the number of the first."""
        first = self.count
        for number, work in enumerate(works, first):
            self.works[number] = work
            self.bytes += size_of(work)
        self.count += len(works)
        self.at = now()
        return first

    def take(self, number: int) -> Work:
        work = self.works.pop(number)
        self.bytes -= size_of(work)
        return work


class WorkerHandle:
    """Owns its process, and every work given to it until the worker answers it or hands it back.

    The worker may get `max_events` works in its life.
    """

    def __init__(self, setup: wire.Setup, max_events: int, readable: Callable[["WorkerHandle"], None]) -> None:
        self.ready = False
        self.unfit: str | None = None  # why it cannot run the handler
        self.retired = False  # the engine has asked it to end
        self.returned: list[Work] = []  # work that the worker handed back before it began
        self._given = GivenWork(max_events)
        self._failed: dict[int, BaseException] = {}
        self._asked: dict[wire.Order, int] = {}  # the run during which each order was last given
        self._at = wire.At(-1, "")  # the last answer
        self._seen = (0, 0.0)  # finished and busy_s, as last read
        self._process = WorkerProcess(setup, lambda: readable(self))

    # -- to the worker ------------------------------------------------------------------------------------------

    @property
    def owned(self) -> dict[int, Work]:
        return self._given.works

    @property
    def bytes(self) -> int:
        """The size of the work that it owns."""
        return self._given.bytes

    @property
    def left(self) -> int:
        """How many works it may still get in its life."""
        return self._given.most - self._given.count

    @property
    def clogged(self) -> bool:
        """Whether the worker has not yet read everything that was sent."""
        return self._process.line.clogged

    def give(self, works: Sequence[Work], until: float) -> None:
        first = self._given.add(works)
        batch = isinstance(works[0], tuple)
        whole = [wire.whole(work) for work in works]
        self._process.line.send((wire.Batches if batch else wire.Events)(first, until, whole))  # type: ignore[arg-type]

    def ask(self, order: wire.Order) -> None:
        """Send an order on the leash, once during each run: return the work that has not begun (wire.RECALL), or report
        the line that the current run has reached (wire.LOCATE; `where` has the answer)."""
        run = self.run
        if run is not None and self._asked.get(order) != run:
            self._asked[order] = run
            self._process.pull_leash(order)

    def retire(self) -> None:
        """Send nothing more: the worker ends by itself."""
        self.retired = True
        self._process.line.send(wire.Retire())

    def kill(self) -> None:
        self._process.kill()

    # -- from the worker ----------------------------------------------------------------------------------------

    def read(self) -> list[Ended]:
        """Read all answers of the worker. Returns the runs that ended, and updates `ready`, `unfit` and `dead`."""
        # The page comes first: the line then already has the failures of all runs that the page counts as finished.
        finished, busy_s = self._process.page.finished, self._process.page.busy_s
        for message in self._process.line.receive():
            self._apply(message)
        ended: list[Ended] = []
        # The page has only the sum, so each run that ended since the last read gets the mean.
        took_s = (busy_s - self._seen[1]) / max(1, finished - self._seen[0])
        for number in list(self.owned):
            if number >= finished:
                break
            ended.append(Ended(self._given.take(number), self._failed.pop(number, None), took_s=took_s))
        self._seen = (finished, busy_s)
        return ended

    def glance(self) -> list[Ended]:
        """`read`, but only if the page shows an ended run: this usually costs no system call."""
        return self.read() if self._process.page.finished > self._seen[0] else []

    def mute(self) -> None:
        """Stop calling `readable`. `read` still works."""
        self._process.line.mute()

    def _apply(self, message: wire.FromWorker) -> None:
        match message:
            case wire.Ready():
                self.ready = True
            case wire.Unfit():
                self.unfit = message.why
            case wire.Returned():
                self.returned += [self._given.take(number) for number in message.numbers if number in self.owned]
            case wire.At():
                self._at = message
            case wire.Failed():
                self._failed[message.number] = revived(message.error)

    # -- its state ----------------------------------------------------------------------------------------------

    @property
    def finished(self) -> int:
        """How many runs have ended here, including work that the worker handed back."""
        return self._process.page.finished

    @property
    def run(self) -> int | None:
        """The number of the current run; None: nothing runs."""
        started = self._process.page.started
        return started - 1 if started > self._process.page.finished else None

    @property
    def where(self) -> str | None:
        """The line that the current run had reached when the worker was asked; None: there is no answer yet."""
        return self._at.where if self._at.number == self.run else None

    def running_s(self, at: float) -> float | None:
        """How long the current run has taken; if none has begun, how long the work has waited here."""
        if not self.owned:
            return None
        since = self._process.page.since
        return at - (since if self.run is not None else max(since, self._given.at))

    # -- its end ------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def born(self) -> float:
        return self._process.born

    @property
    def dead(self) -> bool:
        """Whether the worker's end of the line is closed."""
        return self._process.line.cut

    def ended(self) -> bool:
        """Whether the process has ended. Reaps it."""
        return self._process.ended()

    def begun(self) -> Work | None:
        """Take the work whose run had begun."""
        run = self.run
        return self._given.take(run) if run in self.owned else None

    def unstarted(self) -> list[Work]:
        """The work that another worker should run. Call this after `begun`."""
        return [*self.returned, *self.owned.values()]

    def ending(self) -> str:
        """How the process ended, as text for the log."""
        return self._process.ending()

    def close(self) -> None:
        self._process.close()


def size_of(work: Work) -> int:
    if isinstance(work, Delivery):
        return work.event.size
    return sum(delivery.event.size for delivery in work)
