"""Tools for all benchmarks: clocks, medians, a folder on a real disk, fresh processes, and the list of figures."""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.witness import Verdict

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CHILD_TIMEOUT_S = 120.0
T = TypeVar("T")


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `samples` has every single measurement, by contestant."""

    what: str
    measured: str
    value: float
    beside: str = ""
    ratio: float | None = None
    target: str = ""
    met: bool | None = None
    samples: dict[str, list[float]] = {}


class Check(msgspec.Struct, frozen=True):
    what: str
    ok: bool
    detail: str


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """The result that a consuming process reports."""

    wall_s: float
    cpu_s: float
    peak_kb: int
    verdict: Verdict
    server_s: float = 0.0  # processor time of the server, where it was measured

    @property
    def per_wall_s(self) -> float:
        return self.verdict.handled / self.wall_s

    @property
    def per_cpu_s(self) -> float:
        return self.verdict.handled / self.cpu_s


class Bench:
    """One run of benchmarks: its size, its folder, and its results."""

    def __init__(self, *, quick: bool, folder: Path, say: Callable[[str], None]) -> None:
        self.quick = quick
        self.folder = folder
        self.say = say
        self.figures: list[Figure] = []
        self.checks: list[Check] = []

    def sized(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def path(self, name: str) -> Path:
        return self.folder / name

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)

    def check(self, what: str, ok: bool, detail: str) -> None:
        self.checks.append(Check(what, ok, detail))
        if not ok:
            self.say(f"  FAILED  {what}: {detail}")

    def judge(self, what: str, verdict: Verdict, *, ordered: bool = True) -> None:
        """Check that no event is missing and, with `ordered`, that none was handled before its key's earlier ones."""
        self.check(what, verdict.lost == 0 and (not ordered or verdict.inverted == 0), str(verdict))


class Stopwatch:
    """Measures wall time and the processor time of this process, from its creation on."""

    def __init__(self) -> None:
        self._cpu = cpu_s()
        self._wall = time.perf_counter()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, cpu_s() - self._cpu


class Pace:
    """Events per second in each round of one contestant: by wall time, and by processor time of this process."""

    def __init__(self) -> None:
        self.per_wall_s: list[float] = []
        self.per_cpu_s: list[float] = []

    @contextmanager
    def timed(self, events: int) -> Iterator[None]:
        watch = Stopwatch()
        yield
        wall_s, cpu_s = watch.read()
        self.per_wall_s.append(events / wall_s)
        self.per_cpu_s.append(events / cpu_s)

    def __str__(self) -> str:
        return f"{spread(self.per_wall_s)} /s, {1e6 / median(self.per_cpu_s):.1f} µs CPU"


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def server_cpu_s(pid: int) -> float:
    """The processor time of all threads of a process, exact to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def peak_kb() -> int:
    """The peak memory of this process."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
    # Not ru_maxrss: on Linux a process inherits that value from its parent.
    return int(status.split("VmHWM:")[1].split()[0])


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of each round. A disturbance in a round affects both contestants."""
    return median([a / b for a, b in zip(ours, theirs, strict=True)])


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """The median, with the smallest and the largest value."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for the files of this run, removed at the end."""
    # Not the system's temporary folder: on many machines that is memory, where an fsync costs nothing.
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=RESULTS) as path:
        yield Path(path)


@contextmanager
def fast_folder() -> Iterator[Path]:
    """A folder in memory, if the machine has one. Peers' queues are filled there, because filling is not measured."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="onward-bench-", dir=shm if os.access(shm, os.W_OK) else None) as path:
        yield Path(path)


def child_command(module: str, arguments: dict[str, Any], python: str = sys.executable) -> list[str]:
    return [python, "-m", "bench.child", module, msgspec.json.encode(arguments).decode()]


def child_environment() -> dict[str, str]:
    """The environment of a child: without the user's settings for Onward, and able to import this package from any
    folder. Python may write bytecode, so modules are compiled once, as in an installed package."""
    dropped = ("ONWARD_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    paths = [str(HERE.parent), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}


def child(module: str, cwd: Path, *, python: str = sys.executable, **arguments: Any) -> Ran:
    """Run a contestant in a fresh interpreter and return the result that it reports."""
    return run_command(child_command(module, arguments, python), cwd)


def run_command(command: Sequence[str], cwd: Path) -> Ran:
    """Run a contestant and return the result in its last line."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)[:500]} ended with {done.returncode}: {done.stderr[-2_000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Ran)
