"""One partition as this process knows it: what is open, what runs, what stands aside. Pure."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain

import msgspec

from onward.brokers.base import AsideRecord, Assigned, Failure, Progress, State, Tries, record_id
from onward.event import Delivery, Partition
from onward.flow.entry import Entry, Instant, Ref, Stage
from onward.flow.lanes import Lanes
from onward.flow.limits import Limits
from onward.flow.parking import Parking
from onward.flow.tracker import Tracker

AMONG_OTHERS, ALONE = 1, 2  # Tries.started: how the event was running when the process crashed


class Leaving(msgspec.Struct, frozen=True):
    """A record on its way to the store: of an event of the log (`entry`), of a record known here (`ref`), or both."""

    record: AsideRecord
    entry: Entry | None
    ref: Ref | None


class Holding:
    """Its lanes outlive an ownership; everything else belongs to the current one (`epoch`; None: there is none)."""

    def __init__(self, partition: Partition, limits: Limits) -> None:
        self.partition = partition
        self.limits = limits
        self._share = limits.share
        self.lanes = Lanes(limits.ordering)
        self.stale: dict[tuple[int, int], Entry] = {}  # by epoch and position: runs that outlived their ownership
        self.tracker = Tracker(None)
        self.drawn: dict[int, Entry] = {}
        self.epoch: int | None = None
        self.begin(None)

    def begin(self, assigned: Assigned | None) -> None:
        """Start an ownership, or (None) stand without one."""
        if self.epoch is not None:
            for entry in chain(self.tracker.open.values(), self.drawn.values()):
                if entry.stage is Stage.RUNNING:
                    self.stale[self.epoch, entry.delivery.position] = entry
            self.lanes.abandon()
        stored = assigned.stored if assigned else None
        self.epoch = assigned.epoch if assigned else None
        self.fence = assigned.fence if assigned else None
        self.log_id = assigned.log_id if assigned else ""
        self.floor = stored.watermark if stored else 0
        self.unclean = assigned.unclean if assigned else False
        self.watch = self.limits.max_in_flight if self.unclean else 0  # how many more could have been running
        self.watch_to = -1  # the last of those
        self.tracker = Tracker(stored)
        self.tries = {p: self._charged(tries) for p, tries in stored.tries.items()} if stored else {}
        self.parking = Parking(self.limits.max_in_flight_bytes)
        self.loaded = False  # the records of the aside are known: until then nothing is dispatched
        self.loading = False
        self.load_after: int | None = None
        self.backlog: list[Delivery] = []  # delivered before that
        self.reached = 0  # how far the log was read before that
        self.moved: list[tuple[int, State | None, float]] = []  # before that: pages may have been read earlier
        self.asked: set[int] = set()  # of the wanted, those known when the page was asked for
        self.wanted: set[int] = set()  # records whose turn has come and whose events are not in memory
        self.doubted: set[int] = set()  # of the wanted, those whose state is not sure
        self.unread: list[int] = []  # records beyond what was read of the log
        self.drawn = {}  # by position: events drawn from records
        self.postponed: deque[int] = deque()  # records that could be drawn if there were room
        self.leaving: dict[int, Leaving] = {}
        self.storing = 0  # events of the log whose records are on their way: not open, but still here
        self.gone: list[tuple[str, str | None]] = []  # records to be removed, and whom they park until they are
        self.going: Counter[str | None] = Counter()  # their keys
        self.marking: dict[int, Entry] = {}
        self.timers: list[tuple[float, int]] = []  # a heap: time and position
        self.running = 0
        self.delayed = 0
        self.bytes = 0
        self.paused = False
        self.dirty = bool(self.tries)  # they may be charged with a crash now
        self.release_at: float | None = None
        self.aside_at = 0.0  # the store refused: no sooner than this
        self.refusing = False  # it refused, and has not stored anything since
        self.shelved: dict[int, Entry] = {}  # drawn events whose starts could not be recorded, until it does
        self.fill_since: float | None = None  # since when a batch waits to fill
        self.blocked: tuple[int, float] | None = None  # the watermark, and since when it has not moved

    # -- intake -------------------------------------------------------------------------------------------------

    def take(self, delivery: Delivery) -> bool:
        """A delivery of this ownership. False: it was done already."""
        if not self.loaded:
            self.backlog.append(delivery)
            self.bytes += delivery.event.size
            return True
        position = delivery.position
        tracker = self.tracker
        if not tracker.fits(position):
            self.dirty = True
            return False
        if self.parking.refs and position in self.parking.refs:
            tracker.pass_over(position)
            self.dirty = True
            return False
        size = delivery.event.size
        entry = Entry(delivery, size)
        if self.tries or self.unclean:
            self._blame(entry, self.tries.get(position, Tries()), self._watched(position))
        tracker.add(position, entry)
        self.bytes += size
        if self.parking.refs or self.gone:
            self._line_up(entry)
        elif not self.lanes.add(entry, self._share):
            self._set_aside(entry, State.HELD)
        return True

    def _line_up(self, entry: Entry) -> None:
        """Into its lane, or into the aside behind the records of its key.

        A key is parked until the store has removed its last record: an event that was settled before that would be
        overtaken by it if we died in between.
        """
        key = self._key(entry)
        head = self.parking.head(key)
        behind = (head is not None and head.position < entry.delivery.position) or (
            key is not None and key in self.going
        )
        share = self._share if len(self.parking) < self.limits.max_parked else 1 << 62
        if behind or not self.lanes.add(entry, share):
            self._set_aside(entry, State.HELD)

    def _watched(self, position: int) -> bool:
        """Could this have been running in the crash? The first `max_in_flight` could, and what the last receive had
        brought beyond them: so whatever comes while those are open is watched too."""
        if self.watch > 0:
            self.watch -= 1
            self.watch_to = position
            return True
        return self.tracker.watermark <= self.watch_to

    def _charged(self, tries: Tries) -> Tries:
        """After a crash what was running alone is charged with it. What was running among others is suspected, over
        later ownerships too, until it has ended well or ill."""
        if tries.started != ALONE:
            return tries
        return Tries(tries.failed, 0, tries.crashes + 1) if self.unclean else Tries(tries.failed, 0, tries.crashes)

    def _blame(self, entry: Entry, tries: Tries, cautious: bool) -> None:
        entry.suspect = tries.crashes > 0 or tries.started > 0
        entry.cautious = self.unclean and (cautious or tries.started > 0)
        entry.tries = tries
        if tries.failed:
            entry.delivery = msgspec.structs.replace(entry.delivery, attempt=tries.failed + 1)

    def reach(self, position: int, now: float) -> None:
        """The log was read up to here; what was not delivered below is a hole."""
        if not self.loaded:
            self.reached = max(self.reached, position)  # what was delivered below has not been taken yet
        elif position > self.tracker.end:
            self.tracker.reached(position)
            self.dirty = True
            self.read_past(now)

    def read_past(self, now: float) -> None:
        """The log was read further: records below its end may have their turn."""
        while self.unread and self.unread[0] < self.tracker.end:
            ref = self.parking.refs.get(heappop(self.unread))
            if ref is not None:
                self._turn(ref, now)

    # -- the aside ----------------------------------------------------------------------------------------------

    def load(self, records: Sequence[AsideRecord], at: Instant) -> int:
        """A page of records, as asked for by `load_after`. Answers how many deliveries turned out to be done."""
        self.loading = False
        after = self.load_after if self.load_after is not None else -1
        for record in records:
            self._know(record, at)
        last = records[-1].position if records else None
        if not self.loaded:
            self.load_after = last if last is not None else self.load_after
            return self._open_gate(at.now) if last is None else 0
        for position in [p for p in self.wanted if p > after and (last is None or p <= last)]:
            ref = self.parking.refs.get(position)
            if position in self.asked:
                self.doubted.discard(position)
            elif position in self.doubted:
                continue
            if ref is not None and ref.event is not None:
                self.wanted.discard(position)
                self._turn(ref, at.now)
            elif position in self.asked:  # it is not in the store any more
                self.wanted.discard(position)
                self.parking.remove(position)
                self.advance(ref.key if ref is not None else None, at.now)
        return 0

    def _know(self, record: AsideRecord, at: Instant) -> None:
        known = self.parking.refs.get(record.position)
        event = record.event
        key = event.key if self.limits.ordering == "key" else None
        # A clock that was set back makes no wait longer than it was. What died and was moved waits as a person asked.
        longest = self.limits.max_wait_s if record.failure is None else math.inf
        due = at.now + min(record.due - at.wall, longest) if record.due is not None else 0.0
        first = record.failure.first if record.failure else 0.0
        ref = Ref(
            record.id,
            record.position,
            key,
            record.state,
            due,
            event,
            event.size,
            self._charged(record.tries),
            True,
            first,
            self.unclean,
            wall_due=record.due,
        )
        if known is not None:
            if record.position in self.doubted:
                if record.position not in self.asked:
                    return  # the page may be older than the doubt
                known.state, known.due = record.state, due
            self.parking.refill(known, event, must=record.position in self.wanted)
        elif record.position not in self.tracker.open and (record.position in self.wanted or not self.loaded):
            self.parking.add(ref)  # what else is unknown was done since the page was read
            self.parking.refill(ref, event, must=record.position in self.wanted)
            self._insert(ref, at)

    def _insert(self, ref: Ref, at: Instant) -> None:
        """A record that came back into the flow: what is newer and waits in memory follows it into the aside."""
        if ref.key is not None:
            for entry in self.lanes.withdraw(ref.key, ref.position):
                self._put_back(entry, at)
        self._turn(ref, at.now)

    def _put_back(self, entry: Entry, at: Instant) -> None:
        """Out of its lane into the aside, with the rest of its delay."""
        state, due = State.HELD, 0.0
        if entry.stage is Stage.DELAYED:
            state, due = State.WAITING, entry.due
            self.delayed -= 1
        if entry.ref is None:
            self._set_aside(entry, state, due, at if due else None)
            return
        if due:
            self._rewrite(entry, state, due, at, None)
        self.shelved.pop(entry.ref.position, None)
        self._undraw(entry, at.now)

    def _open_gate(self, now: float) -> int:
        """All records are known: take what was delivered meanwhile, and let the records have their turns."""
        self.loaded = True
        self.load_after = None
        backlog, self.backlog, self.bytes = self.backlog, [], 0
        done = sum(not self.take(delivery) for delivery in backlog)
        self.reach(self.reached, now)
        for position, to, due in self.moved:
            self.move(position, to, due, now)
        for ref in list(self.parking):
            if ref.key is None or self.parking.head(ref.key) is ref:
                self._turn(ref, now)
        return done

    def next_load(self) -> int | None:
        """After which position to read records, -1 for the first; None: nothing to read."""
        if self.epoch is None or self.loading:
            return None
        if not self.loaded:
            return -1 if self.load_after is None else self.load_after
        if not self.wanted:
            return None
        self.load_after = min(self.wanted) - 1
        self.asked = set(self.wanted)
        return self.load_after

    def advance(self, key: str | None, now: float) -> None:
        """The lane of a key may be free: if records of it wait, the next has its turn."""
        ref = self.parking.head(key)
        if ref is not None:
            self._turn(ref, now)

    def _turn(self, ref: Ref, now: float) -> None:
        """Draw a record into its lane if nothing speaks against it; whatever does will call again."""
        if not self.loaded or ref.drawn or not ref.stored or ref.state is State.DEAD:
            return
        if ref.key is not None and (ref.key in self.lanes or self.parking.head(ref.key) is not ref):
            return
        if ref.state is State.WAITING and ref.due > now:
            heappush(self.timers, (ref.due, ref.position))
        elif ref.position >= max(self.floor, self.tracker.end):
            heappush(self.unread, ref.position)
        elif not self._has_room():
            self.postponed.append(ref.position)
        elif ref.event is None:
            self.wanted.add(ref.position)
        else:
            self._draw(ref)

    def _draw(self, ref: Ref) -> None:
        assert ref.event is not None
        where = (self.partition, ref.position, self.epoch or 0)
        delivery = Delivery(ref.event, *where, ref.tries.failed + 1, self.fence, self.log_id, True)
        entry = Entry(delivery, ref.size, ref=ref, first_failed=ref.first_failed, tries=ref.tries)
        if ref.cautious or ref.tries.crashes or ref.tries.started:
            self._blame(entry, ref.tries, True)
        ref.drawn = True
        self.drawn[ref.position] = entry
        self.bytes += ref.size
        self.lanes.insert(entry)

    def _undraw(self, entry: Entry, now: float) -> None:
        """A drawn event leaves its lane: done, or back into the aside."""
        assert entry.ref is not None
        entry.ref.drawn = False
        del self.drawn[entry.ref.position]
        self.bytes -= entry.size
        self.lanes.leave(entry)
        self._draw_postponed(now)

    def _has_room(self) -> bool:
        """For one more drawn event: what is in memory has a limit, but one at a time always comes through."""
        limits = self.limits
        within = len(self.drawn) < limits.max_in_flight and self.bytes < limits.max_in_flight_bytes
        return within or not self.drawn

    def _draw_postponed(self, now: float) -> None:
        while self.postponed and self._has_room():
            ref = self.parking.refs.get(self.postponed.popleft())
            if ref is not None:
                self._turn(ref, now)

    def move(self, position: int, to: State | None, due: float, now: float) -> None:
        """Somebody moved or removed a record."""
        ref = self.parking.refs.get(position)
        if not self.loaded:
            self.moved.append((position, to, due))
        elif ref is None:
            # What we do not know yet we read; what we were about to read is not there any more.
            (self.wanted.add if to in (State.WAITING, State.HELD) else self.wanted.discard)(position)
        elif ref.drawn:
            ref.removed = ref.removed or to is None
        elif to is None:
            self._remove(ref)
            self.advance(ref.key, now)
        elif to is State.DEAD and not ref.stored:
            pass  # our own write may come after the move: the event is still ours to run
        elif to is State.DEAD:
            # A write of ours may have come after the move, and was answered before we heard of it: the store knows.
            self.parking.drop(ref)
            self.wanted.add(position)
            self.doubted.add(position)
        else:
            if ref.state is State.DEAD:
                ref.tries = Tries()
            ref.state, ref.due = to, due
            self._turn(ref, now)

    def _remove(self, ref: Ref) -> None:
        """Somebody took the record away. A write of ours may have been on its way: it must not bring it back."""
        self.leaving.pop(ref.position, None)
        self._forget_record(ref.id, ref.key)
        self.dirty = True
        self.wanted.discard(ref.position)
        self.parking.remove(ref.position)

    # -- outcomes -----------------------------------------------------------------------------------------------

    def find(self, position: int) -> Entry | None:
        return self.tracker.open.get(position) or self.drawn.get(position)

    def done(self, entry: Entry, now: float) -> None:
        self.dirty = True
        position, ref = entry.delivery.position, entry.ref
        if ref is None:
            self.tracker.done(position)
            self._left(entry, now)
            return
        self._forget_record(ref.id, ref.key)
        self.leaving.pop(position, None)
        self.parking.remove(position)
        self._undraw(entry, now)
        self.advance(ref.key, now)

    def _left(self, entry: Entry, now: float) -> None:
        """An event of the log has left the flow: free its room and let the next of its lane go."""
        self.bytes -= entry.size
        if self.tries:
            self.tries.pop(entry.delivery.position, None)
        if self.lanes.leave(entry) and self.parking.refs:
            self.advance(entry.delivery.event.key, now)
        if self.postponed:
            self._draw_postponed(now)

    def failed(self, entry: Entry, due: float, at: Instant, *, crashed: bool) -> None:
        """To be tried again at `due`: in place when that is soon, out of the flow when it is not."""
        if entry.removed:
            self.done(entry, at.now)
            return
        delivery = entry.delivery
        entry.tries = Tries(delivery.attempt, 0, entry.tries.crashes + crashed)
        entry.suspect = entry.tries.crashes > 0
        entry.marked = False
        entry.first_failed = entry.first_failed or at.wall
        entry.delivery = msgspec.structs.replace(delivery, attempt=delivery.attempt + 1)
        self._not_running(entry)
        if self._in_place(entry, due - at.now):
            entry.stage = Stage.DELAYED
            entry.due = due
            self.delayed += 1
            heappush(self.timers, (due, delivery.position))
            self._note_tries(entry)
        else:
            self._park(entry, due, at)

    def _in_place(self, entry: Entry, wait_s: float) -> bool:
        if self.limits.ordering == "partition" or wait_s <= 0:
            return True
        if self.lanes.name(entry) is None:
            return len(self.parking) >= self.limits.max_parked
        room = self.delayed < self.limits.max_delayed
        return (wait_s <= self.limits.park_after_s and room) or len(self.parking) >= self.limits.max_parked

    def _park(self, entry: Entry, due: float, at: Instant) -> None:
        """Set a failed event aside, and its successors behind it."""
        if entry.ref is not None:
            self._rewrite(entry, State.WAITING, due, at, None)
            self._undraw(entry, at.now)
            self.advance(entry.ref.key, at.now)
            return
        successors = self.lanes.cut(entry)
        self._set_aside(entry, State.WAITING, due, at)
        for successor in successors:
            self._set_aside(successor, State.HELD)
        self.lanes.leave(entry)
        self.advance(self._key(entry), at.now)  # an older record may have come back meanwhile

    def dead(self, entry: Entry, failure: Failure, at: Instant) -> None:
        """Given up. The lane stays blocked until the letter is stored: a successor that completed first would be an
        inversion if this process died in between and the event ran again."""
        if entry.removed:
            self.done(entry, at.now)
            return
        failure = msgspec.structs.replace(failure, first=entry.first_failed or failure.first)
        entry.tries = Tries(entry.delivery.attempt - 1, 0, entry.tries.crashes)
        self._not_running(entry)  # the last attempt counts when the letter is stored
        entry.tries = Tries(entry.delivery.attempt, 0, entry.tries.crashes)
        if entry.ref is not None:
            self._rewrite(entry, State.DEAD, 0.0, at, failure)
            self._undraw(entry, at.now)
            self.advance(entry.ref.key, at.now)
        elif self.limits.on_dead == "hold" and self._key(entry) is not None:
            successors = self.lanes.cut(entry)
            self._set_aside(entry, State.DEAD, failure=failure)
            for successor in successors:
                self._set_aside(successor, State.HELD)
            self.lanes.leave(entry)
            self.advance(self._key(entry), at.now)
        else:
            entry.stage = Stage.LEAVING
            self._send(Leaving(self._record(entry, State.DEAD, None, failure), entry, None))

    def back(self, entry: Entry, *, batch_limit: int = 0) -> None:
        """It did not run to its end, and nobody is to blame: it may run again."""
        entry.batch_limit = batch_limit
        self.unmark(entry)
        self.lanes.again(entry)

    def unmark(self, entry: Entry) -> None:
        """It does not run after all: a crash of the next owner must not be blamed on it."""
        entry.marked = False
        suspected = AMONG_OTHERS if entry.suspect and not entry.tries.crashes else 0  # that is not over by this
        if entry.tries.started != suspected:
            entry.tries = msgspec.structs.replace(entry.tries, started=suspected)
            self._note_tries(entry)

    def disown(self) -> None:
        """It is given up while events run. They may end well, so the next owner must not take this for a crash."""
        for entry in chain(self.tracker.open.values(), self.drawn.values()):
            if entry.stage is Stage.RUNNING and entry.marked:
                self.unmark(entry)

    def shelve(self, entry: Entry) -> None:
        """Its start is to be recorded where nothing can be stored now: it waits, and nothing waits for it."""
        if self.marking.pop(entry.delivery.position, None) is not None:
            self.unmark(entry)
        entry.stage = Stage.QUEUED
        self.shelved[entry.delivery.position] = entry

    def _unshelve(self) -> None:
        shelved, self.shelved = self.shelved, {}
        for entry in shelved.values():
            self.lanes.again(entry)

    def mark(self, entry: Entry, started: int) -> None:
        """Record its start before it runs, so that a crash can be blamed on it."""
        entry.stage = Stage.MARKING
        entry.tries = msgspec.structs.replace(entry.tries, started=started)
        position = entry.delivery.position
        self.marking[position] = entry
        self._note_tries(entry)
        if entry.ref is None and self.unclean:
            # A broker that stores records before progress may have a letter of what is open again: not dead any more.
            self._forget_record(record_id(self.limits.group, self.log_id, self.partition, position), None)

    def wake(self, now: float) -> None:
        """What has waited long enough: delayed events run again, records have their turn."""
        while self.timers and self.timers[0][0] <= now:
            due, position = heappop(self.timers)
            entry = self.find(position)
            if entry is not None and entry.stage is Stage.DELAYED:
                if entry.due <= due:  # else it is the timer of an earlier wait
                    self.delayed -= 1
                    self.lanes.again(entry)
            elif (ref := self.parking.refs.get(position)) is not None and ref.due <= due:
                self._turn(ref, now)

    def _key(self, entry: Entry) -> str | None:
        """What its records are parked by."""
        return entry.delivery.event.key if self.limits.ordering == "key" else None

    # -- records ------------------------------------------------------------------------------------------------

    def _note_tries(self, entry: Entry) -> None:
        """Tries travel with the progress; those of a drawn event in its record."""
        self.dirty = True
        if entry.ref is None:
            self.tries[entry.delivery.position] = entry.tries
        else:
            entry.ref.tries = entry.tries
            self._send(Leaving(self._record(entry, entry.ref.state, entry.ref.wall_due, None), None, None))

    def _not_running(self, entry: Entry) -> None:
        """Its start may be recorded: the next progress takes that back, even if its record cannot be stored."""
        if entry.ref is None and entry.delivery.position in self.tries:
            self.tries[entry.delivery.position] = entry.tries

    def _set_aside(
        self, entry: Entry, state: State, due: float = 0.0, at: Instant | None = None, failure: Failure | None = None
    ) -> None:
        """An event of the log becomes a record; it stays open until that is stored."""
        entry.stage = Stage.LEAVING
        event, key = entry.delivery.event, self._key(entry)
        wall = at.wall + (due - at.now) if at is not None else None
        record = self._record(entry, state, wall, failure)
        first, cautious = entry.first_failed, entry.cautious
        ref = Ref(record.id, record.position, key, state, due, event, entry.size, entry.tries, False, first, cautious)
        ref.wall_due = wall
        self.parking.add(ref)
        self._send(Leaving(record, entry, ref))

    def _rewrite(self, entry: Entry, state: State, due: float, at: Instant, failure: Failure | None) -> None:
        """A drawn event goes back to its record, changed."""
        ref = entry.ref
        assert ref is not None
        ref.state, ref.due, ref.tries, ref.stored = state, due, entry.tries, False
        ref.first_failed = entry.first_failed
        wall = ref.wall_due = at.wall + (due - at.now) if state is State.WAITING else None
        entry.stage = Stage.LEAVING
        self._send(Leaving(self._record(entry, state, wall, failure), None, ref))

    def _record(self, entry: Entry, state: State, due: float | None, failure: Failure | None) -> AsideRecord:
        position, group = entry.delivery.position, self.limits.group
        return AsideRecord(
            id=record_id(group, self.log_id, self.partition, position),
            group=group,
            partition=self.partition,
            position=position,
            state=state,
            due=due,
            event=entry.delivery.event,
            tries=entry.tries,
            failure=failure,
        )

    def _send(self, leaving: Leaving) -> None:
        self.leaving[leaving.record.position] = leaving
        self.dirty = True

    # -- settling -----------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        tracker = self.tracker
        opened, end = tracker.open, tracker.end
        tries = {p: tries for p, tries in self.tries.items() if p in opened or p >= end} if self.tries else {}
        if len(tries) < len(self.tries):  # but for what may be open again, the others turned out to be holes
            self.tries = tries | {p: tries for p, tries in self.tries.items() if p in self.leaving}
        return Progress(
            self.partition, self.epoch or 0, tracker.watermark, tracker.done_above(), tuple(tracker.fresh), tries
        )

    def letters(self, now: float) -> dict[int, Leaving]:
        """The records that go with the next settle; their events count as done in its progress."""
        if now < self.aside_at:
            return {}
        for position, leaving in self.leaving.items():
            if leaving.entry is not None:
                self.tracker.done(position)
                self.storing += 1
        return dict(self.leaving)

    def stored(self, letters: dict[int, Leaving], now: float) -> None:
        """These records are in the store."""
        self.storing = 0
        if self.refusing and (letters or not self.leaving):
            self.refusing = False
            self._unshelve()
        for position, leaving in letters.items():
            if self.leaving.get(position) is leaving:
                del self.leaving[position]
            ref = leaving.ref
            if leaving.entry is not None:
                self._left(leaving.entry, now)
            if ref is None or self.parking.refs.get(position) is not ref or position in self.leaving:
                continue
            ref.stored = True
            self.parking.shed(ref)
            if ref.state is State.DEAD and self.limits.on_dead == "pass":
                self.parking.remove(position)
                self.advance(ref.key, now)
            else:
                self._turn(ref, now)

    def refused(self, letters: dict[int, Leaving], retry_at: float) -> None:
        """These records were not stored, and nothing else of their settle was done."""
        self.storing = 0
        if letters:
            self.aside_at, self.refusing = retry_at, True
            for entry in [entry for entry in self.marking.values() if entry.ref is not None]:
                self.shelve(entry)
        self.tracker.reopen(leaving.entry for leaving in letters.values() if leaving.entry is not None)
        self.dirty = True

    def _forget_record(self, id_: str, key: str | None) -> None:
        self.gone.append((id_, key))
        self.going[key] += 1

    def erased(self, count: int) -> None:
        """The first so many records are not in the store any more."""
        for _, key in self.gone[:count]:
            self.going[key] -= 1
            if not self.going[key]:
                del self.going[key]
        del self.gone[:count]

    def marked(self, positions: Iterable[int]) -> list[Entry]:
        """The starts of these are recorded."""
        entries = [self.marking.pop(position) for position in positions if position in self.marking]
        for entry in entries:
            entry.marked = True
        return entries
