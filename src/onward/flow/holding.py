"""One partition as this process knows it: what is open, what runs, what stands aside. Pure.

`intake.py` takes deliveries and records in, `settling.py` settles what has become of them.
"""

from heapq import heappop, heappush

import msgspec

from onward.brokers.base import Assigned, Failure, State, Tries
from onward.event import Partition
from onward.flow.aside_index import AsideIndex, RecordTurn
from onward.flow.blame import Blame
from onward.flow.entry import DELAYED, LEAVING, QUEUED, RUNNING, Again, Entry, Instant, ParkedRecord
from onward.flow.lanes import Lanes
from onward.flow.limits import Limits
from onward.flow.open_events import OpenEvents
from onward.flow.pending_records import PendingRecords, with_history
from onward.flow.tracker import Tracker


class Holding:
    """Its lanes outlive an ownership; everything else belongs to the current one (`epoch`; None: there is none)."""

    def __init__(self, partition: Partition, limits: Limits) -> None:
        self.partition = partition
        self.limits = limits
        self.stale: dict[tuple[int, int], Entry] = {}  # by epoch and position: runs that outlived their ownership
        self._start(Lanes(limits.ordering), self._nothing())
        self.epoch: int | None = None

    def begin(self, assigned: Assigned | None) -> None:
        """Start an ownership, or (None) stand without one."""
        if self.epoch is not None:
            for entry in self.events:
                if entry.stage is RUNNING:
                    self.stale[self.epoch, entry.delivery.position] = entry
            self.events.lanes.abandon()
        self._start(self.events.lanes, assigned or self._nothing())
        self.epoch = assigned.epoch if assigned else None

    def _nothing(self) -> Assigned:
        return Assigned(self.partition, 0, None, "", None, False)

    def _start(self, lanes: Lanes, assigned: Assigned) -> None:
        assert not assigned.shared or self.limits.ordering == "none", "only events without an order can be shared"
        self.events = OpenEvents(lanes, Tracker(assigned.stored))
        self.blame = Blame(assigned, self.limits.max_in_flight)
        self.pending = PendingRecords(assigned, self.limits.group)
        self.pending.dirty = bool(self.blame.tries)  # they may be charged with a crash now
        self.aside = AsideIndex(assigned, self.limits)
        self.paused = False
        self.release_at: float | None = None

    def key(self, entry: Entry) -> str | None:
        """What its records are parked by."""
        return entry.delivery.event.key if self.limits.ordering == "key" else None

    # -- outcomes -----------------------------------------------------------------------------------------------

    def done(self, entry: Entry, now: float) -> None:
        """An event has left the flow: free its room and let the next of its lane go."""
        events, pending, aside = self.events, self.pending, self.aside
        pending.dirty = True
        if entry.parked is not None:
            self._done_with(entry, entry.parked, now)
            return
        position, tries = entry.delivery.position, self.blame.tries
        events.tracker.done(position)
        events.bytes -= entry.size
        if tries:
            tries.pop(position, None)
        if pending.doubled and position in pending.doubled:
            pending.doubled.discard(position)
            pending.remove(pending.id_at(position), None)
        if events.lanes.leave(entry) and aside.parking.records:
            self.advance(entry.delivery.event.key, now)
        if aside.postponed:
            self._draw_postponed(now)

    def _done_with(self, entry: Entry, parked: ParkedRecord, now: float) -> None:
        """A drawn event has been handled: its record is of no use any more."""
        self.pending.remove(parked.id, parked.key)
        self.pending.leaving.pop(parked.position, None)
        self.aside.parking.remove(parked.position)
        self._undraw(entry, parked, now)
        self.advance(parked.key, now)

    def failed(self, entry: Entry, again: Again, at: Instant) -> None:
        """To be tried again: in place when that is soon, out of the flow when it is not."""
        if entry.removed:
            self.done(entry, at.now)
            return
        delivery, due = entry.delivery, again.at
        entry.tries = Tries(delivery.attempt, 0, entry.tries.crashes + again.crashed)
        entry.suspect = entry.tries.crashes > 0
        entry.marked = False
        entry.failure = with_history(again.failure.brief(), entry.failure)
        entry.delivery = msgspec.structs.replace(delivery, attempt=delivery.attempt + 1)
        self.blame.not_running(entry)
        if self._in_place(entry, due - at.now):
            self.events.delay(entry, due)
            self._note_tries(entry)
        elif entry.parked is not None:
            self._put_back(entry, entry.parked, State.WAITING, due, at)
        else:
            self._park(entry, State.WAITING, due, at)

    def _in_place(self, entry: Entry, wait_s: float) -> bool:
        limits = self.limits
        if self.aside.shared:  # the broker stores no tries of open events here
            return False
        if limits.ordering == "partition" or wait_s <= 0:
            return True
        full = len(self.aside.parking) >= limits.max_parked
        if self.events.lanes.name(entry) is None:
            return full
        return (wait_s <= limits.park_after_s and self.events.delayed < limits.max_delayed) or full

    def dead(self, entry: Entry, failure: Failure, at: Instant) -> None:
        """Given up. The lane stays blocked until the letter is stored: a successor that completed first would be an
        inversion if this process died in between and the event ran again."""
        if entry.removed:
            self.done(entry, at.now)
            return
        failure = with_history(failure, entry.failure)
        entry.tries = Tries(entry.delivery.attempt - 1, 0, entry.tries.crashes)
        self.blame.not_running(entry)  # the last attempt counts when the letter is stored
        entry.tries = Tries(entry.delivery.attempt, 0, entry.tries.crashes)
        if entry.parked is not None:
            self._put_back(entry, entry.parked, State.DEAD, 0.0, at, failure)
        elif self.limits.on_dead == "hold" and self.key(entry) is not None:
            self._park(entry, State.DEAD, 0.0, at, failure)
        else:
            entry.stage = LEAVING
            self.pending.send(self.pending.record(entry, State.DEAD, None, failure), entry, None)

    def back(self, entry: Entry, *, batch_limit: int = 0, due: float = 0.0) -> None:
        """It did not run to its end, through no fault of its own: it may run again, not before `due`."""
        entry.batch_limit = batch_limit
        self.unmark(entry)
        if due:
            self.events.delay(entry, due)
        else:
            self.events.lanes.again(entry)

    def wake(self, now: float) -> None:
        """What has waited long enough: delayed events run again, records have their turn."""
        events, records = self.events, self.aside.parking.records
        while events.timers and events.timers[0][0] <= now:
            due, position = heappop(events.timers)
            entry = events.find(position)
            if entry is not None and entry.stage is DELAYED:
                if entry.due <= due:  # else it is the timer of an earlier wait
                    events.delayed -= 1
                    events.lanes.again(entry)
            elif (parked := records.get(position)) is not None and parked.due <= due:
                self.turn(parked, now)

    # -- into the aside -----------------------------------------------------------------------------------------

    def _park(self, entry: Entry, state: State, due: float, at: Instant, failure: Failure | None = None) -> None:
        """Set an event aside, and its successors behind it."""
        successors = self.events.lanes.cut(entry)
        self.set_aside(entry, state, due, at if state is State.WAITING else None, failure)
        for successor in successors:
            self.set_aside(successor, State.HELD)
        self.events.lanes.leave(entry)
        self.advance(self.key(entry), at.now)  # an older record may have come back meanwhile

    def set_aside(
        self, entry: Entry, state: State, due: float = 0.0, at: Instant | None = None, failure: Failure | None = None
    ) -> None:
        """An event of the log becomes a record; it stays open until that is stored."""
        entry.stage = LEAVING
        wait_s = due - at.now if at is not None else 0.0
        wall = at.wall + wait_s if at is not None else None
        record = self.pending.record(entry, state, wall, failure, wait_s=wait_s)
        parked = ParkedRecord(
            record.id,
            record.position,
            self.key(entry),
            state,
            due,
            record.event,
            entry.size,
            entry.tries,
            stored=False,
            failure=failure.brief() if failure else entry.failure,
            cautious=entry.cautious,
            wall_due=wall,
        )
        self.aside.parking.add(parked)
        self.pending.send(record, entry, parked)

    def _put_back(
        self,
        entry: Entry,
        parked: ParkedRecord,
        state: State,
        due: float,
        at: Instant,
        failure: Failure | None = None,
    ) -> None:
        """A drawn event has failed: it goes back to its record, and others of its key may have their turn."""
        self._rewrite(entry, parked, state, due, at, failure)
        self._undraw(entry, parked, at.now)
        self.advance(parked.key, at.now)

    def _rewrite(
        self,
        entry: Entry,
        parked: ParkedRecord,
        state: State,
        due: float,
        at: Instant,
        failure: Failure | None = None,
    ) -> None:
        """The record of a drawn event changes."""
        parked.state, parked.due, parked.tries, parked.stored = state, due, entry.tries, False
        parked.failure = failure.brief() if failure else entry.failure
        wait_s = due - at.now
        parked.wall_due = at.wall + wait_s if state is State.WAITING else None
        entry.stage = LEAVING
        record = self.pending.record(entry, state, parked.wall_due, failure, wait_s=wait_s)
        self.pending.send(record, None, parked)

    def withdraw(self, entry: Entry, at: Instant) -> None:
        """Out of its lane into the aside, with the rest of its delay: an older record of its key goes before it."""
        state, due = State.HELD, 0.0
        if entry.stage is DELAYED:
            state, due = State.WAITING, entry.due
            self.events.delayed -= 1
        if entry.parked is None:
            self.set_aside(entry, state, due, at if due else None)
            return
        if due:
            self._rewrite(entry, entry.parked, state, due, at)
        self.pending.shelved.pop(entry.parked.position, None)
        self._undraw(entry, entry.parked, at.now)

    def remove(self, parked: ParkedRecord, now: float) -> None:
        """An operator removed the record. A write of ours may be on its way: it must not bring the record back."""
        leaving = self.pending.leaving.pop(parked.position, None)
        self.pending.remove(parked.id, parked.key)
        self.aside.forget(parked.position)
        self.advance(parked.key, now)
        if leaving is not None and leaving.entry is not None and parked.position in self.events.tracker.open:
            self.done(leaving.entry, now)  # else its record goes with the settle in flight

    # -- out of the aside ---------------------------------------------------------------------------------------

    def advance(self, key: str | None, now: float) -> None:
        """The lane of a key may be free: if records of it wait, the next has its turn."""
        parked = self.aside.parking.head(key)
        if parked is not None:
            self.turn(parked, now)

    def turn(self, parked: ParkedRecord, now: float) -> None:
        """Draw a record into its lane if nothing stands in its way."""
        events = self.events
        turn = self.aside.turn(
            parked,
            now,
            end=events.tracker.end,
            is_lane_free=parked.key not in events.lanes,
            has_room=events.has_room(self.limits),
        )
        if turn is RecordTurn.DRAW:
            self._draw(parked)
        elif turn is RecordTurn.TIMED:
            heappush(events.timers, (parked.due, parked.position))

    def _draw(self, parked: ParkedRecord) -> None:
        assert parked.event is not None
        tries = parked.tries
        delivery = self.aside.delivery(parked, parked.event)
        entry = Entry(delivery, parked.size, parked=parked, failure=parked.failure, tries=tries)
        if parked.cautious or tries.crashes or tries.started:
            self.blame.weigh(entry, tries, True)
        parked.drawn = True
        self.events.draw(entry)

    def _undraw(self, entry: Entry, parked: ParkedRecord, now: float) -> None:
        parked.drawn = False
        self.events.undraw(entry)
        self._draw_postponed(now)

    def _draw_postponed(self, now: float) -> None:
        while self.aside.postponed and self.events.has_room(self.limits):
            parked = self.aside.next_postponed()
            if parked is not None:
                self.turn(parked, now)

    # -- starts that are recorded -------------------------------------------------------------------------------

    def mark(self, entry: Entry, started: int) -> None:
        """Record its start before it runs, so that a crash can be blamed on it."""
        self.blame.mark(entry, started)
        self._note_tries(entry)
        if entry.parked is None and self.blame.unclean:
            # A broker that stores records before progress may have a letter of what is open again: not dead any more.
            self.pending.remove(self.pending.id_at(entry.delivery.position), None)

    def unmark(self, entry: Entry) -> None:
        """It does not run after all."""
        if self.blame.unmark(entry):
            self._note_tries(entry)

    def disown(self) -> None:
        """It is given up while events run. They may end well, so the next owner must not take this for a crash."""
        for entry in self.events:
            if entry.stage is RUNNING and entry.marked:
                self.unmark(entry)

    def shelve(self, entry: Entry) -> None:
        """Its start is to be recorded where nothing can be stored now: it waits, and nothing waits for it."""
        if self.blame.marking.pop(entry.delivery.position, None) is not None:
            self.unmark(entry)
        entry.stage = QUEUED
        self.pending.shelved[entry.delivery.position] = entry

    def unshelve(self) -> None:
        """The store takes records again."""
        shelved, self.pending.shelved = self.pending.shelved, {}
        for entry in shelved.values():
            self.events.lanes.again(entry)

    def _note_tries(self, entry: Entry) -> None:
        """Tries travel with the progress; those of a drawn event in its record."""
        self.pending.dirty = True
        if entry.parked is None:
            self.blame.tries[entry.delivery.position] = entry.tries
        else:
            entry.parked.tries = entry.tries
            record = self.pending.record(entry, entry.parked.state, entry.parked.wall_due)
            self.pending.send(record, None, None)
