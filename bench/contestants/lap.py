"""A witness with a watch. Every contestant on Kafka is timed in the same way: from its first event to its last."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from bench.kit import Ran, Stopwatch, peak_kb
from bench.witness import Verdict, Witness

T = TypeVar("T")


def looped(main: Coroutine[Any, Any, T]) -> T:
    """Run it on uvloop, as `onward run` does. All contestants in Python use uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class Lap:
    """The time does not include joining and leaving the group. It includes warming up while events flow."""

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
        """`inverted`: how many of the events that are not counted were handled out of order."""
        wall_s, cpu_s = self._read if any(self._read) or self._watch is None else self._watch.read()
        found = self.witness.verdict()
        verdict = Verdict(found.expected, found.handled, found.inverted + inverted, found.duplicates)
        return Ran(wall_s=wall_s, cpu_s=cpu_s, peak_kb=peak_kb(), verdict=verdict)
