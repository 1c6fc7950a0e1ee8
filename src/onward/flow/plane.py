"""The control plane: decides what runs, what is settled, and what is paused or given up. Pure: no I/O, no clock.

It is told what happened (`assigned`, `delivered`, `completed`, ...) and answers on `tick` with what to do now.
Times are on one clock, `onward.clock.now`; the caller reads it.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import msgspec

from onward.brokers.base import AsideRecord, Assigned, Ordering, Progress, State, Tries, record_id
from onward.event import Delivery, Partition
from onward.flow.entry import Again, Dead, Done, Entry, Outcome, Stage
from onward.flow.holding import Holding

RESUME_AT = 0.7  # of the limit: without the gap a full partition would flap between paused and resumed
ASIDE_RETRY_S = 1.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    ordering: Ordering
    concurrency: int
    max_in_flight: int
    max_in_flight_bytes: int
    settle_interval_s: float


class Settlement(msgspec.Struct, frozen=True):
    """One settle call. Its answer goes back to the plane by `settled` or `aside_refused`."""

    progress: Sequence[Progress]
    aside: Sequence[AsideRecord] = ()


class Actions(msgspec.Struct, frozen=True):
    """What to do now, in this order."""

    work: Sequence[Delivery] = ()
    pause: Sequence[Partition] = ()
    resume: Sequence[Partition] = ()
    settle: Settlement | None = None
    drained: Sequence[Partition] = ()  # to release: nothing of them runs
    undrained: Sequence[Partition] = ()  # to release: the deadline came first
    wake_at: float | None = None  # tick again by then even if nothing happens


class Counts(msgspec.Struct):
    """What the plane has seen, for metrics and tests."""

    delivered: int = 0
    skipped: int = 0  # delivered again although done
    stale: int = 0  # completions of an ownership that had ended
    done: int = 0
    retried: int = 0
    dead: int = 0


class _Pending(msgspec.Struct):
    """A settle in flight, by holding: its epoch, how many fresh positions it named, the letters it carries."""

    parts: list[tuple[Holding, int, int, dict[int, tuple[Entry, AsideRecord]]]]


class ControlPlane:
    """See the module. One settle is in flight at a time; nothing starts at or after `sure_until`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counts = Counts()
        self.running = 0
        self._holdings: dict[Partition, Holding] = {}
        self._ready: dict[Holding, None] = {}  # those with something ready, in turn
        self._dirty: dict[Holding, None] = {}  # those with something to settle
        self._pressed: dict[Holding, None] = {}  # those whose load changed since the last tick
        self._revoking: dict[Holding, None] = {}
        self._refused: dict[Holding, None] = {}  # those whose letters the store refused
        self._delayed: list[tuple[float, int, Holding, int, int]] = []  # due, tie-break, holding, epoch, position
        self._pending: _Pending | None = None
        self._settle_at = 0.0
        self._ties = 0

    # -- what happened ------------------------------------------------------------------------------------------

    def assigned(self, message: Assigned) -> None:
        self.fenced([message.partition])
        holding = self._holdings.get(message.partition) or Holding(message.partition, self.limits.ordering)
        self._holdings[message.partition] = holding
        holding.begin(message)

    def delivered(self, batch: Sequence[Delivery]) -> None:
        """Take deliveries in; those of an ownership that is not the current one are dropped."""
        partition, holding = None, None
        for delivery in batch:
            if delivery.partition is not partition:
                partition = delivery.partition
                holding = self._holdings.get(partition)
                if holding is not None:
                    self._pressed[holding] = self._ready[holding] = None
            if holding is None or holding.epoch != delivery.epoch:
                self.counts.stale += 1
                continue
            position = delivery.position
            tries = holding.tries.get(position) if holding.tries else None
            if tries is not None:
                delivery = msgspec.structs.replace(delivery, attempt=tries.failed + 1)
            entry = Entry(delivery, delivery.event.size)
            if holding.tracker.add(position, entry):
                self.counts.delivered += 1
                holding.bytes += entry.size
                holding.lanes.add(entry)
            else:
                self.counts.skipped += 1
                self._dirty[holding] = None

    def reached(self, partition: Partition, epoch: int, position: int) -> None:
        holding = self._current(partition, epoch)
        if holding is not None and position > holding.tracker.end:
            holding.tracker.reached(position)
            self._dirty[holding] = None

    def revoked(self, partitions: Iterable[Partition], now: float, deadline_s: float) -> None:
        """Start nothing more of these; release them once drained, or at the deadline."""
        for partition in partitions:
            holding = self._holdings.get(partition)
            if holding is not None and holding.epoch is not None:
                holding.release_at = now + deadline_s
                self._revoking[holding] = None

    def fenced(self, partitions: Iterable[Partition]) -> None:
        """These are not ours any more: start, settle and keep nothing of them."""
        for partition in partitions:
            holding = self._holdings.get(partition)
            if holding is not None:
                self._forget(holding)

    def completed(self, results: Iterable[tuple[Delivery, Outcome]], wall: float) -> None:
        """Runs have ended. `wall` is Unix time, for the record."""
        for delivery, outcome in results:
            holding = self._holdings.get(delivery.partition)
            if holding is None or holding.epoch != delivery.epoch:
                self._ended_stale(holding, delivery)
                continue
            entry = holding.tracker.open.get(delivery.position)
            if entry is None or entry.stage is not Stage.RUNNING:
                self.counts.stale += 1
                continue
            self.running -= 1
            holding.running -= 1
            self._pressed[holding] = self._ready[holding] = None
            if type(outcome) is Done:
                self._done(holding, entry)
            elif type(outcome) is Again:
                self._again(holding, entry, outcome.at, wall)
            elif type(outcome) is Dead:
                self._dead(holding, entry, outcome)
            else:
                holding.lanes.again(entry)

    def settled(self, lost: Iterable[Partition], now: float) -> None:
        """The settle in flight was answered; `lost` were not ours any more."""
        pending, self._pending = self._pending, None
        assert pending is not None, "a settle was answered that was not asked for"
        self._settle_at = now + self.limits.settle_interval_s
        for holding, epoch, fresh, letters in pending.parts:
            if holding.epoch != epoch:
                continue
            del holding.tracker.fresh[:fresh]
            for position, (entry, _) in letters.items():
                del holding.leaving[position]
                self._leave(holding, entry)
        self.fenced(lost)

    def aside_refused(self, now: float) -> None:
        """The letters could not be stored, so nothing of that settle was done: their events are open again."""
        pending, self._pending = self._pending, None
        assert pending is not None, "a settle was refused that was not asked for"
        for holding, epoch, _, letters in pending.parts:
            if holding.epoch != epoch:
                continue
            holding.tracker.reopen({position: entry for position, (entry, _) in letters.items()})
            self._dirty[holding] = None
            if letters:
                holding.aside_at = now + ASIDE_RETRY_S
                self._refused[holding] = None

    # -- what to do ---------------------------------------------------------------------------------------------

    def tick(self, now: float, sure_until: float) -> Actions:
        self._wake_delayed(now)
        self._retry_refused(now)
        work = self._dispatch() if now < sure_until else []
        pause, resume = self._pressure()
        settle = self._settlement(now)
        drained, undrained = self._releases(now)
        return Actions(work, pause, resume, settle, drained, undrained, self._wake_at(now))

    @property
    def open(self) -> int:
        return sum(len(holding.tracker) for holding in self._holdings.values())

    @property
    def held(self) -> list[Partition]:
        return [holding.partition for holding in self._holdings.values() if holding.epoch is not None]

    # -- how ----------------------------------------------------------------------------------------------------

    def _current(self, partition: Partition, epoch: int) -> Holding | None:
        holding = self._holdings.get(partition)
        return holding if holding is not None and holding.epoch == epoch else None

    def _done(self, holding: Holding, entry: Entry) -> None:
        position = entry.delivery.position
        assert holding.tracker.done(position), "a run ended whose event was not open"
        self.counts.done += 1
        self._dirty[holding] = None
        self._leave(holding, entry)

    def _leave(self, holding: Holding, entry: Entry) -> None:
        """The event has left the flow: free its room and let the next of its lane go."""
        holding.bytes -= entry.size
        if holding.tries:
            holding.tries.pop(entry.delivery.position, None)
        holding.lanes.leave(entry)
        self._pressed[holding] = self._ready[holding] = None

    def _again(self, holding: Holding, entry: Entry, at: float, wall: float) -> None:
        delivery = entry.delivery
        self.counts.retried += 1
        entry.stage = Stage.DELAYED
        entry.first_failed = entry.first_failed or wall
        holding.tries[delivery.position] = Tries(failed=delivery.attempt)
        entry.delivery = msgspec.structs.replace(delivery, attempt=delivery.attempt + 1)
        self._dirty[holding] = None
        self._ties += 1
        heappush(self._delayed, (at, self._ties, holding, delivery.epoch, delivery.position))

    def _dead(self, holding: Holding, entry: Entry, outcome: Dead) -> None:
        # The lane stays blocked until the letter is stored: a successor that completed first would be an inversion
        # if this process died in between and the event ran again.
        delivery, failure = entry.delivery, outcome.failure
        self.counts.dead += 1
        entry.stage = Stage.LEAVING
        failure = msgspec.structs.replace(failure, first=entry.first_failed or failure.first)
        record = AsideRecord(
            id=record_id(self.limits.group, holding.log_id, delivery.partition, delivery.position),
            group=self.limits.group,
            partition=delivery.partition,
            position=delivery.position,
            state=State.DEAD,
            due=None,
            event=delivery.event,
            tries=Tries(failed=delivery.attempt),
            failure=failure,
        )
        holding.leaving[delivery.position] = (entry, record)
        self._dirty[holding] = None

    def _ended_stale(self, holding: Holding | None, delivery: Delivery) -> None:
        """A run that outlived its ownership: it changes nothing, but its lane may go on."""
        self.counts.stale += 1
        entry = holding.stale.pop((delivery.epoch, delivery.position), None) if holding else None
        if holding is None or entry is None:
            return
        self.running -= 1
        holding.lanes.leave(entry)
        if holding.epoch is not None:
            self._ready[holding] = None
        elif not holding.stale:
            del self._holdings[holding.partition]

    def _forget(self, holding: Holding) -> None:
        for group in (self._ready, self._dirty, self._pressed, self._revoking, self._refused):
            group.pop(holding, None)
        holding.begin(None)
        if not holding.stale:
            del self._holdings[holding.partition]

    def _wake_delayed(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            _, _, holding, epoch, position = heappop(self._delayed)
            if holding.epoch == epoch:
                holding.lanes.again(holding.tracker.open[position])
                self._ready[holding] = None

    def _retry_refused(self, now: float) -> None:
        for holding in [holding for holding in self._refused if holding.aside_at <= now]:
            del self._refused[holding]
            self._dirty[holding] = None

    def _dispatch(self) -> list[Delivery]:
        """Fill the free slots: a share to each partition in turn, the oldest first within each."""
        work: list[Delivery] = []
        free = self.limits.concurrency - self.running
        turns = [holding for holding in self._ready if holding.lanes.ready and holding.release_at is None]
        self._ready = dict.fromkeys(turns)
        while free > 0 and turns:
            share = max(1, free // len(turns))
            for holding in turns:
                taken = self._take(holding, min(share, free), work)
                free -= taken
            turns = [holding for holding in turns if holding.lanes.ready]
        if turns:  # whoever came last in this round comes first in the next
            self._ready = dict.fromkeys(turns[-1:] + turns[:-1])
        self.running += len(work)
        return work

    def _take(self, holding: Holding, count: int, work: list[Delivery]) -> int:
        lanes, entries = holding.lanes, holding.tracker.open
        count = min(count, len(lanes.ready))
        for _ in range(count):
            entry = entries[lanes.next_ready()]
            entry.stage = Stage.RUNNING
            work.append(entry.delivery)
        holding.running += count
        return count

    def _pressure(self) -> tuple[list[Partition], list[Partition]]:
        pause, resume = [], []
        limits = self.limits
        for holding in self._pressed:
            load = max(len(holding.tracker) / limits.max_in_flight, holding.bytes / limits.max_in_flight_bytes)
            if not holding.paused and load >= 1.0:
                holding.paused = True
                pause.append(holding.partition)
            elif holding.paused and load <= RESUME_AT:
                holding.paused = False
                resume.append(holding.partition)
        self._pressed.clear()
        return pause, resume

    def _settlement(self, now: float) -> Settlement | None:
        if self._pending is not None or not self._dirty:
            return None
        urgent = any(
            (holding.leaving and now >= holding.aside_at) or holding.release_at is not None for holding in self._dirty
        )
        if now < self._settle_at and not urgent:
            return None
        pending = _Pending([])
        progress: list[Progress] = []
        aside: list[AsideRecord] = []
        for holding in self._dirty:
            letters = dict(holding.leaving) if now >= holding.aside_at else {}
            for position, (_, record) in letters.items():
                holding.tracker.done(position)
                aside.append(record)
            progress.append(holding.progress())
            pending.parts.append((holding, holding.epoch or 0, len(holding.tracker.fresh), letters))
        self._dirty.clear()
        self._pending = pending
        return Settlement(progress, aside)

    def _releases(self, now: float) -> tuple[list[Partition], list[Partition]]:
        """Of the revoked partitions, those that are drained or late, once their progress is settled."""
        drained: list[Partition] = []
        undrained: list[Partition] = []
        settling = {holding for holding, *_ in self._pending.parts} if self._pending else set()
        for holding in list(self._revoking):
            over = now >= (holding.release_at or 0)
            if (holding.running and not over) or holding in settling or holding in self._dirty:
                continue
            (undrained if holding.running else drained).append(holding.partition)
            self._forget(holding)
        return drained, undrained

    def _wake_at(self, now: float) -> float | None:
        times = [at for holding in self._revoking if (at := holding.release_at) is not None and at > now]
        times.extend(holding.aside_at for holding in self._refused)
        if self._delayed:
            times.append(self._delayed[0][0])
        if self._dirty and self._pending is None:
            times.append(max(self._settle_at, now))
        return min(times, default=None)
