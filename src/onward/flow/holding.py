"""One partition in this process: which events are open, which run, which are stored aside. Pure.

`intake.py` adds deliveries and records to it, `settling.py` settles what has changed.
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
    """The lanes outlive an ownership; everything else belongs to the current one (`epoch`; None: there is none)."""

    def __init__(self, partition: Partition, limits: Limits) -> None:
        self.partition = partition
        self.limits = limits
        self.stale: dict[tuple[int, int], Entry] = {}  # by epoch and position: runs that outlived their ownership
        self._start(Lanes(limits.ordering), self._nothing())
        self.epoch: int | None = None

    def begin(self, assigned: Assigned | None) -> None:
        """End the current ownership, and start a new one if `assigned` is not None."""
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
        self.pending.dirty = bool(self.blame.tries)  # some may just have been charged with a crash
        self.aside = AsideIndex(assigned, self.limits)
        self.paused = False
        self.release_at: float | None = None

    def key(self, entry: Entry) -> str | None:
        """The key that its record parks; None: it parks no key."""
        return entry.delivery.event.key if self.limits.ordering == "key" else None

    # -- outcomes -----------------------------------------------------------------------------------------------

    def done(self, entry: Entry, now: float) -> None:
        """An event is done: free its memory and let the next of its lane run."""
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
        """A drawn event has been handled: remove its record."""
        self.pending.remove(parked.id, parked.key)
        self.pending.leaving.pop(parked.position, None)
        self.aside.parking.remove(parked.position)
        self._undraw(entry, parked, now)
        self.advance(parked.key, now)

    def failed(self, entry: Entry, again: Again, at: Instant) -> None:
        """An attempt failed. If the retry is due soon, the event waits in memory, otherwise in the aside."""
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
        """The event is given up. Its lane stays blocked until the dead letter is stored. Otherwise a successor could
        complete first, and if this process died then, the event would run again after its successor."""
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
        """The run did not finish, through no fault of the event. The event may run again, not before `due`."""
        entry.batch_limit = batch_limit
        self.unmark(entry)
        if due:
            self.events.delay(entry, due)
        else:
            self.events.lanes.again(entry)

    def wake(self, now: float) -> None:
        """Handle the timers that are due: delayed events run again, records get their turn."""
        events, records = self.events, self.aside.parking.records
        while events.timers and events.timers[0][0] <= now:
            due, position = heappop(events.timers)
            entry = events.find(position)
            if entry is not None and entry.stage is DELAYED:
                if entry.due <= due:  # otherwise this is the timer of an earlier wait
                    events.delayed -= 1
                    events.lanes.again(entry)
            elif (parked := records.get(position)) is not None and parked.due <= due:
                self.turn(parked, now)

    # -- into the aside -----------------------------------------------------------------------------------------

    def _park(self, entry: Entry, state: State, due: float, at: Instant, failure: Failure | None = None) -> None:
        """Set aside an event and its successors in the lane."""
        successors = self.events.lanes.cut(entry)
        self.set_aside(entry, state, due, at if state is State.WAITING else None, failure)
        for successor in successors:
            self.set_aside(successor, State.HELD)
        self.events.lanes.leave(entry)
        self.advance(self.key(entry), at.now)  # an operator may have replayed an older record meanwhile

    def set_aside(
        self, entry: Entry, state: State, due: float = 0.0, at: Instant | None = None, failure: Failure | None = None
    ) -> None:
        """Turn an event of the log into a record. The event stays open until the record is stored."""
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
        """A drawn event has failed: it goes back into the aside, and other records of its key may get their turn."""
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
        """Store a new version of a drawn event's record."""
        parked.state, parked.due, parked.tries, parked.stored = state, due, entry.tries, False
        parked.failure = failure.brief() if failure else entry.failure
        wait_s = due - at.now
        parked.wall_due = at.wall + wait_s if state is State.WAITING else None
        entry.stage = LEAVING
        record = self.pending.record(entry, state, parked.wall_due, failure, wait_s=wait_s)
        self.pending.send(record, None, parked)

    def withdraw(self, entry: Entry, at: Instant) -> None:
        """Move an event from its lane into the aside, because an older record of its key must run first. A delayed
        event keeps the rest of its delay."""
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
        """An operator removed the record. If we are just writing it, that write must not restore it."""
        leaving = self.pending.leaving.pop(parked.position, None)
        self.pending.remove(parked.id, parked.key)
        self.aside.forget(parked.position)
        self.advance(parked.key, now)
        if leaving is not None and leaving.entry is not None and parked.position in self.events.tracker.open:
            self.done(leaving.entry, now)  # otherwise the settle in flight carries its record and completes it

    # -- out of the aside ---------------------------------------------------------------------------------------

    def advance(self, key: str | None, now: float) -> None:
        """The lane of a key may be free: if the key has records, the next one gets its turn."""
        parked = self.aside.parking.head(key)
        if parked is not None:
            self.turn(parked, now)

    def turn(self, parked: ParkedRecord, now: float) -> None:
        """Draw a record into its lane, if it may run now."""
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

    # -- recording starts ---------------------------------------------------------------------------------------

    def mark(self, entry: Entry, started: int) -> None:
        """Record the start of an event before it runs, so that a crash can be blamed on it."""
        self.blame.mark(entry, started)
        self._note_tries(entry)
        if entry.parked is None and self.blame.unclean:
            # A broker that stores records before progress may have stored a dead letter of this event before the
            # crash. The event is open again, so the letter is wrong.
            self.pending.remove(self.pending.id_at(entry.delivery.position), None)

    def unmark(self, entry: Entry) -> None:
        """Take back the recorded start: the event does not run now."""
        if self.blame.unmark(entry):
            self._note_tries(entry)

    def disown(self) -> None:
        """The partition is released while events run. They may end well, so the next owner must not blame a crash on
        them."""
        for entry in self.events:
            if entry.stage is RUNNING and entry.marked:
                self.unmark(entry)

    def shelve(self, entry: Entry) -> None:
        """The start of this event cannot be recorded while the store refuses records. It waits, and other events do not
        wait for it."""
        if self.blame.marking.pop(entry.delivery.position, None) is not None:
            self.unmark(entry)
        entry.stage = QUEUED
        self.pending.shelved[entry.delivery.position] = entry

    def unshelve(self) -> None:
        """The store accepts records again: the shelved events may run."""
        shelved, self.pending.shelved = self.pending.shelved, {}
        for entry in shelved.values():
            self.events.lanes.again(entry)

    def _note_tries(self, entry: Entry) -> None:
        """Store an event's tries with the next settle: with the progress, or for a drawn event in its record."""
        self.pending.dirty = True
        if entry.parked is None:
            self.blame.tries[entry.delivery.position] = entry.tries
        else:
            entry.parked.tries = entry.tries
            record = self.pending.record(entry, entry.parked.state, entry.parked.wall_due)
            self.pending.send(record, None, None)
