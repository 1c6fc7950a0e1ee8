"""Counts the events of a partition, so that one that was removed before it was read is noticed. Pure.

Positions are sparse: their difference is no number of events. The server counts every event that is appended. The owner
counts every event that it reads. If the server counts more before a position than the owner, the others were removed by
another program.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable


class EventCount:
    """How many events were appended before the positions of one ownership."""

    __slots__ = ("_first", "_passed", "_positions")

    def __init__(self, first: int | None) -> None:
        self._first = (
            first  # events before the position where reading began, with those that are missing; None: unknown
        )
        self._passed = 0  # events that were read since, below the watermark
        self._positions = array("Q")  # of the events that were read, from the watermark on

    @property
    def read(self) -> int:
        return self._passed + len(self._positions)

    @property
    def appended(self) -> int | None:
        """Events before the next one to read. None: unknown."""
        return None if self._first is None else self._first + self.read

    def add(self, positions: Iterable[int]) -> None:
        """These were read, in this order."""
        self._positions.extend(positions)

    def before(self, watermark: int) -> int | None:
        """The events before a watermark, which only rises. None: unknown."""
        passed = bisect_left(self._positions, watermark)
        del self._positions[:passed]
        self._passed += passed
        return None if self._first is None else self._first + self._passed

    def missing(self, appended: int, read: int) -> int:
        """How many events are newly missing. `appended`: what the server counts before the next event to read, when so
        many had been `read`."""
        if self._first is None:
            self._first = appended - read
        missing = max(0, appended - read - self._first)
        self._first += missing
        return missing
