"""What may run now: one event of a lane at a time, oldest first."""

from collections import deque
from collections.abc import Hashable
from heapq import heapify, heappush
from itertools import islice

from onward.brokers.base import Ordering
from onward.flow.entry import Entry, Stage

_WHOLE = object()  # the lane that is the whole partition


class Lanes:
    """Pure. The lanes of one partition, over all its ownerships in this process.

    A lane is a queue whose head is ready, running, delayed, marking or leaving; a lane exists while it has a head.
    Events without a key, and all events under ordering "none", have no lane and are ready at once. `ready` is a
    heap of positions: the oldest runs first, so what blocks the watermark never waits behind what does not.
    """

    __slots__ = ("_by_key", "_lanes", "_ordering", "ready")

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._by_key = ordering == "key"
        self._lanes: dict[Hashable, deque[Entry]] = {}
        self.ready: list[int] = []

    def __len__(self) -> int:
        return len(self._lanes)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._lanes

    def name(self, entry: Entry) -> Hashable | None:
        if self._by_key:
            return entry.delivery.event.key
        return _WHOLE if self._ordering == "partition" else None

    def add(self, entry: Entry, share: int) -> bool:
        """Queue an event at the end of its lane. False: the lane has its share already, and it was not queued."""
        name = entry.delivery.event.key if self._by_key else self.name(entry)
        if name is not None:
            lane = self._lanes.get(name)
            if lane is not None:
                if len(lane) >= share:
                    return False
                lane.append(entry)
                return True
            self._lanes[name] = deque((entry,))
        heappush(self.ready, entry.delivery.position)
        return True

    def again(self, entry: Entry) -> None:
        """An event may run once more. Only the head of its lane becomes ready by it."""
        entry.stage = Stage.QUEUED
        name = self.name(entry)
        if name is None or self._lanes[name][0] is entry:
            heappush(self.ready, entry.delivery.position)

    def followers(self, entry: Entry, count: int) -> list[Entry]:
        """Up to `count` events that stand right behind this head."""
        name = self.name(entry)
        return list(islice(self._lanes[name], 1, 1 + count)) if name is not None and count > 0 else []

    def leave(self, entry: Entry) -> bool:
        """This event has ended: the next of its lane becomes ready. True: its lane is empty now."""
        name = entry.delivery.event.key if self._by_key else self.name(entry)
        lane = self._lanes.get(name) if name is not None else None
        if lane is None:
            return False
        if lane[0] is not entry:
            self._leave_batch(lane, entry)
            return False
        lane.popleft()
        if not lane:
            del self._lanes[name]
            return True
        if lane[0].stage is Stage.QUEUED:  # in a batch it may be running already
            heappush(self.ready, lane[0].delivery.position)
        return False

    @staticmethod
    def _leave_batch(lane: deque[Entry], entry: Entry) -> None:
        """Of a batch, one that is not the head may end first."""
        for index, each in enumerate(lane):
            if each is entry:
                del lane[index]
                return
            if each.stage is not Stage.RUNNING:
                return

    def cut(self, entry: Entry) -> list[Entry]:
        """Take everything behind this head out of its lane, in order; what runs with it stays."""
        name = self.name(entry)
        lane = self._lanes.get(name) if name is not None else None
        if lane is None or lane[0] is not entry:
            return []
        keep = 1
        while keep < len(lane) and lane[keep].stage is Stage.RUNNING:
            keep += 1
        rest = list(islice(lane, keep, None))
        for _ in rest:
            lane.pop()
        return rest

    def withdraw(self, name: Hashable, after: int) -> list[Entry]:
        """Take everything above this position out of a lane, in order; what runs, or is about to, stays."""
        lane = self._lanes.get(name)
        if lane is None:
            return []
        start = next((i for i, each in enumerate(lane) if _waits(each) and each.delivery.position > after), len(lane))
        rest = list(islice(lane, start, None))
        for _ in rest:
            lane.pop()
        if not lane:
            del self._lanes[name]
            self._unready(rest[0])
        return rest

    def insert(self, entry: Entry) -> None:
        """Queue an event before those of its lane that are newer and wait."""
        name = self.name(entry)
        lane = self._lanes.setdefault(name, deque()) if name is not None else deque()
        position = entry.delivery.position
        place = next((i for i, e in enumerate(lane) if _waits(e) and e.delivery.position > position), len(lane))
        if place == 0:
            if lane:
                self._unready(lane[0])
            heappush(self.ready, position)
        lane.insert(place, entry)

    def _unready(self, entry: Entry) -> None:
        """It is the head of its lane no more. Seldom: somebody has brought back a record."""
        if entry.delivery.position in self.ready:
            self.ready.remove(entry.delivery.position)
            heapify(self.ready)

    def head(self, name: Hashable) -> Entry | None:
        lane = self._lanes.get(name)
        return lane[0] if lane else None

    def abandon(self) -> None:
        """Ownership has ended: forget all but what still runs.

        Those lanes stay busy, so that a later ownership in this process does not run a key twice at once.
        """
        self.ready.clear()
        running = {name: deque(e for e in lane if e.stage is Stage.RUNNING) for name, lane in self._lanes.items()}
        self._lanes = {name: lane for name, lane in running.items() if lane}


def _waits(entry: Entry) -> bool:
    """For its turn, a slot or its time: nobody has heard of it yet."""
    return entry.stage is Stage.QUEUED or entry.stage is Stage.DELAYED
