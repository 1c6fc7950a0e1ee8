"""The control plane decides which events run, and what is settled, set aside, paused or given up.

Pure: no I/O, no clock, no randomness. The loop around it reports what happened (`assigned`, `delivered`,
`completed`, ...); `tick` returns what to do now. `now` and `sure_until` are on one clock, `onward.clock.now`.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence

from onward.brokers.base import AsideRecord, Assigned, Moved, record_position
from onward.event import Delivery, Partition
from onward.flow import intake
from onward.flow.actions import Actions, Counts, LoadPage, SettleCall
from onward.flow.dispatch import Dispatch
from onward.flow.entry import RUNNING, Again, Dead, Done, Entry, Instant, Outcome, Released, Split
from onward.flow.holding import Holding
from onward.flow.lag import Lag, lag_of
from onward.flow.limits import Limits
from onward.flow.lone_runs import LoneRuns
from onward.flow.pressure import RESUME_AT, is_full, weight
from onward.flow.quarantine import Quarantine
from onward.flow.settling import Settling, part_refused, part_settled

UNSURE_RETRY_S = 0.1  # how soon to check again whether ownership is certain
QUARANTINE_RETRY_S = 0.02  # how soon to check again whether the other handlers run nothing


class ControlPlane:
    """The plane of one handler. One settle is in flight at a time. No event starts at or after `sure_until`."""

    def __init__(self, limits: Limits, quarantine: Quarantine | None = None) -> None:
        self.limits = limits
        self.counts = Counts()
        self._holdings: dict[Partition, Holding] = {}
        self._touched: dict[Holding, None] = {}  # to check on the next tick
        self._timed: dict[Holding, None] = {}  # with a timer
        self._revoking: dict[Holding, None] = {}
        self._refused: dict[Holding, None] = {}  # the store refused their records
        self._settling = Settling(limits.settle_interval_s)
        self._lone = LoneRuns(quarantine or Quarantine(), self._settling)
        self._dispatch = Dispatch(limits, self.counts, self._lone, self._settling)

    # -- what happened ------------------------------------------------------------------------------------------

    def assigned(self, message: Assigned) -> None:
        self.fenced([message.partition])
        holding = self._holdings.get(message.partition) or Holding(message.partition, self.limits)
        self._holdings[message.partition] = holding
        holding.begin(message)
        self._touched[holding] = None

    def loaded(self, load: LoadPage, records: Sequence[AsideRecord], at: Instant) -> None:
        """A page of records was read. An empty page means that there are no more."""
        holding = self._current(load.partition, load.epoch)
        if holding is not None:
            skipped, filtered = intake.load(holding, records, at)
            self.counts.delivered -= skipped
            self.counts.skipped += skipped
            self.counts.filtered += filtered

    def moved(self, message: Moved, at: Instant) -> None:
        """An operator moved or removed records of ours."""
        holding = self._current(message.partition, message.epoch)
        if holding is not None:
            due = at.now + (message.due - at.wall) if message.due is not None else at.now
            for id_ in message.ids:
                intake.move(holding, record_position(id_), message.to, due, at.now)

    def delivered(self, batch: Sequence[Delivery], at: Instant) -> None:
        """Add deliveries. Those of an ownership that is not the current one are dropped."""
        counts, start = self.counts, 0
        while start < len(batch):
            holding = self._current(batch[start].partition, batch[start].epoch)
            if holding is None:
                counts.stale += 1
                start += 1
                continue
            stop, skipped, filtered = intake.take(holding, batch, start)
            counts.delivered += stop - start - skipped
            counts.skipped += skipped
            counts.filtered += filtered
            start = stop
            if holding.aside.unread:
                intake.read_past(holding, at.now)

    def reached(self, partition: Partition, epoch: int, position: int, at: Instant) -> None:
        holding = self._current(partition, epoch)
        if holding is not None:
            intake.reach(holding, position, at.now)

    def revoked(self, partitions: Iterable[Partition], at: Instant, deadline_s: float) -> None:
        """Start no more events of these partitions. Release them once they are drained, or at the deadline."""
        for partition in partitions:
            holding = self._holdings.get(partition)
            if holding is not None and holding.epoch is not None:
                deadline = at.now + deadline_s
                holding.release_at = min(deadline, holding.release_at or deadline)
                self._revoking[holding] = None
                self._touched[holding] = None
                lone = self._lone.withdraw(holding)
                if lone is not None:
                    holding.unmark(lone)

    def fenced(self, partitions: Iterable[Partition]) -> None:
        """These partitions are no longer ours: forget them. Nothing of them is started or settled any more."""
        for partition in partitions:
            holding = self._holdings.get(partition)
            if holding is not None:
                self._forget(holding)

    def completed(self, results: Iterable[tuple[Delivery, Outcome]], at: Instant) -> None:
        """Runs have ended."""
        now, done, freed = at.now, 0, 0
        lone = self._lone
        partition, epoch, holding = None, None, None
        for delivery, outcome in results:
            if delivery.partition is not partition:
                partition, epoch = delivery.partition, None
                holding = self._holdings.get(partition)
                if holding is not None:
                    self._touched[holding] = None
                    epoch, events, opened = holding.epoch, holding.events, holding.events.tracker.open
            if holding is None or epoch != delivery.epoch:
                self._ended_stale(self._holdings.get(delivery.partition), delivery, now)
                continue
            entry = opened.get(delivery.position) or events.drawn.get(delivery.position)
            if entry is None or entry.stage is not RUNNING:
                self.counts.stale += 1
                continue
            events.running -= 1
            if entry is lone.entry:
                lone.end(delivery.position)
            if entry.call is None:
                size = 1
                freed += 1
            else:
                size = self._dispatch.free(entry)
            if type(outcome) is Done:
                done += 1
                holding.done(entry, now)
            else:
                self._not_done(holding, entry, outcome, at, size)
        self._dispatch.running -= freed
        self.counts.done += done

    def settled(self, lost: Iterable[Partition], at: Instant) -> None:
        """The settle in flight was answered. `lost` partitions are no longer ours."""
        self._answered(frozenset(), set(lost), at.now)

    def aside_refused(self, partitions: Iterable[Partition], lost: Iterable[Partition], at: Instant) -> None:
        """The settle in flight was answered, but it did nothing in `partitions`: their records could not be stored, and
        the events of these records are open again. `lost` are no longer ours. The other partitions were settled."""
        self._answered(set(partitions), set(lost), at.now)

    # -- what to do ---------------------------------------------------------------------------------------------

    def tick(self, at: Instant, sure_until: float) -> Actions:
        now = at.now
        if self._timed or self._refused or self._revoking:
            self._pass_time(now)
        pause, resume, load = self._look(now)
        sure = now < sure_until
        work = self._dispatch.start(at) if sure else []
        self._lone.share(self._dispatch.running, sure=sure)
        settle = self._settlement(now)
        drained, undrained = self._releases(now) if self._revoking else ((), ())
        wake_at, accused = self._wake_at(now, sure=sure), self._dispatch.take_accused()
        return Actions(work, pause, resume, load, settle, drained, undrained, wake_at, accused)

    def leave(self) -> None:
        """This plane runs nothing and never will again: the other handlers of this process need not wait for it."""
        self._lone.quarantine.leave(self._lone)

    @property
    def running(self) -> int:
        """The number of running calls of the handler."""
        return self._dispatch.running

    @property
    def open(self) -> int:
        """The number of events in memory: delivered and not done, or drawn from records."""
        return sum(holding.events.count for holding in self._holdings.values())

    @property
    def ready(self) -> int:
        """The number of events that could start if there were free slots."""
        return sum(len(holding.events.lanes.ready) for holding in self._dispatch.ready)

    def may_start(self, delivery: Delivery) -> bool:
        """Whether its partition is still ours and not being released. Ask again after work has waited in an engine."""
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

    def _answered(self, refused: Container[Partition], lost: Container[Partition], now: float) -> None:
        parts = self._settling.answered(now)
        self._lone.settled(refused)
        for part in parts:
            holding = part.holding
            if holding.partition in lost:
                self._forget(holding)
                continue
            self._touched[holding] = None
            if holding.partition not in refused:
                for entry in part_settled(part, now):
                    if entry is not self._lone.entry:
                        holding.events.lanes.again(entry)
                continue
            part_refused(part, now)
            if part.records:
                self._refused[holding] = None
                self._lone.shelved(holding)

    def _not_done(self, holding: Holding, entry: Entry, outcome: Outcome, at: Instant, size: int) -> None:
        if type(outcome) is Again:
            self.counts.retried += 1
            holding.failed(entry, outcome, at)
        elif type(outcome) is Dead:
            self.counts.dead += 1
            holding.dead(entry, outcome.failure, at)
        elif type(outcome) is Split:
            holding.back(entry, batch_limit=max(1, size // 2))
        else:
            holding.back(entry, batch_limit=entry.batch_limit, due=outcome.at if type(outcome) is Released else 0.0)

    def _ended_stale(self, holding: Holding | None, delivery: Delivery, now: float) -> None:
        """A run that outlived its ownership has ended. Its outcome does not count, but its lane is free again."""
        self.counts.stale += 1
        entry = holding.stale.pop((delivery.epoch, delivery.position), None) if holding else None
        if holding is None or entry is None:
            return
        self._dispatch.free(entry)
        free = holding.events.lanes.leave(entry)
        if holding.epoch is None:
            if not holding.stale:
                del self._holdings[holding.partition]
            return
        self._touched[holding] = None
        if free:
            holding.advance(entry.delivery.event.key, now)

    def _forget(self, holding: Holding) -> None:
        kept = (self._touched, self._timed, self._revoking, self._refused)
        for group in (*kept, self._dispatch.ready, self._settling.dirty):
            group.pop(holding, None)
        self._lone.forget(holding)
        holding.begin(None)
        if not holding.stale:
            del self._holdings[holding.partition]

    def _pass_time(self, now: float) -> None:
        """Handle everything whose time has come."""
        for holding in [holding for holding in self._timed if holding.events.timers[0][0] <= now]:
            holding.wake(now)
            self._touched[holding] = None
        for holding in [holding for holding in self._refused if holding.pending.retry_at <= now]:
            del self._refused[holding]
            self._settling.press(holding)
        for holding in self._revoking:
            if holding.events.running and holding.release_at is not None and holding.release_at <= now:
                holding.disown()
                self._touched[holding] = None

    def _look(self, now: float) -> tuple[list[Partition], list[Partition], list[LoadPage]]:
        """Check the touched partitions. Returns those to pause, those to resume, and the records to load."""
        pause, resume, load = [], [], []
        limits, timed, settling = self.limits, self._timed, self._settling
        ready, dirty = self._dispatch.ready, settling.dirty
        for holding in self._touched:
            events, pending = holding.events, holding.pending
            if events.lanes.ready:
                ready[holding] = None
            if pending.dirty:
                dirty[holding] = None
            if pending.leaving or holding.release_at is not None or holding.blame.marking:
                settling.pressed = True
            if events.timers:
                timed[holding] = None
            elif timed:
                timed.pop(holding, None)
            mark, still = events.stands_at, events.standstill
            if mark != still.at and (still.at < 0 or not pending.leaving):  # the store may still refuse the records
                still.at, still.since = mark, now
            if holding.paused:
                if weight(holding, limits) <= RESUME_AT:
                    holding.paused = False
                    resume.append(holding.partition)
            elif is_full(holding, limits):
                holding.paused = True
                pause.append(holding.partition)
            loading = holding.aside.loading
            if (loading.wanted or not loading.loaded) and (page := self._next_page(holding)) is not None:
                load.append(page)
        self._touched.clear()
        return pause, resume, load

    def _next_page(self, holding: Holding) -> LoadPage | None:
        after = holding.aside.loading.next() if holding.epoch is not None else None
        if after is None:
            return None
        holding.aside.loading.loading = True
        return LoadPage(holding.partition, holding.epoch or 0, after if after >= 0 else None)

    def _settlement(self, now: float) -> SettleCall | None:
        settling, lone = self._settling, self._lone
        if settling.pending is not None or not settling.dirty:
            return None
        urgent = (settling.pressed and settling.is_urgent(now)) or (lone.ended is not None and lone.is_urgent())
        if now < settling.at and not urgent:
            return None
        lone.settling()
        return settling.settle(now)

    def _releases(self, now: float) -> tuple[list[Partition], list[Partition]]:
        """The revoked partitions that are settled and can be released: drained ones, and those past the deadline."""
        drained: list[Partition] = []
        undrained: list[Partition] = []
        settling = {part.holding for part in self._settling.pending or ()}
        for holding in list(self._revoking):
            over = holding.release_at is not None and now >= holding.release_at
            runs = holding.events.running or holding.stale
            unsettled = holding.pending.dirty or holding in settling or holding in self._settling.dirty
            if unsettled or (runs and not over):
                continue
            (undrained if runs else drained).append(holding.partition)
            self._forget(holding)
        return drained, undrained

    def _wake_at(self, now: float, *, sure: bool) -> float | None:
        ready, lone, settling = self._dispatch.ready, self._lone, self._settling
        wake_at = math.inf
        if settling.dirty and settling.pending is None:
            wake_at = settling.at if settling.at > now else now
        if self._timed or self._refused or self._revoking or self.limits.batch_wait_s:
            wake_at = min(wake_at, self._next_time(now))
        if ready or lone.suspects or lone.entry is not None:
            if not sure:
                wake_at = min(wake_at, now + UNSURE_RETRY_S)  # a renewal sends no message
            if lone.quarantine.contested(lone):
                wake_at = min(wake_at, now + QUARANTINE_RETRY_S)
        return wake_at if wake_at < math.inf else None

    def _next_time(self, now: float) -> float:
        """The next time at which a deadline, a timer or a batch is due."""
        times = [at for holding in self._revoking if (at := holding.release_at) is not None and at > now]
        times += [holding.pending.retry_at for holding in self._refused]
        times += [holding.events.timers[0][0] for holding in self._timed if holding.events.timers]
        if wait_s := self.limits.batch_wait_s:
            since = [holding.events.fill_since for holding in self._dispatch.ready]
            fills = [start + wait_s for start in since if start is not None]
            times += [full for full in fills if full > now]  # otherwise the batch waits for a slot, not for a time
        return min(times, default=math.inf)
