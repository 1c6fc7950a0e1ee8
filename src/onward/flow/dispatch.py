"""Chooses the events that start. Each partition in turn gets a share of the free slots; its oldest events go first.
Pure."""

from collections.abc import Sequence
from heapq import heappop

from onward.brokers.base import Failure
from onward.engines.base import Work
from onward.flow.actions import Accused, Counts
from onward.flow.batching import batch_of, waits_to_fill
from onward.flow.blame import AMONG_OTHERS
from onward.flow.entry import MARKING, RUNNING, BatchCall, Entry, Instant
from onward.flow.holding import Holding
from onward.flow.limits import Limits
from onward.flow.lone_runs import LoneRuns
from onward.flow.settling import Settling


class Dispatch:
    """The slots of one plane, and which partition fills them next."""

    __slots__ = ("_counts", "_limits", "_lone", "_marks", "_settling", "accused", "ready", "running")

    def __init__(self, limits: Limits, counts: Counts, lone: LoneRuns, settling: Settling) -> None:
        self._limits = limits
        self._counts = counts
        self._lone = lone
        self._settling = settling
        self._marks = False  # some events may wait for their start to be recorded
        self.running = 0  # calls of the handler
        self.ready: dict[Holding, None] = {}  # the partitions with ready events, in the order of their turns
        self.accused: list[Accused] = []  # since the last `take_accused`

    def free(self, entry: Entry) -> int:
        """The run of an event has ended: free its slot, if no other event of its call runs. Returns the call's size."""
        if entry is self._lone.entry:
            self._lone.entry = None
        call, entry.call = entry.call, None
        if call is None:
            self.running -= 1
            return 1
        call.left -= 1
        if call.left == 0:
            self.running -= 1
        return call.size

    def take_accused(self) -> Sequence[Accused]:
        """The events accused since the last call of this method."""
        if not self.accused:
            return ()
        accused, self.accused = self.accused, []
        return accused

    def start(self, at: Instant) -> list[Work]:
        """Fill the free slots."""
        work: list[Work] = []
        lone = self._lone
        if not lone.is_calm() and lone.barred(ready=bool(self.ready)):
            return work
        if lone.entry is not None or lone.suspects:
            started = self._start_alone(at.now)
            if lone.entry is not None or lone.suspects:
                return started
        if lone.ended is not None:
            return work  # until that end is recorded, a crash would be blamed on the lone run, not on what starts now
        self._fill(work, at)
        if lone.suspects:
            lone.quarantine.ask(lone)
            self._start_alone(at.now)  # if nothing runs, no completion would trigger the next tick
        return work

    def _fill(self, work: list[Work], at: Instant) -> None:
        free = self._limits.concurrency - self.running - (self._marking() if self._marks else 0)
        turns = [holding for holding in self.ready if holding.events.lanes.ready and holding.release_at is None]
        waiting = turns
        served: set[Holding] = set()
        due = self._due(turns, at.now)
        while free > 0 and due and not self._lone.suspects:
            share = free // len(due) or 1
            for holding in due:
                taken = self._take(holding, share if share < free else free, work, at)
                if taken:
                    free -= taken
                    served.add(holding)
            waiting = [holding for holding in turns if holding.events.lanes.ready]
            due = self._due(waiting, at.now)
        self.ready.clear()
        if waiting:  # partitions that got a slot go behind those that did not
            self.ready = dict.fromkeys([h for h in waiting if h not in served] + [h for h in waiting if h in served])

    def _due(self, ready: list[Holding], now: float) -> list[Holding]:
        """The partitions that may start something now. For a batch handler: those whose batch is full or has waited
        `batch_wait_s`."""
        limits = self._limits
        if not limits.batch_wait_s:
            return ready
        return [each for each in ready if not waits_to_fill(each, limits, now)]

    def _take(self, holding: Holding, slots: int, work: list[Work], at: Instant) -> int:
        """Start up to `slots` calls of one partition. Returns how many slots it used. Events that must be marked, or
        must run alone, are queued for that."""
        limits, events = self._limits, holding.events
        opened, drawn, ready = events.tracker.open, events.drawn, events.lanes.ready
        batch_size, batch_wait_s = limits.batch_size, limits.batch_wait_s
        used = marks = 0
        while used < slots and ready:
            if used and batch_wait_s and waits_to_fill(holding, limits, at.now):
                break
            position = heappop(ready)
            entry = opened.get(position) or drawn[position]
            if entry.parked is not None and entry.parked.removed:  # an operator removed the record just before it ran
                holding.done(entry, at.now)
                self._settling.press(holding)
                continue
            if (entry.cautious or entry.suspect) and not self._is_cleared(holding, entry, at):
                if entry.stage is MARKING and not entry.suspect:
                    used, marks = used + 1, marks + 1
                continue
            used += 1
            if batch_size == 1:
                entry.stage = RUNNING
                events.running += 1
                work.append(entry.delivery)
            else:
                work.append(batch_of(holding, entry, batch_size))
        self.running += used - marks
        return used

    def _is_cleared(self, holding: Holding, entry: Entry, at: Instant) -> bool:
        """Whether an event may start at once. If not, it is given up, or queued for what it has to wait for."""
        if entry.tries.crashes >= self._limits.crash_limit:
            self._crashed(holding, entry, at)
        elif entry.parked is not None and holding.pending.refusing and not entry.marked:
            holding.shelve(entry)
        elif entry.suspect:
            self._lone.suspect(holding, entry)
            self.accused.append(Accused(entry.delivery, entry.tries.crashes))
        elif not entry.marked:  # it takes its slot now: an event marked long before it runs would be suspected wrongly
            holding.mark(entry, AMONG_OTHERS)
            self._marks = True
            self._settling.press(holding)
        else:
            return True
        return False

    def _marking(self) -> int:
        """The slots of events that run as soon as their start is recorded."""
        marking = self._settling.marking()
        self._marks = marking > 0
        return marking

    def _start_alone(self, now: float) -> list[Work]:
        """Start the next suspect alone, if it may run now."""
        found = self._lone.start(self.running, now)
        self._marks = True
        if found is None:
            return []
        holding, entry = found
        entry.stage = RUNNING
        entry.call = BatchCall(1, 1) if self._limits.batch_size > 1 else None
        holding.events.running += 1
        self.running += 1
        return [entry.delivery if self._limits.batch_size == 1 else (entry.delivery,)]

    def _crashed(self, holding: Holding, entry: Entry, at: Instant) -> None:
        self._counts.dead += 1
        crashes = entry.tries.crashes
        failure = Failure(
            reason="crashed",
            error="WorkerDied",
            message=f"its process died {crashes} times while this event ran alone",
            traceback="",
            handler=self._limits.handler,
            attempts=entry.delivery.attempt,
            first=at.wall,
            last=at.wall,
        )
        holding.dead(entry, failure, at)
        self.accused.append(Accused(entry.delivery, crashes, dead=True))
        self._settling.press(holding)
