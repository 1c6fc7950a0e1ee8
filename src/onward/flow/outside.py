"""The records of one partition that stand aside, and how they come back into its lanes. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from onward.brokers.base import AsideRecord, Assigned, Failure, State, Tries
from onward.event import Delivery
from onward.flow.blame import Blame
from onward.flow.entry import DELAYED, LEAVING, Entry, Instant, Ref
from onward.flow.letters import Letters
from onward.flow.limits import Limits
from onward.flow.parking import Parking
from onward.flow.reading import Reading
from onward.flow.room import Room


class Outside:
    """Of one ownership. A record comes back by position, when nothing older of its key is open and there is room."""

    __slots__ = (
        "_assigned",
        "_blame",
        "_floor",
        "_letters",
        "_limits",
        "_room",
        "parking",
        "postponed",
        "reading",
        "unread",
    )

    def __init__(self, assigned: Assigned, limits: Limits, room: Room, blame: Blame, letters: Letters) -> None:
        self._assigned = assigned
        self._limits = limits
        self._room = room
        self._blame = blame
        self._letters = letters
        self._floor = assigned.stored.watermark if assigned.stored else 0
        self.postponed: deque[int] = deque()  # records that could be drawn if there were room
        self.parking = Parking(limits.max_in_flight_bytes)
        self.reading = Reading(loaded=assigned.shared)  # a shared partition has no records that we draw
        self.unread: list[int] = []  # a heap: records beyond what was read of the log

    def key(self, entry: Entry) -> str | None:
        """What its records are parked by."""
        return entry.delivery.event.key if self._limits.ordering == "key" else None

    # -- reading them -------------------------------------------------------------------------------------------

    def load(self, records: Sequence[AsideRecord], at: Instant) -> None:
        """A page of records, as `reading` asked for it."""
        for record in records:
            self._know(record, at)
        reading = self.reading
        for position in reading.read_to(records[-1].position if records else None):
            ref = self.parking.refs.get(position)
            if position in reading.asked:
                reading.doubted.discard(position)
            elif position in reading.doubted:
                continue
            if ref is not None and ref.event is not None:
                reading.wanted.discard(position)
                self.turn(ref, at.now)
            elif position in reading.asked:  # it is not in the store any more
                reading.wanted.discard(position)
                self.parking.remove(position)
                self.advance(ref.key if ref is not None else None, at.now)

    def _know(self, record: AsideRecord, at: Instant) -> None:
        reading, position = self.reading, record.position
        known = self.parking.refs.get(position)
        if known is not None:
            if position in reading.doubted:
                if position not in reading.asked:
                    return  # the page may be older than the doubt
                known.state, known.due = record.state, self._due(record, at)
            self.parking.refill(known, record.event, must=position in reading.wanted)
        elif position not in self._room.tracker.open and (position in reading.wanted or not reading.loaded):
            ref = self._ref(record, at)  # what else is unknown was done since the page was read
            self.parking.add(ref)
            self.parking.refill(ref, record.event, must=position in reading.wanted)
            self._insert(ref, at)
        elif position in reading.wanted and position not in self._letters.leaving:
            self._letters.doubled.add(position)

    def _due(self, record: AsideRecord, at: Instant) -> float:
        # A clock that was set back makes no wait longer than it was. What died and was moved waits as a person asked.
        longest = record.wait_s
        if longest is None:  # moved, or of a release that did not write it
            longest = self._limits.max_wait_s if record.failure is None else math.inf
        return at.now + min(record.due - at.wall, longest) if record.due is not None else 0.0

    def _ref(self, record: AsideRecord, at: Instant) -> Ref:
        event = record.event
        return Ref(
            record.id,
            record.position,
            event.key if self._limits.ordering == "key" else None,
            record.state,
            self._due(record, at),
            event,
            event.size,
            self._blame.charged(record.tries),
            stored=True,
            story=record.failure.brief() if record.failure else None,
            cautious=self._blame.unclean,
            wall_due=record.due,
        )

    def _insert(self, ref: Ref, at: Instant) -> None:
        """A record that came back into the flow: what is newer and waits in memory follows it into the aside."""
        if ref.key is not None:
            for entry in self._room.lanes.withdraw(ref.key, ref.position):
                self._put_back(entry, at)
        self.turn(ref, at.now)

    def _put_back(self, entry: Entry, at: Instant) -> None:
        """Out of its lane into the aside, with the rest of its delay."""
        state, due = State.HELD, 0.0
        if entry.stage is DELAYED:
            state, due = State.WAITING, entry.due
            self._room.delayed -= 1
        if entry.ref is None:
            self.set_aside(entry, state, due, at if due else None)
            return
        if due:
            self.rewrite(entry, state, due, at)
        self._letters.shelved.pop(entry.ref.position, None)
        self.undraw(entry, at.now)

    # -- drawing them -------------------------------------------------------------------------------------------

    def read_past(self, now: float) -> None:
        """The log was read further: records below its end may have their turn."""
        while self.unread and self.unread[0] < self._room.tracker.end:
            ref = self.parking.refs.get(heappop(self.unread))
            if ref is not None:
                self.turn(ref, now)

    def advance(self, key: str | None, now: float) -> None:
        """The lane of a key may be free: if records of it wait, the next has its turn."""
        ref = self.parking.head(key)
        if ref is not None:
            self.turn(ref, now)

    def turn_all(self, now: float) -> None:
        """All records are known: let them have their turns."""
        for ref in list(self.parking):
            if ref.key is None or self.parking.head(ref.key) is ref:
                self.turn(ref, now)

    def turn(self, ref: Ref, now: float) -> None:
        """Draw a record into its lane if nothing speaks against it; whatever does will call again."""
        if not self.reading.loaded or ref.drawn or not ref.stored or ref.state is State.DEAD:
            return
        room = self._room
        if ref.key is not None and (ref.key in room.lanes or self.parking.head(ref.key) is not ref):
            return
        if ref.state is State.WAITING and ref.due > now:
            heappush(room.timers, (ref.due, ref.position))
        elif ref.position >= max(self._floor, room.tracker.end):
            heappush(self.unread, ref.position)
        elif not self._has_room():
            self.postponed.append(ref.position)
        elif ref.event is None:
            self.reading.wanted.add(ref.position)
        else:
            self._draw(ref)

    def _draw(self, ref: Ref) -> None:
        assert ref.event is not None
        own, room = self._assigned, self._room
        where = (own.partition, ref.position, own.epoch)
        delivery = Delivery(ref.event, *where, ref.tries.failed + 1, own.fence, own.log_id, True)
        entry = Entry(delivery, ref.size, ref=ref, story=ref.story, tries=ref.tries)
        if ref.cautious or ref.tries.crashes or ref.tries.started:
            self._blame.weigh(entry, ref.tries, True)
        ref.drawn = True
        room.drawn[ref.position] = entry
        room.bytes += ref.size
        room.lanes.insert(entry)

    def undraw(self, entry: Entry, now: float) -> None:
        """A drawn event leaves its lane: done, or back into the aside."""
        assert entry.ref is not None
        entry.ref.drawn = False
        del self._room.drawn[entry.ref.position]
        self._room.bytes -= entry.size
        self._room.lanes.leave(entry)
        self.draw_postponed(now)

    def _has_room(self) -> bool:
        """For one more drawn event: what is in memory has a limit, but one at a time always comes through."""
        limits, room = self._limits, self._room
        within = len(room.drawn) < limits.max_in_flight and room.bytes < limits.max_in_flight_bytes
        return within or not room.drawn

    def draw_postponed(self, now: float) -> None:
        while self.postponed and self._has_room():
            ref = self.parking.refs.get(self.postponed.popleft())
            if ref is not None:
                self.turn(ref, now)

    # -- changing them ------------------------------------------------------------------------------------------

    def move(self, position: int, to: State | None, due: float, now: float) -> Entry | None:
        """An operator moved or removed a record. Answers the event of the log that was to become that record, and is
        done now."""
        ref, wanted = self.parking.refs.get(position), self.reading.wanted
        self.reading.asked.discard(position)  # a page on its way may have been read before this
        if ref is None:
            # What we do not know yet we read; what we were about to read is not there any more.
            (wanted.add if to in (State.WAITING, State.HELD) else wanted.discard)(position)
        elif ref.drawn:
            ref.removed = ref.removed or to is None
        elif to is None:
            leaving = self._remove(ref)
            self.advance(ref.key, now)
            return leaving
        elif to is State.DEAD and not ref.stored:
            pass  # our own write may come after the move: the event is still ours to run
        elif to is State.DEAD:
            # A write of ours may have come after the move, and was answered before we heard of it: the store knows.
            self.parking.drop(ref)
            wanted.add(position)
            self.reading.doubted.add(position)
        else:
            if ref.state is State.DEAD:
                ref.tries = Tries()
            ref.state, ref.due = to, due
            self.turn(ref, now)
        return None

    def _remove(self, ref: Ref) -> Entry | None:
        """An operator removed the record. A write of ours may be on its way: it must not bring the record back."""
        leaving = self._letters.leaving.pop(ref.position, None)
        self._letters.remove(ref.id, ref.key)
        self.reading.wanted.discard(ref.position)
        self.parking.remove(ref.position)
        return leaving.entry if leaving is not None else None

    def done(self, entry: Entry, now: float) -> None:
        """A drawn event has been handled: its record is of no use any more."""
        ref = entry.ref
        assert ref is not None
        self._letters.remove(ref.id, ref.key)
        self._letters.leaving.pop(ref.position, None)
        self.parking.remove(ref.position)
        self.undraw(entry, now)
        self.advance(ref.key, now)

    def put_back(self, entry: Entry, state: State, due: float, at: Instant, failure: Failure | None = None) -> None:
        """A drawn event has failed: it goes back to its record, and others of its key may have their turn."""
        assert entry.ref is not None
        self.rewrite(entry, state, due, at, failure)
        self.undraw(entry, at.now)
        self.advance(entry.ref.key, at.now)

    def set_aside(
        self, entry: Entry, state: State, due: float = 0.0, at: Instant | None = None, failure: Failure | None = None
    ) -> None:
        """An event of the log becomes a record; it stays open until that is stored."""
        entry.stage = LEAVING
        event, key = entry.delivery.event, self.key(entry)
        wait_s = due - at.now if at is not None else 0.0
        wall = at.wall + wait_s if at is not None else None
        record = self._letters.record(entry, state, wall, failure, wait_s=wait_s)
        story, cautious = (failure.brief() if failure else entry.story), entry.cautious
        ref = Ref(record.id, record.position, key, state, due, event, entry.size, entry.tries, False, story, cautious)
        ref.wall_due = wall
        self.parking.add(ref)
        self._letters.send(record, entry, ref)

    def rewrite(self, entry: Entry, state: State, due: float, at: Instant, failure: Failure | None = None) -> None:
        """The record of a drawn event changes."""
        ref = entry.ref
        assert ref is not None
        ref.state, ref.due, ref.tries, ref.stored = state, due, entry.tries, False
        ref.story = failure.brief() if failure else entry.story
        wait_s = due - at.now
        wall = ref.wall_due = at.wall + wait_s if state is State.WAITING else None
        entry.stage = LEAVING
        self._letters.send(self._letters.record(entry, state, wall, failure, wait_s=wait_s), None, ref)

    def stored(self, ref: Ref, now: float) -> None:
        """What was set aside is in the store. In a shared partition it comes back from there as a delivery."""
        ref.stored = True
        self.parking.shed(ref)
        if self._assigned.shared or (ref.state is State.DEAD and self._limits.on_dead == "pass"):
            self.parking.remove(ref.position)
            self.advance(ref.key, now)
        else:
            self.turn(ref, now)
