"""One partition as this process knows it: what is open, what runs, what stands aside. Pure."""

from collections.abc import Sequence
from heapq import heappop

import msgspec

from onward.brokers.base import AsideRecord, Assigned, Failure, Progress, State, Tries
from onward.event import Delivery, Partition
from onward.flow.blame import Blame
from onward.flow.entry import DELAYED, LEAVING, QUEUED, RUNNING, Again, Entry, Instant
from onward.flow.lanes import Lanes
from onward.flow.letters import Leaving, Letters, told
from onward.flow.limits import Limits
from onward.flow.outside import Outside
from onward.flow.room import Room
from onward.flow.tracker import Tracker


class Early(msgspec.Struct):
    """What came before the records of the aside were known."""

    backlog: list[Delivery] = []
    reached: int = 0  # how far the log was read
    moved: list[tuple[int, State | None, float]] = []  # pages may have been read earlier


class Holding:
    """Its lanes outlive an ownership; everything else belongs to the current one (`epoch`; None: there is none)."""

    def __init__(self, partition: Partition, limits: Limits) -> None:
        self.partition = partition
        self.limits = limits
        self._share = limits.share
        self.lanes = Lanes(limits.ordering)
        self.stale: dict[tuple[int, int], Entry] = {}  # by epoch and position: runs that outlived their ownership
        self._start(Assigned(partition, 0, None, "", None, False))
        self.epoch: int | None = None

    def begin(self, assigned: Assigned | None) -> None:
        """Start an ownership, or (None) stand without one."""
        if self.epoch is not None:
            for entry in self.room:
                if entry.stage is RUNNING:
                    self.stale[self.epoch, entry.delivery.position] = entry
            self.lanes.abandon()
        self._start(assigned or Assigned(self.partition, 0, None, "", None, False))
        self.epoch = assigned.epoch if assigned else None

    def _start(self, assigned: Assigned) -> None:
        assert not assigned.shared or self.limits.ordering == "none", "only events without an order can be shared"
        self.shared = assigned.shared
        self.tracker = Tracker(assigned.stored)
        self.room = Room(self.lanes, self.tracker)
        self.blame = Blame(assigned, self.limits.max_in_flight)
        self.letters = Letters(assigned, self.limits.group)
        self.outside = Outside(assigned, self.limits, self.room, self.blame, self.letters)
        self.early = Early()
        self.paused = False
        self.dirty = bool(self.blame.tries)  # they may be charged with a crash now
        self.release_at: float | None = None
        self.fill_since: float | None = None  # since when a batch waits to fill
        self.blocked_at = -1  # the watermark when it was last looked at
        self.blocked_since = 0.0  # since when it has not moved

    @property
    def is_dirty(self) -> bool:
        """There is something to settle."""
        return self.dirty or self.letters.dirty

    # -- intake -------------------------------------------------------------------------------------------------

    def take(self, batch: Sequence[Delivery], start: int) -> tuple[int, int, int]:
        """Deliveries of this ownership, from `start` on until one of another comes.

        Returns where that is, how many were done already, and how many are of a type that the handler does not take.
        """
        if not self.outside.reading.loaded:
            return self._take_early(batch, start), 0, 0
        partition, epoch = batch[start].partition, self.epoch
        entries: list[Entry] = []
        size_bytes, stop, end = 0, start, len(batch)
        while stop < end:
            delivery = batch[stop]
            if delivery.partition is not partition or delivery.epoch != epoch:
                break
            stop += 1
            size = delivery.event.size
            size_bytes += size
            entries.append(Entry(delivery, size))
        taken, filtered = self._admit(entries)
        if len(taken) < len(entries):
            self.dirty = True
            size_bytes = sum(entry.size for entry in taken)
        self.room.bytes += size_bytes
        if self.blame.unclean or self.blame.tries or self.shared:
            for entry in taken:
                self.blame.arrived(entry, self.tracker.watermark)
        self._line_up(taken)
        return stop, len(entries) - len(taken) - filtered, filtered

    def _admit(self, entries: Sequence[Entry]) -> tuple[Sequence[Entry], int]:
        """Those that are to run, and how many of the others are done now because the handler does not want them."""
        tracker, wants = self.tracker, self.limits.wants
        if wants is None and not self.outside.parking.refs:
            return tracker.add_all(entries), 0
        taken: list[Entry] = []
        filtered = 0
        for entry in entries:
            position = entry.delivery.position
            if self._is_parked(position):
                continue
            if wants is not None and not wants(entry.delivery.event.type):
                filtered += tracker.pass_over(position)
            elif tracker.add(position, entry):
                taken.append(entry)
        return taken, filtered

    def _line_up(self, entries: Sequence[Entry]) -> None:
        """Into their lanes, as long as nothing stands aside that they might overtake."""
        count = 0
        if not self.outside.parking.refs and not self.letters.gone:
            count = self.lanes.add_all(entries, self._share)
        if count < len(entries):
            for entry in entries[count:]:
                self._line_up_behind(entry)

    def _take_early(self, batch: Sequence[Delivery], start: int) -> int:
        """The records of the aside are not known yet."""
        for stop in range(start, len(batch)):
            delivery = batch[stop]
            if delivery.partition != self.partition or delivery.epoch != self.epoch:
                return stop
            self.early.backlog.append(delivery)
            self.room.bytes += delivery.event.size
        return len(batch)

    def _is_parked(self, position: int) -> bool:
        """A record stands for it: it is done with that."""
        if position not in self.outside.parking.refs:
            return False
        self.tracker.pass_over(position)
        return True

    def _line_up_behind(self, entry: Entry) -> None:
        """Into its lane, or into the aside behind the records of its key.

        A key is parked until the store has removed its last record: an event that was settled before that would be
        overtaken by it if we died in between.
        """
        parking, key = self.outside.parking, self.outside.key(entry)
        head = parking.head(key)
        behind = (head is not None and head.position < entry.delivery.position) or (
            key is not None and key in self.letters.going
        )
        share = self._share if len(parking) < self.limits.max_parked else 1 << 62
        if behind or not self.lanes.add(entry, share):
            self.outside.set_aside(entry, State.HELD)

    def reach(self, position: int, now: float) -> None:
        """The log was read up to here; what was not delivered below is a hole."""
        if not self.outside.reading.loaded:
            self.early.reached = max(self.early.reached, position)  # what was delivered below has not been taken yet
        elif position > self.tracker.end:
            self.tracker.reached(position)
            self.dirty = True
            self.outside.read_past(now)

    def load(self, records: Sequence[AsideRecord], at: Instant) -> tuple[int, int]:
        """A page of records, as asked for. Of the deliveries that waited for it: how many were done already, and how
        many are of a type that the handler does not take."""
        known = self.outside.reading.loaded
        self.outside.load(records, at)
        return (0, 0) if known or not self.outside.reading.loaded else self._open_gate(at.now)

    def _open_gate(self, now: float) -> tuple[int, int]:
        """All records are known: take what came meanwhile, and let the records have their turns."""
        early, self.early = self.early, Early()
        self.room.bytes = 0
        start = done = filtered = 0
        while start < len(early.backlog):
            start, skipped, unwanted = self.take(early.backlog, start)
            done += skipped
            filtered += unwanted
        self.reach(early.reached, now)
        for position, to, due in early.moved:
            self.move(position, to, due, now)
        self.outside.turn_all(now)
        return done, filtered

    def move(self, position: int, to: State | None, due: float, now: float) -> None:
        """An operator moved or removed a record."""
        if self.shared:
            return  # the store delivers its records itself
        if not self.outside.reading.loaded:
            self.early.moved.append((position, to, due))
            return
        entry = self.outside.move(position, to, due, now)
        if entry is not None and position in self.tracker.open:  # else it goes with the settle in flight
            self.done(entry, now)

    # -- outcomes -----------------------------------------------------------------------------------------------

    def done(self, entry: Entry, now: float) -> None:
        """An event has left the flow: free its room and let the next of its lane go."""
        self.dirty = True
        outside = self.outside
        if entry.ref is not None:
            outside.done(entry, now)
            return
        position, tries = entry.delivery.position, self.blame.tries
        self.tracker.done(position)
        self.room.bytes -= entry.size
        if tries:
            tries.pop(position, None)
        if self.letters.doubled and position in self.letters.doubled:
            self.letters.doubled.discard(position)
            self.letters.remove(self.letters.id_at(position), None)
        if self.lanes.leave(entry) and outside.parking.refs:
            outside.advance(entry.delivery.event.key, now)
        if outside.postponed:
            outside.draw_postponed(now)

    def failed(self, entry: Entry, again: Again, at: Instant) -> None:
        """To be tried again: in place when that is soon, out of the flow when it is not."""
        if entry.removed:
            self.done(entry, at.now)
            return
        delivery, due = entry.delivery, again.at
        entry.tries = Tries(delivery.attempt, 0, entry.tries.crashes + again.crashed)
        entry.suspect = entry.tries.crashes > 0
        entry.marked = False
        entry.story = told(again.failure.brief(), entry.story)
        entry.delivery = msgspec.structs.replace(delivery, attempt=delivery.attempt + 1)
        self.blame.not_running(entry)
        if self._in_place(entry, due - at.now):
            self.room.delay(entry, due)
            self._note_tries(entry)
        elif entry.ref is not None:
            self.outside.put_back(entry, State.WAITING, due, at)
        else:
            self._park(entry, State.WAITING, due, at)

    def _in_place(self, entry: Entry, wait_s: float) -> bool:
        limits = self.limits
        if self.shared:  # the broker stores no tries of open events here
            return False
        if limits.ordering == "partition" or wait_s <= 0:
            return True
        full = len(self.outside.parking) >= limits.max_parked
        if self.lanes.name(entry) is None:
            return full
        return (wait_s <= limits.park_after_s and self.room.delayed < limits.max_delayed) or full

    def _park(self, entry: Entry, state: State, due: float, at: Instant, failure: Failure | None = None) -> None:
        """Set an event aside, and its successors behind it."""
        successors = self.lanes.cut(entry)
        self.outside.set_aside(entry, state, due, at if state is State.WAITING else None, failure)
        for successor in successors:
            self.outside.set_aside(successor, State.HELD)
        self.lanes.leave(entry)
        self.outside.advance(self.outside.key(entry), at.now)  # an older record may have come back meanwhile

    def dead(self, entry: Entry, failure: Failure, at: Instant) -> None:
        """Given up. The lane stays blocked until the letter is stored: a successor that completed first would be an
        inversion if this process died in between and the event ran again."""
        if entry.removed:
            self.done(entry, at.now)
            return
        failure = told(failure, entry.story)
        entry.tries = Tries(entry.delivery.attempt - 1, 0, entry.tries.crashes)
        self.blame.not_running(entry)  # the last attempt counts when the letter is stored
        entry.tries = Tries(entry.delivery.attempt, 0, entry.tries.crashes)
        if entry.ref is not None:
            self.outside.put_back(entry, State.DEAD, 0.0, at, failure)
        elif self.limits.on_dead == "hold" and self.outside.key(entry) is not None:
            self._park(entry, State.DEAD, 0.0, at, failure)
        else:
            entry.stage = LEAVING
            self.letters.send(self.letters.record(entry, State.DEAD, None, failure), entry, None)

    def back(self, entry: Entry, *, batch_limit: int = 0, due: float = 0.0) -> None:
        """It did not run to its end, and nobody is to blame: it may run again, not before `due`."""
        entry.batch_limit = batch_limit
        self.unmark(entry)
        if due:
            self.room.delay(entry, due)
        else:
            self.lanes.again(entry)

    def wake(self, now: float) -> None:
        """What has waited long enough: delayed events run again, records have their turn."""
        room, refs = self.room, self.outside.parking.refs
        while room.timers and room.timers[0][0] <= now:
            due, position = heappop(room.timers)
            entry = room.find(position)
            if entry is not None and entry.stage is DELAYED:
                if entry.due <= due:  # else it is the timer of an earlier wait
                    room.delayed -= 1
                    self.lanes.again(entry)
            elif (ref := refs.get(position)) is not None and ref.due <= due:
                self.outside.turn(ref, now)

    # -- starts that are recorded -------------------------------------------------------------------------------

    def mark(self, entry: Entry, started: int) -> None:
        """Record its start before it runs, so that a crash can be blamed on it."""
        self.blame.mark(entry, started)
        self._note_tries(entry)
        if entry.ref is None and self.blame.unclean:
            # A broker that stores records before progress may have a letter of what is open again: not dead any more.
            self.letters.remove(self.letters.id_at(entry.delivery.position), None)

    def unmark(self, entry: Entry) -> None:
        """It does not run after all."""
        if self.blame.unmark(entry):
            self._note_tries(entry)

    def disown(self) -> None:
        """It is given up while events run. They may end well, so the next owner must not take this for a crash."""
        for entry in self.room:
            if entry.stage is RUNNING and entry.marked:
                self.unmark(entry)

    def shelve(self, entry: Entry) -> None:
        """Its start is to be recorded where nothing can be stored now: it waits, and nothing waits for it."""
        if self.blame.marking.pop(entry.delivery.position, None) is not None:
            self.unmark(entry)
        entry.stage = QUEUED
        self.letters.shelved[entry.delivery.position] = entry

    def _unshelve(self) -> None:
        shelved, self.letters.shelved = self.letters.shelved, {}
        for entry in shelved.values():
            self.lanes.again(entry)

    def _note_tries(self, entry: Entry) -> None:
        """Tries travel with the progress; those of a drawn event in its record."""
        self.dirty = True
        if entry.ref is None:
            self.blame.tries[entry.delivery.position] = entry.tries
        else:
            entry.ref.tries = entry.tries
            self.letters.send(self.letters.record(entry, entry.ref.state, entry.ref.wall_due), None, None)

    # -- settling -----------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        tracker = self.tracker
        tries = self.blame.told(tracker, self.letters.leaving)
        fresh = tuple(tracker.fresh)
        return Progress(self.partition, self.epoch or 0, tracker.watermark, tracker.done_above(), fresh, tries)

    def post(self, now: float) -> dict[int, Leaving]:
        """The records that go with the next settle; their events count as done in its progress."""
        letters = self.letters
        if now < letters.retry_at:
            return {}
        for position, leaving in letters.leaving.items():
            if leaving.entry is not None:
                self.tracker.leave(position)
        return dict(letters.leaving)

    def stored(self, posted: dict[int, Leaving], now: float) -> None:
        """These records are in the store."""
        letters, outside, dirty = self.letters, self.outside, self.dirty
        if letters.refusing and (posted or not letters.leaving):
            letters.refusing = False
            self._unshelve()
        for position, leaving in posted.items():
            if letters.leaving.get(position) is leaving:
                del letters.leaving[position]
            ref = leaving.ref
            if leaving.entry is not None:
                self.done(leaving.entry, now)
            if ref is not None and outside.parking.refs.get(position) is ref and position not in letters.leaving:
                outside.stored(ref, now)
        self.dirty = dirty  # that these are done was settled with them

    def refused(self, posted: dict[int, Leaving], now: float, retry_at: float) -> None:
        """These records were not stored, and nothing else of their settle was done."""
        letters = self.letters
        if posted:
            letters.retry_at, letters.refusing = retry_at, True
            for entry in [entry for entry in self.blame.marking.values() if entry.ref is not None]:
                self.shelve(entry)
        self.tracker.reopen()
        for position, leaving in posted.items():
            if leaving.entry is not None and position not in letters.leaving:  # an operator removed its record
                self.done(leaving.entry, now)
        self.dirty = True
