"""The control plane: decides what runs, what is settled, what is set aside, paused or given up.

Pure: no I/O, no clock, no randomness. It is told what happened (`assigned`, `delivered`, `completed`, ...) and
answers on `tick` with what to do now. `now` and `sure_until` are on one clock, `onward.clock.now`.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop

import msgspec

from onward.brokers.base import AsideRecord, Assigned, Failure, Moved, Progress, record_position
from onward.event import Delivery, Partition
from onward.flow.actions import Actions, Counts, Load, Settlement, Work
from onward.flow.batching import batch_of, waits_to_fill
from onward.flow.entry import Again, Dead, Done, Entry, Instant, Outcome, Split, Stage, Unit
from onward.flow.holding import ALONE, AMONG_OTHERS, Holding, Leaving
from onward.flow.hot import HotKeys
from onward.flow.lag import Lag, lag_of
from onward.flow.limits import Limits
from onward.flow.pressure import RESUME_AT, is_full, weight
from onward.flow.solitude import Solitude

ASIDE_RETRY_S = 1.0
UNSURE_RETRY_S = 0.1  # how soon to look again whether ownership is certain
SOLITUDE_RETRY_S = 0.02  # how soon to look again whether the other handlers have come to rest
SPAN_PACE_S = 1e-5  # the more intervals a settle carries the rarer it is: it stays a small share of the work


class _Part(msgspec.Struct):
    """One partition in the settle in flight."""

    holding: Holding
    epoch: int
    fresh: int
    gone: int
    letters: dict[int, Leaving]
    marks: list[int]


class ControlPlane:
    """See the module. One settle is in flight at a time; nothing starts at or after `sure_until`."""

    def __init__(self, limits: Limits, solitude: Solitude | None = None) -> None:
        self.limits = limits
        self._solitude = solitude or Solitude()
        self.counts = Counts()
        self.hot = HotKeys()
        self.running = 0  # calls of the handler
        self._holdings: dict[Partition, Holding] = {}
        self._touched: dict[Holding, None] = {}  # those to look at on the next tick
        self._ready: dict[Holding, None] = {}  # those with something ready, in turn
        self._dirty: dict[Holding, None] = {}  # those with something to settle
        self._timed: dict[Holding, None] = {}
        self._revoking: dict[Holding, None] = {}
        self._refused: dict[Holding, None] = {}  # those whose records the store refused
        self._suspects: deque[tuple[Holding, int, Entry]] = deque()
        self._marks = False  # some may wait for their start to be recorded
        self._lone: Entry | None = None  # runs, or is about to run, with nothing beside it
        self._ended_alone: tuple[Holding, int] | None = None  # the last of those, until its end is recorded
        self._pending: list[_Part] | None = None
        self._recording: tuple[Holding, int] | None = None  # whose lone end goes with it
        self._settle_at = 0.0
        self._spans = 0  # intervals in the last settle

    # -- what happened ------------------------------------------------------------------------------------------

    def assigned(self, message: Assigned) -> None:
        self.fenced([message.partition])
        holding = self._holdings.get(message.partition) or Holding(message.partition, self.limits)
        self._holdings[message.partition] = holding
        holding.begin(message)
        self._touched[holding] = None

    def loaded(self, load: Load, records: Sequence[AsideRecord], at: Instant) -> None:
        """A page of records was read; an empty one says that there are no more."""
        holding = self._current(load.partition, load.epoch)
        if holding is not None:
            done = holding.load(records, at)
            self.counts.delivered -= done
            self.counts.skipped += done

    def moved(self, message: Moved, at: Instant) -> None:
        """Somebody else moved or removed records of ours."""
        holding = self._current(message.partition, message.epoch)
        if holding is not None:
            due = at.now + (message.due - at.wall) if message.due is not None else at.now
            for id_ in message.ids:
                holding.move(record_position(id_), message.to, due, at.now)

    def delivered(self, batch: Sequence[Delivery], at: Instant) -> None:
        """Take deliveries in; those of an ownership that is not the current one are dropped."""
        self.hot.add([delivery.event.key for delivery in batch])
        partition, holding = None, None
        for delivery in batch:
            if delivery.partition is not partition:
                if holding is not None and holding.unread:
                    holding.read_past(at.now)
                partition = delivery.partition
                holding = self._holdings.get(partition)
                if holding is not None:
                    self._touched[holding] = None
            if holding is None or holding.epoch != delivery.epoch:
                self.counts.stale += 1
            elif holding.take(delivery):
                self.counts.delivered += 1
            else:
                self.counts.skipped += 1
        if holding is not None and holding.unread:
            holding.read_past(at.now)

    def reached(self, partition: Partition, epoch: int, position: int, at: Instant) -> None:
        holding = self._current(partition, epoch)
        if holding is not None:
            holding.reach(position, at.now)

    def revoked(self, partitions: Iterable[Partition], at: Instant, deadline_s: float) -> None:
        """Start nothing more of these; release them once drained, or at the deadline."""
        for partition in partitions:
            holding = self._holdings.get(partition)
            if holding is not None and holding.epoch is not None:
                deadline = at.now + deadline_s
                holding.release_at = min(deadline, holding.release_at or deadline)
                self._revoking[holding] = None
                self._touched[holding] = None
                lone = self._lone
                if lone is not None and lone.stage is Stage.MARKING and holding.find(lone.delivery.position) is lone:
                    self._lone = None
                    holding.unmark(lone)

    def fenced(self, partitions: Iterable[Partition]) -> None:
        """These are not ours any more: start, settle and keep nothing of them."""
        for partition in partitions:
            holding = self._holdings.get(partition)
            if holding is not None:
                self._forget(holding)

    def completed(self, results: Iterable[tuple[Delivery, Outcome]], at: Instant) -> None:
        """Runs have ended."""
        done, now, running = 0, at.now, Stage.RUNNING
        partition, holding = None, None
        for delivery, outcome in results:
            if delivery.partition is not partition:
                partition = delivery.partition
                holding = self._holdings.get(partition)
                if holding is not None:
                    self._touched[holding] = None
            if holding is None or holding.epoch != delivery.epoch:
                self._ended_stale(self._holdings.get(delivery.partition), delivery, now)
                continue
            entry = holding.tracker.open.get(delivery.position) or holding.drawn.get(delivery.position)
            if entry is None or entry.stage is not running:
                self.counts.stale += 1
                continue
            holding.running -= 1
            if entry is self._lone:
                self._ended_alone = holding, delivery.position
            size = self._free_slot(entry)
            if type(outcome) is Done:
                done += 1
                holding.done(entry, now)
            else:
                self._not_done(holding, entry, outcome, at, size)
        self.counts.done += done

    def settled(self, lost: Iterable[Partition], at: Instant) -> None:
        """The settle in flight was answered; `lost` were not ours any more."""
        pending, self._pending = self._pending, None
        assert pending is not None, "a settle was answered that was not asked for"
        if self._recording is self._ended_alone and self._ended_alone is not None:
            self._ended_alone = None
            self._solitude.give_back(self)  # who has more of them asks again, behind the others
        self._settle_at = at.now + self.limits.settle_interval_s + self._spans * SPAN_PACE_S
        lost = set(lost)
        for part in pending:
            holding = part.holding
            if holding.epoch != part.epoch:  # it may be ours again: this answer is about an earlier ownership
                continue
            if holding.partition in lost:
                self._forget(holding)
                continue
            holding.tracker.forget(part.fresh)
            holding.erased(part.gone)
            holding.stored(part.letters, at.now)
            for entry in holding.marked(part.marks):
                if entry is not self._lone:
                    holding.lanes.again(entry)
            self._touched[holding] = None

    def aside_refused(self, at: Instant) -> None:
        """The records could not be stored, so nothing of that settle was done: their events are open again."""
        pending, self._pending = self._pending, None
        assert pending is not None, "a settle was refused that was not asked for"
        for part in pending:
            holding = part.holding
            if holding.epoch != part.epoch:
                continue
            holding.refused(part.letters, at.now + ASIDE_RETRY_S)
            self._touched[holding] = None
            if part.letters:
                self._refused[holding] = None
                if self._lone is not None and holding.shelved.get(self._lone.delivery.position) is self._lone:
                    self._lone = None

    # -- what to do ---------------------------------------------------------------------------------------------

    def tick(self, at: Instant, sure_until: float) -> Actions:
        now = at.now
        for holding in [holding for holding in self._timed if holding.timers[0][0] <= now]:
            holding.wake(now)
            self._touched[holding] = None
        for holding in [holding for holding in self._refused if holding.aside_at <= now]:
            del self._refused[holding]
            self._dirty[holding] = None
        for holding in self._revoking:
            if holding.running and holding.release_at is not None and holding.release_at <= now:
                holding.disown()
                self._touched[holding] = None
        pause, resume, load = self._look(now)
        sure = now < sure_until
        work = self._dispatch(at) if sure else []
        self._share_solitude(sure=sure)
        settle = self._settlement(now)
        drained, undrained = self._releases(now)
        return Actions(work, pause, resume, load, settle, drained, undrained, self._wake_at(now, sure=sure))

    @property
    def open(self) -> int:
        """Events in memory: delivered and not done, and drawn from records."""
        return sum(len(h.tracker) + len(h.drawn) + len(h.backlog) for h in self._holdings.values())

    @property
    def ready(self) -> int:
        """Events that could start if there were slots."""
        return sum(len(holding.lanes.ready) for holding in self._ready)

    def may_start(self, delivery: Delivery) -> bool:
        """Is it still ours, and not being given up? To be asked once more when work has waited in an engine."""
        holding = self._holdings.get(delivery.partition)
        return holding is not None and holding.epoch == delivery.epoch and holding.release_at is None

    @property
    def held(self) -> list[Partition]:
        return [holding.partition for holding in self._holdings.values() if holding.epoch is not None]

    def lag(self, now: float) -> Mapping[Partition, Lag]:
        return {
            holding.partition: lag_of(holding, self.limits, now)
            for holding in self._holdings.values()
            if holding.epoch is not None
        }

    # -- how ----------------------------------------------------------------------------------------------------

    def _current(self, partition: Partition, epoch: int) -> Holding | None:
        holding = self._holdings.get(partition)
        if holding is None or holding.epoch != epoch:
            return None
        self._touched[holding] = None
        return holding

    def _free_slot(self, entry: Entry) -> int:
        """The run of an event has ended: free its slot, if it was the last of its call. Answers the call's size."""
        if entry is self._lone:
            self._lone = None
        unit, entry.unit = entry.unit, None
        if unit is None:
            self.running -= 1
            return 1
        unit.left -= 1
        if unit.left == 0:
            self.running -= 1
        return unit.size

    def _not_done(self, holding: Holding, entry: Entry, outcome: Outcome, at: Instant, size: int) -> None:
        if type(outcome) is Again:
            self.counts.retried += 1
            holding.failed(entry, outcome.at, at, crashed=outcome.crashed)
        elif type(outcome) is Dead:
            self.counts.dead += 1
            holding.dead(entry, outcome.failure, at)
        elif type(outcome) is Split:
            holding.back(entry, batch_limit=max(1, size // 2))
        else:
            holding.back(entry, batch_limit=entry.batch_limit)

    def _ended_stale(self, holding: Holding | None, delivery: Delivery, now: float) -> None:
        """A run that outlived its ownership: it changes nothing, but its lane may go on."""
        self.counts.stale += 1
        entry = holding.stale.pop((delivery.epoch, delivery.position), None) if holding else None
        if holding is None or entry is None:
            return
        self._free_slot(entry)
        free = holding.lanes.leave(entry)
        if holding.epoch is None:
            if not holding.stale:
                del self._holdings[holding.partition]
            return
        self._touched[holding] = None
        if free:
            holding.advance(entry.delivery.event.key, now)

    def _forget(self, holding: Holding) -> None:
        for group in (self._touched, self._ready, self._dirty, self._timed, self._revoking, self._refused):
            group.pop(holding, None)
        lone = self._lone
        if lone is not None and lone.stage is Stage.MARKING and holding.find(lone.delivery.position) is lone:
            self._lone = None
        if self._ended_alone is not None and self._ended_alone[0] is holding:
            self._ended_alone = None
        holding.begin(None)
        if not holding.stale:
            del self._holdings[holding.partition]

    def _look(self, now: float) -> tuple[list[Partition], list[Partition], list[Load]]:
        """What the touched partitions need: pressure, records to read, and which of them have work."""
        pause, resume, load = [], [], []
        limits = self.limits
        for holding in self._touched:
            if holding.lanes.ready:
                self._ready[holding] = None
            if holding.dirty:
                self._dirty[holding] = None
            if holding.timers:
                self._timed[holding] = None
            else:
                self._timed.pop(holding, None)
            mark = holding.tracker.watermark
            if holding.blocked is None or (holding.blocked[0] != mark and not holding.leaving):
                holding.blocked = (mark, now)
            if holding.paused:
                if weight(holding, limits) <= RESUME_AT:
                    holding.paused = False
                    resume.append(holding.partition)
            elif is_full(holding, limits):
                holding.paused = True
                pause.append(holding.partition)
            after = holding.next_load()
            if after is not None:
                holding.loading = True
                load.append(Load(holding.partition, holding.epoch or 0, after if after >= 0 else None))
        self._touched.clear()
        return pause, resume, load

    def _dispatch(self, at: Instant) -> list[Work]:
        """Fill the free slots: a share to each partition in turn, the oldest first within each."""
        work: list[Work] = []
        if self._barred():
            return work
        if self._lone is not None or self._suspects:
            alone = self._dispatch_alone(at.now)
            if self._lone is not None or self._suspects:
                return alone
        if self._ended_alone is not None:
            return work  # what starts before that is recorded would be taken for innocent in a crash
        free = self.limits.concurrency - self.running - self._marking()
        turns = [holding for holding in self._ready if holding.lanes.ready and holding.release_at is None]
        served: dict[Holding, None] = {}
        due = self._due(turns, at.now)
        while free > 0 and due and not self._suspects:
            share = max(1, free // len(due))
            for holding in due:
                taken = self._take(holding, min(share, free), work, at)
                free -= taken
                if taken:
                    served[holding] = None
            due = self._due(due, at.now)
        # Whoever was served comes after those who were not.
        waiting = [holding for holding in turns if holding.lanes.ready]
        self._ready.clear()
        if waiting:
            self._ready = dict.fromkeys([h for h in waiting if h not in served] + [h for h in waiting if h in served])
        if self._suspects:
            self._solitude.ask(self)
            self._dispatch_alone(at.now)  # when nothing runs, nothing else would call for it
        return work

    def leave(self) -> None:
        """Nothing of it runs, and nothing ever will: whoever waits for that in this process need not any more."""
        self._solitude.leave(self)

    def _barred(self) -> bool:
        """Another handler of this process has, or waits for, its lone run."""
        solitude, wants = self._solitude, self._wants_solitude()
        if wants:
            solitude.ask(self)
        barred = solitude.barred(self)
        if barred and self._ready and not wants:
            solitude.turn_away(self)
        else:
            solitude.serve(self)
        return barred

    def _wants_solitude(self) -> bool:
        return bool(self._lone is not None or self._suspects or self._ended_alone is not None)

    def _share_solitude(self, *, sure: bool) -> None:
        """Tell the other planes of this process what runs here, and give back what is of no use now."""
        idle = not sure and (self._lone is None or self._lone.stage is not Stage.RUNNING)
        if idle or not self._wants_solitude():
            self._solitude.give_back(self)
        if not sure:
            self._solitude.serve(self)
        self._solitude.report(self, self.running)

    def _due(self, turns: list[Holding], now: float) -> list[Holding]:
        """Those that have something to start; of a batch handler, those whose batch is full or has waited enough."""
        ready = [holding for holding in turns if holding.lanes.ready]
        return (
            [each for each in ready if not waits_to_fill(each, self.limits, now)] if self.limits.batch_wait_s else ready
        )

    def _take(self, holding: Holding, slots: int, work: list[Work], at: Instant) -> int:
        """Start up to `slots` calls of one partition; what must be marked, or run alone, is put aside for that."""
        lanes, limits, entries = holding.lanes, self.limits, holding.tracker.open
        used = marks = 0
        while used < slots and lanes.ready:
            if used and limits.batch_wait_s and waits_to_fill(holding, limits, at.now):
                break
            position = heappop(lanes.ready)
            entry = entries.get(position) or holding.drawn[position]
            if entry.ref is not None and entry.ref.removed:
                self._drop(holding, entry, at.now)
                continue
            if entry.cautious or entry.suspect:
                if entry.tries.crashes >= limits.crash_limit:
                    self._crashed(holding, entry, at)
                    continue
                if entry.ref is not None and holding.refusing and not entry.marked:
                    holding.shelve(entry)
                    continue
                if entry.suspect:
                    entry.stage = Stage.MARKING
                    self._suspects.append((holding, holding.epoch or 0, entry))
                    continue
                if not entry.marked:  # it has its slot from here on: what cannot run yet would be suspected in vain
                    holding.mark(entry, AMONG_OTHERS)
                    self._marks = True
                    self._dirty[holding] = None
                    used, marks = used + 1, marks + 1
                    continue
            work.append(entry.delivery if limits.batch_size == 1 else batch_of(holding, entry, limits.batch_size))
            entry.stage = Stage.RUNNING
            holding.running += 1
            used += 1
        self.running += used - marks
        return used

    def _marking(self) -> int:
        """Slots of those that run as soon as their start is recorded."""
        if not self._marks:
            return 0
        settling = [part.holding for part in self._pending or ()]
        marking = sum(len(holding.marking) for holding in dict.fromkeys([*settling, *self._dirty]))
        self._marks = marking > 0
        return marking

    def _dispatch_alone(self, now: float) -> list[Work]:
        """One charged with a crash runs alone: first everything else ends, then its start is recorded."""
        lone = self._lone
        if lone is None:
            self._choose_lone(now)
            return []
        if lone.stage is not Stage.MARKING or not lone.marked or not self._solitude.granted(self):
            return []
        holding = self._holdings[lone.delivery.partition]
        if lone.removed:
            self._lone = None
            self._drop(holding, lone, now)
            self._choose_lone(now)
            return []
        lone.stage = Stage.RUNNING
        lone.unit = Unit(1, 1) if self.limits.batch_size > 1 else None
        holding.running += 1
        self.running += 1
        return [lone.delivery if self.limits.batch_size == 1 else (lone.delivery,)]

    def _choose_lone(self, now: float) -> None:
        while self._suspects and not self.running and self._solitude.granted(self):
            holding, epoch, entry = self._suspects.popleft()
            if holding.epoch != epoch or holding.release_at is not None:
                continue
            if entry.ref is not None and holding.refusing:
                holding.shelve(entry)
                continue
            if not entry.removed:
                self._lone = entry
                holding.mark(entry, ALONE)
                self._marks = True
                self._dirty[holding] = None
                return
            self._drop(holding, entry, now)

    def _drop(self, holding: Holding, entry: Entry, now: float) -> None:
        """Somebody removed the record of what was about to run."""
        holding.done(entry, now)
        self._dirty[holding] = None

    def _crashed(self, holding: Holding, entry: Entry, at: Instant) -> None:
        self.counts.dead += 1
        crashes = entry.tries.crashes
        failure = Failure(
            reason="crashed",
            error="WorkerDied",
            message=f"the process died {crashes} times while this event ran alone",
            traceback="",
            handler=self.limits.handler,
            attempts=entry.delivery.attempt,
            first=at.wall,
            last=at.wall,
        )
        holding.dead(entry, failure, at)
        self._dirty[holding] = None

    def _settlement(self, now: float) -> Settlement | None:
        if self._pending is not None or not self._dirty:
            return None
        if now < self._settle_at and not self._urgent(now):
            return None
        self._pending = []
        self._recording = self._ended_alone
        progress: list[Progress] = []
        aside: list[AsideRecord] = []
        gone: list[str] = []
        for holding in self._dirty:
            letters = holding.letters(now)
            aside.extend(leaving.record for leaving in letters.values())
            gone.extend(id_ for id_, _ in holding.gone)
            told = holding.progress()
            progress.append(told)
            marks = [p for p in holding.marking if p in letters or p in holding.tracker.open]
            fresh, gone_count = len(holding.tracker.fresh), len(holding.gone)
            self._pending.append(_Part(holding, holding.epoch or 0, fresh, gone_count, letters, marks))
            holding.dirty = False
        self._dirty.clear()
        self._spans = sum(len(each.done_above) for each in progress)
        return Settlement(progress, aside, gone)

    def _urgent(self, now: float) -> bool:
        """Something waits for this settle: a lane for its record, a start for its mark, the next owner."""
        for holding in self._dirty:
            if holding.marking or holding.release_at is not None or (holding.leaving and now >= holding.aside_at):
                return True
        return self._ended_alone is not None and self._ended_alone[0] in self._dirty

    def _releases(self, now: float) -> tuple[list[Partition], list[Partition]]:
        """Of the revoked partitions, those that are drained or late, once their progress is settled."""
        drained: list[Partition] = []
        undrained: list[Partition] = []
        settling = {part.holding for part in self._pending or ()}
        for holding in list(self._revoking):
            over = holding.release_at is not None and now >= holding.release_at
            runs = holding.running or holding.stale
            if (runs and not over) or holding in settling or holding in self._dirty or holding.dirty:
                continue
            (undrained if runs else drained).append(holding.partition)
            self._forget(holding)
        return drained, undrained

    def _wake_at(self, now: float, *, sure: bool) -> float | None:
        times = [at for holding in self._revoking if (at := holding.release_at) is not None and at > now]
        times.extend(holding.aside_at for holding in self._refused)
        times.extend(holding.timers[0][0] for holding in self._timed if holding.timers)
        if self.limits.batch_wait_s:
            wait_s = self.limits.batch_wait_s
            fills = [h.fill_since + wait_s for h in self._ready if h.fill_since is not None]
            times.extend(full for full in fills if full > now)  # else it waits for a slot, not for time
        if self._dirty and self._pending is None:
            times.append(max(self._settle_at, now))
        if (self._ready or self._suspects or self._lone is not None) and self._solitude.contested(self):
            times.append(now + SOLITUDE_RETRY_S)
        if not sure and (self._ready or self._suspects or self._lone is not None):
            times.append(now + UNSURE_RETRY_S)  # nobody tells us when it is renewed
        return min(times, default=None)
