"""A small loop around the plane: a clock moved by hand, a broker made of dictionaries, and checks of the promises.

Like the real loop it ticks only when something happened or when the plane asked for it. So a plane that forgets to ask
stalls here too. Every tick of every test is checked against the promises.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from onward.brokers.base import AsideRecord, Assigned, Failure, Moved, Progress, State, Tries, record_id
from onward.event import Delivery, Event, Partition
from onward.flow.actions import Actions, LoadPage, SettleCall
from onward.flow.entry import DONE, RELEASED, SPLIT, Again, Dead, Instant, Outcome
from onward.flow.lag import Lag
from onward.flow.limits import Limits
from onward.flow.plane import ControlPlane
from onward.flow.quarantine import Quarantine

P = Partition("orders", 0)
Q = Partition("orders", 1)
WALL = 1_700_000_000.0  # Unix time at the plane's zero: a time from the wrong clock is off by decades
LOG = "log-1"

FAR_S = 1_000.0  # later than any park_after_s in these tests

Run = tuple[Partition, int, int]  # partition, epoch, position


def failure(error: str = "ValueError", wall: float = 0.0) -> Failure:
    return Failure("exhausted", error, "no", "Traceback", "h", 1, wall, wall)


def event(key: str | None, size: int = 0, partition: Partition = P, position: int = 0) -> Event:
    return Event(f"{partition}:{position}", partition.topic, key, b"x" * size)


def record(
    position: int,
    key: str | None,
    state: State = State.HELD,
    *,
    due: float | None = None,
    size: int = 0,
    tries: Tries = Tries(),  # noqa: B008 - frozen
    partition: Partition = P,
) -> AsideRecord:
    """A record as stored. `due` is Unix time."""
    body = event(key, size, partition, position)
    return AsideRecord(
        record_id("g", LOG, partition, position), "g", partition, position, state, due, body, tries, None
    )


def stored(watermark: int = 0, *above: tuple[int, int], tries: dict[int, Tries] | None = None) -> Progress:
    """The progress that an earlier owner of P has settled."""
    return Progress(P, 0, watermark, above, (), tries or {})


def claims(progress: Progress | None, position: int) -> bool:
    """Whether this progress claims that the position is done."""
    if progress is None:
        return False
    return position < progress.watermark or any(a <= position < b for a, b in progress.done_above)


class Driver:
    def __init__(self, quarantine: Quarantine | None = None, /, **limits: Any) -> None:
        self.limits = Limits(group="g", **({"settle_interval_s": 0.0} | limits))
        self.plane = ControlPlane(self.limits, quarantine)
        self.now = 100.0
        self.wall = WALL  # Unix time at the plane's zero; setting the wall clock changes it
        self.sure_until = 1e9
        self.wake_at: float | None = None
        # What the broker stores.
        self.progress: dict[Partition, Progress] = {}
        self.records: dict[str, AsideRecord] = {}
        self.page = 1_000
        self.store_down = False
        # What is in flight.
        self.epochs = 0
        self.owned: dict[Partition, int] = {}
        self.revoked: set[Partition] = set()
        self.paused: set[Partition] = set()
        self.calls: list[set[Run]] = []
        self.runs: dict[Run, Delivery] = {}
        self.settlement: SettleCall | None = None
        self.loads: list[LoadPage] = []
        self.seen: dict[Partition, dict[int, bool]] = {}  # delivered in this ownership: is it done?
        self.read: dict[Partition, int] = {}
        self.inherited: dict[Partition, Progress | None] = {}
        self.fresh: dict[Partition, set[int]] = {}  # reported as newly done in an answered settle
        # What has happened, for tests to check.
        self.starts: list[Delivery] = []
        self.settlements: list[SettleCall] = []
        self.drained: list[Partition] = []
        self.undrained: list[Partition] = []
        self._next: dict[Partition, int] = {}

    @property
    def at(self) -> Instant:
        return Instant(self.now, self.now + self.wall)

    # -- what the broker reports --------------------------------------------------------------------------------

    def share(self, partition: Partition = P) -> int:
        """Hold a partition together with other members. Its positions start from 0 in every ownership."""
        self.epochs += 1
        self.progress.pop(partition, None)
        self._next[partition] = 0
        self._begin(partition, self.epochs, None)
        self.plane.assigned(Assigned(partition, self.epochs, None, LOG, None, False, shared=True))
        self.turn()
        return self.epochs

    def assign(
        self,
        partition: Partition = P,
        *,
        stored: Progress | None = None,
        unclean: bool = False,
        records: Iterable[AsideRecord] = (),
        load: bool = True,
    ) -> int:
        """Own a partition and load its records. It starts from `stored`; the default is the last settled progress."""
        self.epochs += 1
        self.records |= {each.id: each for each in records}
        stored = stored or self.progress.get(partition)
        self._begin(partition, self.epochs, stored)
        self.plane.assigned(Assigned(partition, self.epochs, self.epochs, LOG, stored, unclean))
        if load:
            self.turn()
        return self.epochs

    def _begin(self, partition: Partition, epoch: int, stored: Progress | None) -> None:
        self._lost(partition)
        self.owned[partition] = epoch
        self.inherited[partition] = stored
        self.seen[partition] = {}
        self.fresh[partition] = set()
        self.read[partition] = stored.watermark if stored else 0
        self._next.setdefault(partition, self.read[partition])

    def _lost(self, partition: Partition) -> None:
        self.owned.pop(partition, None)
        self.revoked.discard(partition)
        self.paused.discard(partition)

    def deliver(self, *keys: str | None, partition: Partition = P, size: int = 0, turn: bool = True) -> list[int]:
        """Deliver events of these keys at the next positions."""
        start = self._next.get(partition, 0)
        positions = list(range(start, start + len(keys)))
        self.deliver_at(dict(zip(positions, keys, strict=True)), partition=partition, size=size, turn=turn)
        return positions

    def deliver_at(
        self,
        keys: Mapping[int, str | None],
        *,
        partition: Partition = P,
        epoch: int | None = None,
        size: int = 0,
        tries: Tries | None = None,
        turn: bool = True,
    ) -> None:
        """Deliver events at these positions, with these keys."""
        current = self.owned.get(partition)
        epoch = epoch if epoch is not None else current or 0
        batch = [Delivery(event(key, size, partition, p), partition, p, epoch, tries=tries) for p, key in keys.items()]
        if epoch == current:
            for position in keys:
                if position >= self.read[partition]:
                    self.seen[partition][position] = False
                    self.read[partition] = position + 1
            self._next[partition] = max(self._next.get(partition, 0), *(p + 1 for p in keys))
        self.plane.delivered(batch, self.at)
        if turn:
            self.turn()

    def reach(self, position: int, partition: Partition = P) -> None:
        self.read[partition] = max(self.read[partition], position)
        self._next[partition] = max(self._next.get(partition, 0), position)
        self.plane.reached(partition, self.owned[partition], position, self.at)
        self.turn()

    def move(
        self,
        *positions: int,
        to: State | None,
        due: float | None = None,
        partition: Partition = P,
        turn: bool = True,
    ) -> None:
        """An operator moves records in the store, and the owner is notified."""
        ids = [record_id("g", LOG, partition, position) for position in positions]
        for id_ in ids:
            old = self.records.pop(id_)
            if to is None and old.position in self.seen[partition]:
                self.seen[partition][old.position] = True  # a removed event counts as done
            if to is not None:
                self.records[id_] = old.moved(to, due)
        self.plane.moved(Moved(partition, self.owned[partition], ids, to, due), self.at)
        if turn:
            self.turn()

    def revoke(self, *partitions: Partition, deadline_s: float = 10.0, turn: bool = True) -> None:
        self.revoked |= set(partitions) & set(self.owned)
        self.plane.revoked(partitions, self.at, deadline_s)
        if turn:
            self.turn()

    def fence(self, *partitions: Partition) -> None:
        for partition in partitions:
            self._lost(partition)
        self.plane.fenced(partitions)
        self.turn()

    # -- how runs end -------------------------------------------------------------------------------------------

    def done(self, *positions: int, partition: Partition = P) -> None:
        self.end(dict.fromkeys(positions, DONE), partition=partition)

    def again(self, *positions: int, in_s: float = 1.0, crashed: bool = False, partition: Partition = P) -> None:
        outcome = Again(self.now + in_s, failure("KeyError", self.at.wall), crashed)
        self.end(dict.fromkeys(positions, outcome), partition=partition)

    def dead(self, *positions: int, partition: Partition = P) -> None:
        self.end({p: Dead(failure()) for p in positions}, partition=partition)

    def cancel(self, *positions: int, partition: Partition = P) -> None:
        self.end(dict.fromkeys(positions, RELEASED), partition=partition)

    def split(self, *positions: int, partition: Partition = P) -> None:
        self.end(dict.fromkeys(positions, SPLIT), partition=partition)

    def end(
        self, outcomes: dict[int, Outcome], *, partition: Partition = P, epoch: int | None = None, turn: bool = True
    ) -> None:
        """End the oldest runs of these positions, or the runs of this epoch."""
        results = []
        for position, outcome in outcomes.items():
            run = min(r for r in self.runs if r[0] == partition and r[2] == position and r[1] == (epoch or r[1]))
            results.append((self._ended(run, outcome), outcome))
        self.plane.completed(results, self.at)
        if turn:
            self.turn()

    def _ended(self, run: Run, outcome: Outcome) -> Delivery:
        partition, epoch, position = run
        for call in self.calls:
            call.discard(run)
        self.calls = [call for call in self.calls if call]
        if outcome is DONE and self.owned.get(partition) == epoch and position in self.seen[partition]:
            self.seen[partition][position] = True
        return self.runs.pop(run)

    # -- the loop -----------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do what the plane asks for until nothing is left to do now. It ticks only after answers and at `wake_at`."""
        for _ in range(10_000):
            self.tick()
            if self.loads:
                self.answer_loads()
            elif self.settlement is not None and self.settlement.aside and self.store_down:
                self.refuse_settle()
            elif self.settlement is not None:
                self.answer_settle()
            elif self.wake_at is None or self.wake_at > self.now + 0.001:
                return
            else:
                self.now = max(self.now, self.wake_at)
        raise AssertionError("the plane never stops asking for something")

    def wait(self, seconds: float) -> None:
        """Let time pass. The plane is ticked when it asked for it."""
        until = self.now + seconds
        while self.wake_at is not None and self.wake_at <= until:
            self.now = max(self.now, self.wake_at)
            self.turn()
        self.now = until

    def tick(self) -> Actions:
        actions = self.plane.tick(self.at, self.sure_until)
        self.wake_at = actions.wake_at
        for work in actions.work:
            self._start(work if isinstance(work, tuple) else (work,))
        assert len(self.calls) <= self.limits.concurrency, "more calls than slots"
        assert self.plane.running == len(self.calls), "the plane miscounts its calls"
        assert not self.paused.intersection(actions.pause), "paused twice"
        assert self.paused.issuperset(actions.resume), "resumed, but was not paused"
        self.paused = (self.paused | set(actions.pause)) - set(actions.resume)
        self.loads += actions.load
        if actions.settle is not None:
            self._check_settle(actions.settle)
            assert self.settlement is None, "two settles in flight"
            self.settlement = actions.settle
            self.settlements.append(actions.settle)
        self._release(actions)
        return actions

    def _start(self, work: Sequence[Delivery]) -> None:
        """A call begins. Its lanes must be free, and its partition must be ours."""
        call: set[Run] = set()
        assert len({delivery.partition for delivery in work}) == 1
        assert all(a.position < b.position for a, b in pairwise(work)), "a batch out of order"
        assert len(work) <= self.limits.batch_size
        busy = {self._lane(delivery) for delivery in self.runs.values()} - {None}
        for delivery in work:
            partition, epoch, _ = run = (delivery.partition, delivery.epoch, delivery.position)
            assert self.now < self.sure_until, "started while ownership was uncertain"
            assert self.owned.get(partition) == epoch, f"started {run} of an ownership that has ended"
            assert partition not in self.revoked, f"started {run} of a revoked partition"
            assert self._lane(delivery) not in busy, f"started {run} while its lane was busy"
            call.add(run)
            self.runs[run] = delivery
            self.starts.append(delivery)
        self.calls.append(call)

    def _lane(self, delivery: Delivery) -> object:
        if self.limits.ordering == "partition":
            return delivery.partition
        key = delivery.event.key
        return (delivery.partition, key) if self.limits.ordering == "key" and key is not None else None

    def _check_settle(self, settlement: SettleCall) -> None:
        letters = {(each.partition, each.position) for each in settlement.aside}
        for progress in settlement.progress:
            partition, before = progress.partition, self.progress.get(progress.partition)
            assert self.owned.get(partition) == progress.epoch, "settles a partition that is not ours"
            if not claims(self.inherited[partition], progress.watermark - 1):
                assert progress.watermark <= self.read[partition], "claims positions that were not read"
            if before is not None and before.epoch == progress.epoch:
                assert progress.watermark >= before.watermark, "the watermark went back"
            bounds = [progress.watermark, *(bound for span in progress.done_above for bound in span)]
            assert all(a <= b for a, b in pairwise(bounds)), f"not ascending: {bounds}"
            stored = {each.position for each in self.records.values() if each.partition == partition}
            for position, is_done in self.seen[partition].items():
                known = claims(self.inherited[partition], position) or position in stored
                if not (is_done or known or (partition, position) in letters):
                    assert not claims(progress, position), f"claims {partition}:{position}, which is open"

    def _release(self, actions: Actions) -> None:
        running = {partition for partition, _, _ in self.runs}  # may include a run of an earlier ownership
        assert not running.intersection(actions.drained), "released as drained while a run goes on"
        assert running.issuperset(actions.undrained)
        self.drained += actions.drained
        self.undrained += actions.undrained
        for partition in (*actions.drained, *actions.undrained):
            assert self.all_settled(partition), "released before everything done was settled"
            self._lost(partition)

    def all_settled(self, partition: Partition) -> bool:
        """Whether everything done in this ownership is settled: claimed by the progress, and reported as fresh."""
        progress, before = self.progress.get(partition), self.inherited[partition]
        done = [p for p, is_done in self.seen[partition].items() if is_done and not claims(before, p)]
        return all(claims(progress, position) and position in self.fresh[partition] for position in done)

    # -- answers ------------------------------------------------------------------------------------------------

    def answer_settle(self, lost: Iterable[Partition] = ()) -> None:
        """The broker stored the settle, except for partitions that are no longer ours."""
        self.plane.settled(self._store(self.take_settlement(), lost), self.at)

    def refuse_settle(self, *partitions: Partition, lost: Iterable[Partition] = ()) -> None:
        """The store refused the records of these partitions (of all, if none is named), and settled the others."""
        settlement = self.take_settlement()
        assert settlement.aside
        refused = partitions or tuple(each.partition for each in settlement.progress)
        kept = SettleCall(
            [each for each in settlement.progress if each.partition not in refused],
            [each for each in settlement.aside if each.partition not in refused],
            [id_ for id_ in settlement.gone if all(f":{each.index}:" not in id_ for each in refused)],
        )
        self.plane.aside_refused(refused, self._store(kept, lost), self.at)

    def _store(self, settlement: SettleCall, lost: Iterable[Partition]) -> list[Partition]:
        """Store a settle. Returns the partitions that are no longer ours."""
        by_partition = {each.partition: each for each in settlement.progress}
        late = {each.partition for each in by_partition.values() if self.owned.get(each.partition) != each.epoch}
        lost = late.union(lost)
        kept = [each for partition, each in by_partition.items() if partition not in lost]
        self.records |= {each.id: each for each in settlement.aside if each.partition not in lost}
        for each in kept:
            assert not self.fresh[each.partition].intersection(each.fresh), "reported as fresh twice"
            self.fresh[each.partition].update(each.fresh)
        self.progress |= {each.partition: each for each in kept}
        for id_ in settlement.gone:
            if id_ in self.records and self.records[id_].partition not in lost:
                del self.records[id_]
        for partition in lost - late:
            self._lost(partition)
        return sorted(lost)

    def take_settlement(self) -> SettleCall:
        settlement, self.settlement = self.settlement, None
        assert settlement is not None
        return settlement

    def answer_loads(self) -> None:
        loads, self.loads = self.loads, []
        for load in loads:
            self.plane.loaded(load, self.read_page(load), self.at)

    def read_page(self, load: LoadPage) -> list[AsideRecord]:
        after = -1 if load.after is None else load.after
        dead = self.limits.on_dead == "hold"
        found = [
            each
            for each in self.records.values()
            if each.partition == load.partition and each.position > after and (dead or each.state is not State.DEAD)
        ]
        return sorted(found, key=lambda each: each.position)[: self.page]

    # -- what tests check ---------------------------------------------------------------------------------------

    def running(self, partition: Partition = P) -> list[int]:
        return sorted(position for owner, _, position in self.runs if owner == partition)

    def new_starts(self) -> list[int]:
        """Positions started since the last call of this, in order."""
        starts, self.starts = [delivery.position for delivery in self.starts], []
        return starts

    def states(self, partition: Partition = P) -> dict[int, State]:
        """The records in the store, by position."""
        found = [each for each in self.records.values() if each.partition == partition]
        return {each.position: each.state for each in sorted(found, key=lambda each: each.position)}

    def letter(self, position: int, partition: Partition = P) -> AsideRecord:
        """The stored record of a position."""
        return self.records[record_id("g", LOG, partition, position)]

    def lag(self, partition: Partition = P) -> Lag:
        return self.plane.lag(self.now)[partition]

    def run_out(self, outcome: Callable[[Delivery], Outcome] = lambda _: DONE) -> list[int]:
        """End one run after the other until nothing runs. Returns the positions in the order in which they ended."""
        ended = []
        while self.runs:
            run = min(self.runs, key=lambda each: (each[2], each[1]))
            ended.append(run[2])
            self.end({run[2]: outcome(self.runs[run])}, partition=run[0], epoch=run[1])
        return ended


def working(**limits: object) -> Driver:
    """A driver that owns P and has read its records."""
    driver = Driver(**limits)
    driver.assign()
    return driver
