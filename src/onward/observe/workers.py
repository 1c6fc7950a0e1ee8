"""What a supervisor serves: the reports of several worker processes combined into one. Pure, apart from its lock."""

import threading
from collections.abc import Callable, Sequence

import msgspec

from onward import clock
from onward.observe.figures import figures
from onward.observe.health import Health
from onward.observe.metrics import Family, exposition, folded
from onward.observe.reading import Reading

REPORT_S = 1.0  # how often a worker reports
SILENT_S = 5.0  # a worker that has not reported for this long is not ready
HUNG_S = 30.0  # and after this long it does not count as alive


class Report(msgspec.Struct, frozen=True):
    """What a worker sends to its supervisor."""

    health: Health
    readings: tuple[Reading, ...]
    families: tuple[Family, ...]  # beyond those of the readings
    prefix: str


class WorkerReport(msgspec.Struct, frozen=True):
    """A running worker and its last report. None: it is starting."""

    started_at: float
    report: Report | None = None
    reported_at: float = 0.0


class Workers:
    """The supervisor writes to it, and an endpoint in another thread reads from it.

    Ready: every worker runs, reports, and is ready. Live: the supervisor works, and not every worker hangs.
    Counters and histograms add up, those of ended workers included, so that they never fall. Gauges come from the
    workers that report. After a reload, a metric has the shape that the newest worker gives it.
    """

    def __init__(self, size: int, now: Callable[[], float] = clock.now) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._workers: dict[int, WorkerReport | None] = dict.fromkeys(range(1, size + 1))  # None: not running
        self._retired: list[Family] = []  # the counts of ended workers
        self._prefix = "onward"
        self._tended_at = now()
        self._silent: set[int] = set()  # as last reported by `news`

    # -- for the supervisor -------------------------------------------------------------------------------------

    def tended(self) -> None:
        self._tended_at = self._now()

    def started(self, number: int) -> None:
        with self._lock:
            self._workers[number] = WorkerReport(self._now())

    def reported(self, number: int, report: Report) -> None:
        numbered = tuple(msgspec.structs.replace(each, worker=number) for each in report.readings)
        with self._lock:
            worker = self._workers[number] or WorkerReport(self._now())
            report = msgspec.structs.replace(report, readings=numbered)
            self._workers[number] = msgspec.structs.replace(worker, report=report, reported_at=self._now())
            self._prefix = report.prefix

    def ended(self, number: int) -> None:
        with self._lock:
            worker, self._workers[number] = self._workers[number], None
            if worker is not None:
                self._retired = folded([self._retired, _totals(worker)])

    def news(self) -> list[str]:
        """Log lines for the workers that stopped reporting, or report again, since the last call."""
        with self._lock:
            silent = {number for number, worker in self._workers.items() if self._silent_s(worker) > SILENT_S}
        before, self._silent = self._silent, silent
        fell = [f"not ready: worker {number} has not reported for {SILENT_S:g} s" for number in sorted(silent - before)]
        return fell + [f"worker {number} reports again, or was replaced" for number in sorted(before - silent)]

    # -- for the endpoint ---------------------------------------------------------------------------------------

    def health(self) -> Health:
        with self._lock:
            troubles = [f"worker {n}{why}" for n, worker in self._workers.items() for why in self._troubles(worker)]
        return Health(not troubles, tuple(troubles))

    def live(self) -> Health:
        if self._now() - self._tended_at > HUNG_S:
            return Health(False, ("the supervisor hangs",))
        with self._lock:
            hung = all(self._silent_s(worker) > HUNG_S for worker in self._workers.values())
        return Health(not hung, (f"no worker has reported for {HUNG_S:g} s",) if hung else ())

    def readings(self) -> list[Reading]:
        return [reading for report in self._reporting() for reading in report.readings]

    def metrics(self) -> str:
        with self._lock:
            running = [worker for worker in self._workers.values() if worker is not None]
            running.sort(key=lambda worker: worker.started_at)
            parts = [self._retired, *(self._families(worker) for worker in running)]
        return exposition(folded([figures([]), *parts]), prefix=self._prefix)

    def _troubles(self, worker: WorkerReport | None) -> list[str]:
        if worker is None:
            return [" is not running; another one will be started"]
        if worker.report is None:
            return [" is starting"]
        silent_s = self._silent_s(worker)
        if silent_s > SILENT_S:
            return [f" has not reported for {silent_s:.0f} s"]
        return [f": {trouble}" for trouble in worker.report.health.troubles]

    def _silent_s(self, worker: WorkerReport | None) -> float:
        """How long it has not reported. 0 while it starts or is about to: the supervisor handles that."""
        return 0.0 if worker is None or worker.report is None else self._now() - worker.reported_at

    def _reporting(self) -> list[Report]:
        with self._lock:
            workers = [worker for worker in self._workers.values() if worker is not None]
        return [each.report for each in workers if each.report is not None and self._silent_s(each) <= SILENT_S]

    def _families(self, worker: WorkerReport) -> Sequence[Family]:
        return _totals(worker) if self._silent_s(worker) > SILENT_S else _all(worker)


def _all(worker: WorkerReport) -> list[Family]:
    return [] if worker.report is None else [*figures(worker.report.readings), *worker.report.families]


def _totals(worker: WorkerReport) -> list[Family]:
    """The metrics that only grow. They still count when the worker has ended or does not report."""
    return [family for family in _all(worker) if family.kind != "gauge"]
