"""One run of the simulator: a clock, a queue of future calls, the broker, the processes and the checkers."""

import traceback
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from typing import Any
from zlib import crc32

import msgspec

from onward.event import Event, Partition
from onward.testing.simulator.broker import OwnedBroker
from onward.testing.simulator.checkers import EndChecker, Violation, broken
from onward.testing.simulator.faults import Faults
from onward.testing.simulator.group import TOPIC, Group
from onward.testing.simulator.handler import SimulatedHandler
from onward.testing.simulator.ledger import Ledger
from onward.testing.simulator.process import SimulatedProcess
from onward.testing.simulator.profile import Profile, draw
from onward.testing.simulator.shared import SharedBroker
from onward.testing.simulator.witness import Witness

START = 100.0
PATIENCE_S = 1_500.0  # simulated time after the faults have stopped: enough for every retry, crash and slow event


class Result(msgspec.Struct, frozen=True):
    seed: int
    checker: str | None  # the checker that failed; None: none did
    message: str
    counts: dict[str, int]
    trace: list[str]


Shape = Callable[[Profile], Profile]


def simulate(seed: int, *, trace: bool = False, shape: Shape | None = None) -> Result:
    """Do one run. The same seed gives the same run, byte for byte. `shape` can change the profile that was drawn, for
    example to make a rare fault frequent."""
    world = World(seed, trace=trace, shape=shape)
    checker, message = None, ""
    try:
        world.run()
    except Violation as error:
        checker, message = error.checker, str(error)
    except Exception as error:
        checker, message = "exception", "".join(traceback.format_exception(error))
    world.counts["simulated s"] = int(world.now - START)
    if checker:
        world.trace("checker", message)
    return Result(seed, checker, message, dict(world.counts), world.lines)


class World:
    def __init__(self, seed: int, *, trace: bool = False, shape: Shape | None = None) -> None:
        self.rng = Random(seed)
        drawn = draw(self.rng)
        self.profile: Profile = shape(drawn) if shape else drawn
        self.now = START
        self.tracing = trace
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.troubles: dict[str, float] = {}
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._names = 0
        self._closing = False
        partitions = [Partition(TOPIC, index) for index in range(self.profile.partitions)]
        self.ledger = Ledger(self.profile.limits, partitions)
        self.handler = SimulatedHandler(self.profile, self.rng)
        self.witness = Witness(self)
        self.broker: Group = (SharedBroker if self.profile.shared else OwnedBroker)(self, partitions)
        self.processes: list[SimulatedProcess] = []

    # -- time ---------------------------------------------------------------------------------------------------

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heappush(self._queue, (time, self._order, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heappush(self._queue, (self.now + delay_s, self._order, call, args))

    def run_until(self, time: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= time:
            self.now, _, call, args = heappop(queue)
            call(*args)
        self.now = time

    def latency(self) -> float:
        """How long a message takes to the broker, or back."""
        return self.rng.random() * 2 * self.profile.latency_s if self.profile.latency_s else 0.0

    def lag(self) -> float:
        """How late the event loop of a process is: mostly not at all."""
        return self.rng.random() * 0.05 if self.rng.random() < 0.1 else 0.0

    def trouble(self, kind: str) -> bool:
        """Is there trouble of this kind now, and does it hit this call?"""
        return bool(self.troubles) and self.troubles.get(kind, 0.0) > self.now and self.rng.random() < 0.7

    def settle_mode(self) -> str:
        for mode in ("error", "lost answer", "late", "refuse"):
            if self.trouble(f"settle {mode}"):
                return mode
        return "ok"

    def trace(self, actor: str, what: str) -> None:
        """Add a line to the trace, if the run has one."""
        if self.tracing:
            self.lines.append(f"{self.now:10.4f}  {actor:8}  {what}")

    def note(self, actor: str, what: str) -> None:
        """Count this, and add a line to the trace."""
        self.counts[what] += 1
        self.trace(actor, what)

    # -- the run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.trace("profile", str(self.profile))
        self.counts["sparse runs"] += self.profile.stride > 1
        self.counts["shared runs"] += self.profile.shared
        self._plan_publishing()
        for index in range(self.profile.members):
            self.after(0.0 if index == 0 else self.rng.uniform(0.0, 5.0), self.start)
        Faults(self).schedule()
        self.run_until(START + self.profile.active_s)
        self.trace("world", "publishing and faults have ended")
        self.troubles.clear()
        if not self._alive():
            self.start()
        until = self.now + PATIENCE_S
        while self._left() and self.now < until:
            self.run_until(self.now + 1.0)
        self._check_end()

    def _check_end(self) -> None:
        if left := self._left():
            broken("liveness", "; ".join(left[:6]))
        if lost := EndChecker(self.ledger).lost():
            broken("loss", "; ".join(lost[:6]))
        if not self.counts["truncated"] and (untrue := EndChecker(self.ledger).untrue()):
            broken("records", "; ".join(untrue[:6]))
        if self.rng.random() < 0.5:
            self._leave_all()

    def _leave_all(self) -> None:
        """Everything is done, so all members can leave drained."""
        self._closing = True
        undrained = self.counts["undrained"]
        for process in self._alive():
            process.stop()
        self.run_until(self.now + 30.0)
        if self._alive() or self.counts["undrained"] != undrained:
            broken("liveness", f"{len(self._alive())} members have not left, or some left undrained")

    def _left(self) -> list[str]:
        """What is left to do before the run is complete."""
        ending = EndChecker(self.ledger)
        return ending.open(self.broker.standings(), self._alive()) or ending.stuck()

    # -- processes ----------------------------------------------------------------------------------------------

    def _alive(self) -> list[SimulatedProcess]:
        return [process for process in self.processes if not process.dead]

    def start(self) -> None:
        if self._closing:
            return
        self._names += 1
        name = f"m{self._names}"
        self.trace(name, "joins")
        self.processes = [*self._alive(), SimulatedProcess(self, name)]

    def ended(self, process: SimulatedProcess) -> None:
        """A process has crashed. Like a supervisor, start another one soon."""
        self.after(self.rng.uniform(0.1, 4.0), self.start)

    # -- publishing ---------------------------------------------------------------------------------------------

    def _plan_publishing(self) -> None:
        profile, rng = self.profile, self.rng
        weights = list(accumulate(1.0 / rank for rank in range(1, profile.keys + 1)))
        backlog = rng.choice((0.0, 0.3, 1.0))
        for number in range(profile.events):
            key = None
            if rng.random() >= profile.keyless:
                key = f"k{rng.choices(range(profile.keys), cum_weights=weights)[0]}"
            size = rng.randint(profile.largest // 2, profile.largest) if rng.random() < 0.05 else rng.randint(0, 40)
            event = Event(f"e{number}", TOPIC, key, bytes(size))
            delay_s = 0.0 if rng.random() < backlog else rng.uniform(0.0, profile.active_s * 0.9)
            self.after(delay_s, self._publish, event)
        for _ in range(rng.choice((0, 2, 6))):
            self.after(rng.uniform(0.0, profile.active_s), self._mark)

    def _publish(self, event: Event) -> None:
        count, rng = len(self.broker.partitions), self.rng
        index = crc32(event.key.encode()) % count if event.key is not None else rng.randrange(count)
        partition = Partition(TOPIC, index)
        gap = rng.randint(1, 4) if rng.random() < self.profile.holes else 0
        gap += self._stride()
        position = self.broker.publish(partition, event, gap)
        story = self.ledger.publish(partition, position, event)
        self.handler.draw_fate(story)
        self.counts["published"] += 1
        if self.tracing:
            self.trace("publish", f"{story} {story.fate} {event.size} bytes")

    def _mark(self) -> None:
        """Add a transaction marker or the like: it takes a position and is never delivered."""
        count = self.rng.randint(1, 3) + self._stride()
        self.broker.marker(Partition(TOPIC, self.rng.randrange(len(self.broker.partitions))), count)

    def _stride(self) -> int:
        """How many positions are skipped before the next event."""
        stride = self.profile.stride
        return self.rng.randint(stride // 2, stride * 3 // 2) if stride > 1 else 0
