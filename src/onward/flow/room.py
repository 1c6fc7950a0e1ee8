"""What one partition has in memory, and what of it waits for a time. Pure."""

from collections.abc import Iterator
from heapq import heappush
from itertools import chain

from onward.flow.entry import DELAYED, Entry
from onward.flow.lanes import Lanes
from onward.flow.tracker import Tracker


class Room:
    """Of one ownership, but for the lanes, which outlive it."""

    __slots__ = ("bytes", "delayed", "drawn", "lanes", "running", "timers", "tracker")

    def __init__(self, lanes: Lanes, tracker: Tracker) -> None:
        self.lanes = lanes
        self.tracker = tracker  # events of the log
        self.drawn: dict[int, Entry] = {}  # by position: events drawn from records
        self.timers: list[tuple[float, int]] = []  # a heap: time and position, of delayed events and of records
        self.bytes = 0
        self.running = 0
        self.delayed = 0

    def __iter__(self) -> Iterator[Entry]:
        return chain(self.tracker.open.values(), self.drawn.values())

    def find(self, position: int) -> Entry | None:
        return self.tracker.open.get(position) or self.drawn.get(position)

    def delay(self, entry: Entry, due: float) -> None:
        """It waits in place for its next attempt."""
        entry.stage = DELAYED
        entry.due = due
        self.delayed += 1
        heappush(self.timers, (due, entry.delivery.position))
