"""A witness with a watch. Every contestant on Kafka is timed alike: from its first event to its last, nothing else."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from bench.kit import Ran, Stopwatch, peak_kb
from bench.witness import Verdict, Witness

T = TypeVar("T")


def looped(main: Coroutine[Any, Any, T]) -> T:
    """Run it on uvloop, as `onward run` does: all contestants in Python have it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class Lap:
    """What it costs to join a group and to leave it is not in the time; what warms up while events flow is."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.witness = Witness(expected)
        self._watch: Stopwatch | None = None
        self._read = (0.0, 0.0)

    def saw(self, key: str, number: int) -> bool:
        """Count an event; True once all have been seen."""
        if self._watch is None:
            self._watch = Stopwatch()
        if not self.witness.saw(key, number):
            return False
        if self._read == (0.0, 0.0):
            self._read = self._watch.read()
        return True

    @property
    def is_over(self) -> bool:
        return self.witness.handled >= self.expected

    def ran(self, inverted: int = 0) -> Ran:
        """`inverted`: those among events that were not to be counted."""
        wall_s, cpu_s = self._read if any(self._read) or self._watch is None else self._watch.read()
        found = self.witness.verdict()
        verdict = Verdict(found.expected, found.handled, found.inverted + inverted, found.duplicates)
        return Ran(wall_s=wall_s, cpu_s=cpu_s, peak_kb=peak_kb(), verdict=verdict)
