"""The events of one partition in memory: the open ones, their lanes and their timers. Pure."""

from collections.abc import Iterator
from heapq import heappush
from itertools import chain

import msgspec

from onward.brokers.base import State
from onward.event import Delivery
from onward.flow.entry import DELAYED, Entry
from onward.flow.lanes import Lanes
from onward.flow.limits import Limits
from onward.flow.tracker import Tracker


class BeforeLoad(msgspec.Struct):
    """What arrived before the records of the aside were loaded."""

    backlog: list[Delivery] = []
    reached: int = 0  # how far the log was read
    moved: list[tuple[int, State | None, float]] = []  # applied after the load: pages may be older than the move


class WatermarkClock:
    """Measures how long the watermark has not moved although an event is open."""

    __slots__ = ("at", "since")

    def __init__(self) -> None:
        self.at = -1  # the watermark; -1: nothing was open
        self.since = 0.0

    def for_s(self, watermark: int, now: float) -> float:
        return now - self.since if watermark == self.at else 0.0


class OpenEvents:
    """The open events of one ownership. Only the lanes outlive it."""

    __slots__ = (
        "before_load",
        "bytes",
        "delayed",
        "drawn",
        "fill_since",
        "lanes",
        "running",
        "standstill",
        "timers",
        "tracker",
    )

    def __init__(self, lanes: Lanes, tracker: Tracker) -> None:
        self.lanes = lanes
        self.tracker = tracker  # events of the log
        self.drawn: dict[int, Entry] = {}  # by position: events drawn from records
        self.before_load = BeforeLoad()
        self.timers: list[tuple[float, int]] = []  # a heap of (time, position) of delayed events and waiting records
        self.bytes = 0
        self.running = 0
        self.delayed = 0
        self.fill_since: float | None = None  # since when a batch waits to fill
        self.standstill = WatermarkClock()

    def __iter__(self) -> Iterator[Entry]:
        return chain(self.tracker.open.values(), self.drawn.values())

    @property
    def count(self) -> int:
        """Delivered and not done, or drawn from records."""
        return len(self.tracker.open) + len(self.drawn) + len(self.before_load.backlog)

    @property
    def stands_at(self) -> int:
        """The watermark while an event is open; -1: none is open."""
        return self.tracker.watermark if self.tracker.open or self.before_load.backlog else -1

    def find(self, position: int) -> Entry | None:
        return self.tracker.open.get(position) or self.drawn.get(position)

    def delay(self, entry: Entry, due: float) -> None:
        """Let an event wait in memory for its next attempt."""
        entry.stage = DELAYED
        entry.due = due
        self.delayed += 1
        heappush(self.timers, (due, entry.delivery.position))

    def draw(self, entry: Entry) -> None:
        """Put the event of a record into its lane."""
        self.drawn[entry.delivery.position] = entry
        self.bytes += entry.size
        self.lanes.insert(entry)

    def undraw(self, entry: Entry) -> None:
        """Take a drawn event out of its lane. It is done, or goes back into the aside."""
        del self.drawn[entry.delivery.position]
        self.bytes -= entry.size
        self.lanes.leave(entry)

    def has_room(self, limits: Limits) -> bool:
        """Whether one more event may be drawn. Memory has a limit, but one drawn event is always allowed."""
        within = len(self.drawn) < limits.max_in_flight and self.bytes < limits.max_in_flight_bytes
        return within or not self.drawn
