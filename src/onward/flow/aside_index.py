"""The records of one partition in the aside: which are known, which must be read, and whose turn it is. Pure.

This only decides. The holding draws records into lanes, and puts events back.
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
    """What to do with a record now."""

    LATER = 0  # wait: `turn` is called again when the obstacle is gone
    TIMED = 1  # call `turn` again when the record is due
    DRAW = 2


class AsideIndex:
    """The records of one ownership. They come back by position, when nothing older of their key is open and there is
    room."""

    __slots__ = ("_assigned", "_floor", "_limits", "loading", "parking", "postponed", "shared", "unread")

    def __init__(self, assigned: Assigned, limits: Limits) -> None:
        self._assigned = assigned
        self._limits = limits
        self._floor = assigned.stored.watermark if assigned.stored else 0
        self.shared = assigned.shared  # the broker delivers the records itself, so none is loaded or drawn
        self.loading = RecordLoading(loaded=assigned.shared)
        self.parking = Parking(limits.max_in_flight_bytes)
        self.postponed: deque[int] = deque()  # records that could be drawn if there were room
        self.unread: list[int] = []  # a heap: positions of records that the log was not yet read past

    # -- reading records ----------------------------------------------------------------------------------------

    def learn(
        self, record: AsideRecord, at: Instant, *, tries: Tries, cautious: bool, is_open: bool
    ) -> ParkedRecord | None:
        """Add a record of a page. Returns it if it was not known. `is_open`: its event is also open in the log."""
        loading, position = self.loading, record.position
        wanted = position in loading.wanted
        parked = self.parking.records.get(position)
        if parked is not None:
            if position in loading.doubted:
                if position not in loading.asked:
                    return None  # the page may be older than the operator's move
                parked.state, parked.due = record.state, self._due(record, at)
            self.parking.refill(parked, record.event, must=wanted)
            return None
        if is_open or (loading.loaded and not wanted):
            return None  # a record that is not wanted was completed since the page was read
        parked = self._parked(record, at, tries, cautious=cautious)
        self.parking.add(parked)
        self.parking.refill(parked, record.event, must=wanted)
        return parked

    def page_read(self, last: int | None) -> list[ParkedRecord]:
        """A page was read up to `last`; None: there were no more. Returns the records that may get their turn."""
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
            elif position in loading.asked:  # the store no longer has it
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
        # A wall clock that was set back must not make a wait longer than it was. A dead letter that an operator moved
        # waits as long as the operator asked.
        longest = record.wait_s
        if longest is None:  # an operator moved it, or an older version of Onward stored it
            longest = self._limits.max_wait_s if record.failure is None else math.inf
        return at.now + min(record.due - at.wall, longest) if record.due is not None else 0.0

    # -- whose turn it is ---------------------------------------------------------------------------------------

    def turn(self, parked: ParkedRecord, now: float, *, end: int, is_lane_free: bool, has_room: bool) -> RecordTurn:
        """Whether this record may be drawn. `end`: how far the log was read. When the obstacle is gone, this is called
        again."""
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
        """The log was read up to `end`. Returns the records that waited for that."""
        found = []
        while self.unread and self.unread[0] < end:
            parked = self.parking.records.get(heappop(self.unread))
            found += [parked] if parked is not None else []
        return found

    def delivery(self, parked: ParkedRecord, event: Event) -> Delivery:
        """The delivery of a drawn record."""
        own = self._assigned
        where = (own.partition, parked.position, own.epoch)
        return Delivery(event, *where, parked.tries.failed + 1, own.fence, own.log_id, True)

    def heads(self) -> list[ParkedRecord]:
        """The first record of each key, and all records without a key."""
        return [each for each in self.parking if each.key is None or self.parking.head(each.key) is each]

    def next_postponed(self) -> ParkedRecord | None:
        return self.parking.records.get(self.postponed.popleft())

    # -- changing records ---------------------------------------------------------------------------------------

    def move(self, position: int, to: State | None, due: float) -> ParkedRecord | None:
        """An operator moved or removed a record. Returns it if it may get its turn now, or must be removed."""
        parked, loading = self.parking.records.get(position), self.loading
        loading.asked.discard(position)  # a page that is on its way may be older than this move
        if parked is None:
            # Read a record that may run now. One that was removed, or is dead now, need not be read.
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
        """An operator made this record a dead letter. A write of ours may have changed it back after that. If so, it
        must still run. If that write was answered before the move was reported, only the store has the current state,
        so read the record again."""
        if parked.stored:
            self.parking.drop(parked)
            self.loading.wanted.add(parked.position)
            self.loading.doubted.add(parked.position)

    def forget(self, position: int) -> None:
        """This record no longer exists."""
        self.loading.forget(position)
        self.parking.remove(position)

    def stored(self, parked: ParkedRecord) -> ParkedRecord | None:
        """A record that was set aside is now stored. Returns the record that may get its turn."""
        parked.stored = True
        self.parking.shed(parked)
        if self.shared or (parked.state is State.DEAD and self._limits.on_dead == "pass"):
            self.parking.remove(parked.position)
            return self.parking.head(parked.key)
        return parked
