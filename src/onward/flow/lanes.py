"""What may run now: one event of a lane at a time, oldest first."""

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush

from onward.brokers.base import Ordering
from onward.flow.entry import Entry, Stage

_WHOLE = object()  # the lane that is the whole partition


class Lanes:
    """Pure. The lanes of one partition, over all its ownerships in this process.

    A lane is a queue whose head is ready, running, delayed or leaving; a lane exists while it has a head. Events
    without a key, and all events under ordering "none", have no lane and are ready at once. `ready` is a heap of
    positions: the oldest runs first, so what blocks the watermark never waits behind what does not.
    """

    __slots__ = ("_lanes", "_ordering", "ready")

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._lanes: dict[Hashable, deque[Entry]] = {}
        self.ready: list[int] = []

    def __len__(self) -> int:
        return len(self._lanes)

    def _name(self, entry: Entry) -> Hashable | None:
        if self._ordering == "key":
            return entry.delivery.event.key
        return _WHOLE if self._ordering == "partition" else None

    def add(self, entry: Entry) -> None:
        """Queue an event at the end of its lane."""
        name = self._name(entry)
        if name is not None:
            lane = self._lanes.get(name)
            if lane is not None:
                lane.append(entry)
                return
            self._lanes[name] = deque((entry,))
        heappush(self.ready, entry.delivery.position)

    def next_ready(self) -> int:
        return heappop(self.ready)

    def again(self, entry: Entry) -> None:
        """The head of a lane may run once more."""
        entry.stage = Stage.QUEUED
        heappush(self.ready, entry.delivery.position)

    def leave(self, entry: Entry) -> None:
        """This event has ended: the next of its lane becomes ready. Harmless when it heads no lane."""
        name = self._name(entry)
        lane = self._lanes.get(name) if name is not None else None
        if lane is None or lane[0] is not entry:
            return
        lane.popleft()
        if lane:
            heappush(self.ready, lane[0].delivery.position)
        else:
            del self._lanes[name]

    def abandon(self) -> None:
        """Ownership has ended: forget all but the heads that still run.

        Their lanes stay busy, so that a later ownership in this process does not run a key twice at once.
        """
        self.ready.clear()
        self._lanes = {name: deque((lane[0],)) for name, lane in self._lanes.items() if lane[0].stage is Stage.RUNNING}
