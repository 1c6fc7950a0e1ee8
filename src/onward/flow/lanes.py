"""Decides which events may run now: one event of a lane at a time, oldest first."""

from collections import deque
from collections.abc import Hashable, Sequence
from heapq import heapify, heappush
from itertools import islice

from onward.brokers.base import Ordering
from onward.flow.entry import DELAYED, QUEUED, RUNNING, Entry

_WHOLE = object()  # the lane that is the whole partition


class Lanes:
    """Pure. The lanes of one partition, over all its ownerships in this process.

    A lane is a queue whose head is ready, running, delayed, marking or leaving. It exists while it has a head. Most
    lanes have only a head, so a lane of one event is stored as the event itself, without a queue.
    Events without a key, and all events under ordering "none", have no lane and are ready at once. `ready` is a
    heap of positions: the oldest runs first, so the event that blocks the watermark never waits behind another.
    """

    __slots__ = ("_by_key", "_lanes", "_ordering", "ready")

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._by_key = ordering == "key"
        self._lanes: dict[Hashable, deque[Entry] | Entry] = {}
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
        """Queue an event at the end of its lane. False: the lane is full, and the event was not queued."""
        return self.add_all((entry,), share) == 1

    def add_all(self, entries: Sequence[Entry], share: int) -> int:
        """`add` for many events, up to the first that is not queued. Returns how many were queued."""
        lanes, ready, by_key = self._lanes, self.ready, self._by_key
        for count, entry in enumerate(entries):
            name = entry.delivery.event.key if by_key else self.name(entry)
            if name is not None:
                lane = lanes.get(name)
                if lane is None:
                    lanes[name] = entry
                else:
                    queue = lane if isinstance(lane, deque) else self._queued(name, lane)
                    if len(queue) >= share:
                        return count
                    queue.append(entry)
                    continue
            heappush(ready, entry.delivery.position)
        return len(entries)

    def again(self, entry: Entry) -> None:
        """An event may run again. It becomes ready if it is the head of its lane."""
        entry.stage = QUEUED
        name = self.name(entry)
        if name is None or self.head(name) is entry:
            heappush(self.ready, entry.delivery.position)

    def followers(self, entry: Entry, count: int) -> list[Entry]:
        """Up to `count` events right behind this head."""
        name = self.name(entry)
        lane = self._queue(name)
        return list(islice(lane, 1, 1 + count)) if lane is not None and count > 0 else []

    def leave(self, entry: Entry) -> bool:
        """Take an event out of its lane; the next one becomes ready. True: the lane is empty now."""
        name = entry.delivery.event.key if self._by_key else self.name(entry)
        lane = self._lanes.get(name) if name is not None else None
        if lane is entry:
            del self._lanes[name]
            return True
        return isinstance(lane, deque) and self._leave_queue(name, lane, entry)

    def _leave_queue(self, name: Hashable, lane: deque[Entry], entry: Entry) -> bool:
        if lane[0] is not entry:
            self._leave_batch(lane, entry)
            return False
        lane.popleft()
        if not lane:
            del self._lanes[name]
            return True
        if lane[0].stage is QUEUED:  # in a batch it may already be running
            heappush(self.ready, lane[0].delivery.position)
        return False

    @staticmethod
    def _leave_batch(lane: deque[Entry], entry: Entry) -> None:
        """Take out an event that is not the head: in a batch it may end before the head."""
        for index, each in enumerate(lane):
            if each is entry:
                del lane[index]
                return
            if each.stage is not RUNNING:
                return

    def cut(self, entry: Entry) -> list[Entry]:
        """Take everything behind this head out of its lane, in order. Events that run in the same batch stay."""
        name = self.name(entry)
        lane = self._queue(name)
        if lane is None or lane[0] is not entry:
            return []
        keep = 1
        while keep < len(lane) and lane[keep].stage is RUNNING:
            keep += 1
        rest = list(islice(lane, keep, None))
        for _ in rest:
            lane.pop()
        return rest

    def withdraw(self, name: Hashable, after: int) -> list[Entry]:
        """Take everything above this position out of a lane, in order. Events that run, or are about to run, stay."""
        lane = self._queue(name)
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
        """Queue an event before the newer events of its lane that wait."""
        name = self.name(entry)
        lane = self._queue(name) or deque()
        if name is not None:
            self._lanes[name] = lane
        position = entry.delivery.position
        place = next((i for i, e in enumerate(lane) if _waits(e) and e.delivery.position > position), len(lane))
        if place == 0:
            if lane:
                self._unready(lane[0])
            heappush(self.ready, position)
        lane.insert(place, entry)

    def _unready(self, entry: Entry) -> None:
        """This event is no longer the head of its lane. That is rare: an operator has replayed a record."""
        if entry.delivery.position in self.ready:
            self.ready.remove(entry.delivery.position)
            heapify(self.ready)

    def head(self, name: Hashable) -> Entry | None:
        lane = self._lanes.get(name)
        return lane[0] if isinstance(lane, deque) else lane

    def _queue(self, name: Hashable | None) -> deque[Entry] | None:
        """The lane as a queue, also if it has only one event. None: there is no such lane."""
        lane = self._lanes.get(name) if name is not None else None
        return lane if lane is None or isinstance(lane, deque) else self._queued(name, lane)

    def _queued(self, name: Hashable, head: Entry) -> deque[Entry]:
        queue = self._lanes[name] = deque((head,))
        return queue

    def abandon(self) -> None:
        """Ownership has ended: forget all events except those that still run.

        Their lanes stay busy, so that a later ownership in this process does not run two events of a key at once.
        """
        self.ready.clear()
        running: dict[Hashable, deque[Entry] | Entry] = {}
        for name, lane in self._lanes.items():
            runs = deque(each for each in (lane if isinstance(lane, deque) else (lane,)) if each.stage is RUNNING)
            if runs:
                running[name] = runs
        self._lanes = running


def _waits(entry: Entry) -> bool:
    """Whether the event waits for its turn, a slot or its retry. No engine has it yet."""
    return entry.stage is QUEUED or entry.stage is DELAYED
