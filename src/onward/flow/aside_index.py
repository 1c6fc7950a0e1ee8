"""The records of one partition that stand aside: which are known, which are to be read, and whose turn it is. Pure.

It returns values and acts on nothing else: the holding draws records into lanes, and puts events back.
"""

import math
from collections import deque
from enum import IntEnum
from heapq import heappop, heappush

from onward.brokers.base import AsideRecord, Assigned, State, Tries
from onward.event import Delivery, Event
from onward.flow.entry import Instant, ParkedRecord
from onward.flow.limits import Limits
from onward.flow.parking import Parking
from onward.flow.record_loading import RecordLoading


class RecordTurn(IntEnum):
    """What becomes of a record now."""

    LATER = 0  # it will be asked about again when what stands in its way is gone
    TIMED = 1  # it is to be asked about again when it is due
    DRAW = 2


class AsideIndex:
    """Of one ownership. A record comes back by position, when nothing older of its key is open and there is room."""

    __slots__ = ("_assigned", "_floor", "_limits", "loading", "parking", "postponed", "shared", "unread")

    def __init__(self, assigned: Assigned, limits: Limits) -> None:
        self._assigned = assigned
        self._limits = limits
        self._floor = assigned.stored.watermark if assigned.stored else 0
        self.shared = assigned.shared  # the store delivers its records itself: none is loaded or drawn
        self.loading = RecordLoading(loaded=assigned.shared)
        self.parking = Parking(limits.max_in_flight_bytes)
        self.postponed: deque[int] = deque()  # records that could be drawn if there were room
        self.unread: list[int] = []  # a heap: records beyond what was read of the log

    # -- reading them -------------------------------------------------------------------------------------------

    def learn(
        self, record: AsideRecord, at: Instant, *, tries: Tries, cautious: bool, is_open: bool
    ) -> ParkedRecord | None:
        """A record of a page. Returns it if it was not known before. `is_open`: its event is open in the log too."""
        loading, position = self.loading, record.position
        wanted = position in loading.wanted
        parked = self.parking.records.get(position)
        if parked is not None:
            if position in loading.doubted:
                if position not in loading.asked:
                    return None  # the page may be older than the doubt
                parked.state, parked.due = record.state, self._due(record, at)
            self.parking.refill(parked, record.event, must=wanted)
            return None
        if is_open or (loading.loaded and not wanted):
            return None  # what is not wanted was done since the page was read
        parked = self._parked(record, at, tries, cautious=cautious)
        self.parking.add(parked)
        self.parking.refill(parked, record.event, must=wanted)
        return parked

    def page_read(self, last: int | None) -> list[ParkedRecord]:
        """A page was read up to here; None: there were no more. Returns the records that may have their turn."""
        loading, turns = self.loading, []
        for position in loading.read_to(last):
            parked = self.parking.records.get(position)
            if position in loading.asked:
                loading.doubted.discard(position)
            elif position in loading.doubted:
                continue
            if parked is not None and parked.event is not None:
                loading.forget(position)
                turns.append(parked)
            elif position in loading.asked:  # it is not in the store any more
                self.forget(position)
                head = self.parking.head(parked.key if parked is not None else None)
                turns += [head] if head is not None else []
        return turns

    def _parked(self, record: AsideRecord, at: Instant, tries: Tries, *, cautious: bool) -> ParkedRecord:
        event = record.event
        return ParkedRecord(
            record.id,
            record.position,
            event.key if self._limits.ordering == "key" else None,
            record.state,
            self._due(record, at),
            event,
            event.size,
            tries,
            stored=True,
            failure=record.failure.brief() if record.failure else None,
            cautious=cautious,
            wall_due=record.due,
        )

    def _due(self, record: AsideRecord, at: Instant) -> float:
        # A clock that was set back makes no wait longer than it was. What died and was moved waits as a person asked.
        longest = record.wait_s
        if longest is None:  # moved, or of a release that did not write it
            longest = self._limits.max_wait_s if record.failure is None else math.inf
        return at.now + min(record.due - at.wall, longest) if record.due is not None else 0.0

    # -- whose turn it is ---------------------------------------------------------------------------------------

    def turn(self, parked: ParkedRecord, now: float, *, end: int, is_lane_free: bool, has_room: bool) -> RecordTurn:
        """May this record be drawn? `end`: how far the log was read. Whatever stands in the way will ask again."""
        if not self.loading.loaded or parked.drawn or not parked.stored or parked.state is State.DEAD:
            return RecordTurn.LATER
        if parked.key is not None and (not is_lane_free or self.parking.head(parked.key) is not parked):
            return RecordTurn.LATER
        if parked.state is State.WAITING and parked.due > now:
            return RecordTurn.TIMED
        if parked.position >= max(self._floor, end):
            heappush(self.unread, parked.position)
        elif not has_room:
            self.postponed.append(parked.position)
        elif parked.event is None:
            self.loading.wanted.add(parked.position)
        else:
            return RecordTurn.DRAW
        return RecordTurn.LATER

    def passed(self, end: int) -> list[ParkedRecord]:
        """The log was read up to here. Returns the records that waited for that."""
        found = []
        while self.unread and self.unread[0] < end:
            parked = self.parking.records.get(heappop(self.unread))
            found += [parked] if parked is not None else []
        return found

    def delivery(self, parked: ParkedRecord, event: Event) -> Delivery:
        """Of a record that is drawn."""
        own = self._assigned
        where = (own.partition, parked.position, own.epoch)
        return Delivery(event, *where, parked.tries.failed + 1, own.fence, own.log_id, True)

    def heads(self) -> list[ParkedRecord]:
        """The first record of each key, and all without a key."""
        return [each for each in self.parking if each.key is None or self.parking.head(each.key) is each]

    def next_postponed(self) -> ParkedRecord | None:
        return self.parking.records.get(self.postponed.popleft())

    # -- changing them ------------------------------------------------------------------------------------------

    def move(self, position: int, to: State | None, due: float) -> ParkedRecord | None:
        """An operator moved or removed a record. Returns it if it may have its turn now, or is to be removed."""
        parked, loading = self.parking.records.get(position), self.loading
        loading.asked.discard(position)  # a page on its way may have been read before this
        if parked is None:
            # What we do not know yet we read; what we were about to read is not there any more.
            (loading.wanted.add if to in (State.WAITING, State.HELD) else loading.forget)(position)
        elif parked.drawn:
            parked.removed = parked.removed or to is None
        elif to is State.DEAD:
            self._doubt(parked)
        else:
            if to is not None:
                parked.tries = Tries() if parked.state is State.DEAD else parked.tries
                parked.state, parked.due = to, due
            return parked
        return None

    def _doubt(self, parked: ParkedRecord) -> None:
        """An operator gave it up. A write of ours may come after that, and then it is still ours to run: if the write
        was answered before we heard of the move, only the store knows."""
        if parked.stored:
            self.parking.drop(parked)
            self.loading.wanted.add(parked.position)
            self.loading.doubted.add(parked.position)

    def forget(self, position: int) -> None:
        """There is no such record any more."""
        self.loading.forget(position)
        self.parking.remove(position)

    def stored(self, parked: ParkedRecord) -> ParkedRecord | None:
        """What was set aside is in the store. Returns the record that may have its turn now."""
        parked.stored = True
        self.parking.shed(parked)
        if self.shared or (parked.state is State.DEAD and self._limits.on_dead == "pass"):
            self.parking.remove(parked.position)
            return self.parking.head(parked.key)
        return parked
