"""The complete plane in random histories, against a naive model of what may run and what may be claimed.

The driver checks every tick (one event per lane, no stale work, slots, claims). The machine adds the history:
partitions are assigned and lost, the store refuses, pages are late, events fail, other members work meanwhile. At the
end all faults stop, and then every event must be done: nothing is lost, stuck or left in memory.
"""

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.flow.driver import LOG, WALL, Driver, P, Q, Run, claims, event, failure

from onward.brokers.base import AsideRecord, Progress, State, record_id
from onward.event import Delivery, Partition
from onward.flow.actions import LoadPage
from onward.flow.entry import DONE, RELEASED, SPLIT, Again, Dead, Outcome

pytestmark = pytest.mark.slow

PARTITIONS = st.sampled_from([P, Q])
KEYS = st.sampled_from(["a", "a", "b", "c", "", None])
SECONDS = st.sampled_from([0.0, 0.5, 2.0, 20.0, 200.0])


class World(Driver):
    """The driver, and the state of each event over all ownerships."""

    def __init__(self, **limits: object) -> None:
        super().__init__(**limits)
        self.log: dict[Partition, dict[int, str | None]] = {P: {}, Q: {}}  # keys by position
        self.ends = {P: 0, Q: 0}
        self.done_now: dict[Partition, set[int]] = {P: set(), Q: set()}  # that the current ownership must know of
        self.replayed: set[tuple[Partition, int]] = set()
        self.pages: deque[tuple[LoadPage, list[AsideRecord]]] = deque()  # read, and not yet passed to the plane
        self.closed: set[Partition] = set()  # partitions whose records are not all loaded yet

    def own(self, partition: Partition, *, unclean: bool) -> None:
        progress = self.progress.get(partition)
        recorded = {each.position for each in self.records.values() if each.partition == partition}
        self.done_now[partition] = {p for p in self.log[partition] if claims(progress, p) and p not in recorded}
        self.closed.add(partition)
        self.assign(partition, unclean=unclean, load=False)

    def publish(self, partition: Partition, key: str | None, gap: int) -> None:
        self.log[partition][self.ends[partition] + gap] = key
        self.ends[partition] += gap + 1

    def _start(self, work: Sequence[Delivery]) -> None:
        for delivery in work:
            assert delivery.partition not in self.closed, "started before the records were loaded"
        super()._start(work)
        for delivery in work:
            self._in_turn(delivery, {each.position for each in work})

    def _in_turn(self, delivery: Delivery, beside: set[int]) -> None:
        """Check that the event was not done, and that all earlier events of its lane are finished."""
        partition, position = delivery.partition, delivery.position
        assert position not in self.done_now[partition], f"{partition}:{position} runs again although it is done"
        assert delivery.event.key == self.log[partition][position]
        lane = self._lane(delivery)
        if lane is None:
            return
        for before, key in self.log[partition].items():
            same = self.limits.ordering == "partition" or key == delivery.event.key
            if before < position and same and before not in beside:
                assert self.over(partition, before), f"{partition}:{position} runs before {before}"

    def over(self, partition: Partition, position: int) -> bool:
        if position in self.done_now[partition] or (partition, position) in self.replayed:
            return True
        letter = self.records.get(record_id("g", LOG, partition, position))
        dead = letter is not None and letter.state is State.DEAD
        return dead and self.limits.on_dead == "pass"

    def _ended(self, run: Run, outcome: Outcome) -> Delivery:
        partition, epoch, position = run
        if outcome is DONE and self.owned.get(partition) == epoch:
            self.done_now[partition].add(position)
            letter = self.records.get(record_id("g", LOG, partition, position))
            if letter is not None and letter.state is State.DEAD:
                del self.records[letter.id]  # stored without its progress, so the event ran again: the letter is wrong
        return super()._ended(run, outcome)

    def undelivered(self, partition: Partition) -> list[int]:
        return [position for position in self.log[partition] if position >= self.read[partition]]

    def hand_over(self, partition: Partition, positions: list[int]) -> None:
        if not positions:
            return
        self.deliver_at({p: self.log[partition][p] for p in positions}, partition=partition, size=1, turn=False)

    def read_pages(self) -> None:
        self.pages.extend((load, self.read_page(load)) for load in self.loads)
        self.loads = []

    def hand_page(self) -> None:
        load, page = self.pages.popleft()
        if not page and self.owned.get(load.partition) == load.epoch:
            self.closed.discard(load.partition)
        self.plane.loaded(load, page, self.at)


class PlaneMachine(RuleBasedStateMachine):
    @initialize(
        ordering=st.sampled_from(["key", "key", "partition", "none"]),
        on_dead=st.sampled_from(["pass", "hold"]),
        concurrency=st.integers(1, 4),
        batch=st.sampled_from([(1, 0.0), (1, 0.0), (3, 0.0), (3, 1.0)]),
        room=st.sampled_from([(4, 1 << 20), (9, 1 << 20), (9, 6), (9, 2)]),
        parking=st.sampled_from([(2, 10.0, 100), (0, 10.0, 100), (9, 1.0, 2)]),
        page=st.sampled_from([1, 3, 1_000]),
        settle_interval_s=st.sampled_from([0.0, 1.0]),
        swift=st.sampled_from(["loads", "loads and settles", "first loads", "first loads", "nothing"]),
    )
    def start(
        self,
        ordering: str,
        on_dead: str,
        concurrency: int,
        batch: tuple[int, float],
        room: tuple[int, int],
        parking: tuple[int, float, int],
        page: int,
        settle_interval_s: float,
        swift: str,
    ) -> None:
        self.world = World(
            ordering=ordering,
            on_dead=on_dead if ordering == "key" else "pass",
            concurrency=concurrency,
            batch_size=batch[0],
            batch_wait_s=batch[1],
            max_in_flight=room[0],
            max_in_flight_bytes=room[1],
            max_delayed=parking[0],
            park_after_s=parking[1],
            max_parked=parking[2],
            settle_interval_s=settle_interval_s,
            crash_limit=2,
        )
        self.world.page = page
        self.swift = swift  # what the broker answers at once
        self.unclean = {P: False, Q: False}
        for partition in (P, Q):
            self.assigned(partition)
            self.published_and_delivered(partition, ["a", "b", "a", None, "a", "c", "a", "b"], 0)

    def owned(self, partition: Partition) -> bool:
        return partition in self.world.owned

    # -- ownership ----------------------------------------------------------------------------------------------

    @rule(
        partition=PARTITIONS,
        what=st.sampled_from(["assigned", "revoked", "fenced", "reconnected", "unsure", "elsewhere"]),
        deadline_s=SECONDS,
    )
    def ownership_changes(self, partition: Partition, what: str, deadline_s: float) -> None:
        world = self.world
        if what == "revoked":
            world.revoke(partition, deadline_s=deadline_s / 10, turn=False)
        if what in ("fenced", "reconnected") and self.owned(partition):
            world._lost(partition)
            world.plane.fenced([partition])
        if what == "unsure":
            world.sure_until = world.now
        self.tick()
        world.sure_until = 1e9
        if what in ("assigned", "reconnected") and not self.owned(partition):
            self.assigned(partition)
        if what == "elsewhere" and not self.owned(partition):
            self.others_work(partition)
            self.assigned(partition)

    def assigned(self, partition: Partition) -> None:
        self.world.own(partition, unclean=self.unclean[partition])
        self.unclean[partition] = True  # unless it is drained
        self.tick()

    def others_work(self, partition: Partition) -> None:
        """Another member owned the partition meanwhile, and completed the oldest open events without records."""
        world = self.world
        progress = world.progress.get(partition)
        records = {each.position: each for each in world.records.values() if each.partition == partition}
        parked = {each.event.key for each in records.values()}
        done = {p for p in world.log[partition] if claims(progress, p) or p in records}
        free = [p for p, key in world.log[partition].items() if p not in done and key not in parked]
        done |= set(free[:3])
        mark = next((p for p in world.log[partition] if p not in done), world.ends[partition])
        above = [(p, p + 1) for p in sorted(done) if p > mark]
        world.progress[partition] = Progress(partition, 0, mark, above, (), progress.tries if progress else {})

    # -- intake -------------------------------------------------------------------------------------------------

    @rule(partition=PARTITIONS, keys=st.lists(KEYS, min_size=1, max_size=6), gap=st.integers(0, 2))
    def published_and_delivered(self, partition: Partition, keys: list[str | None], gap: int) -> None:
        for key in keys:
            self.world.publish(partition, key, gap)
        self.delivered(partition, len(keys))

    @rule(partition=PARTITIONS, count=st.integers(1, 6))
    def delivered(self, partition: Partition, count: int) -> None:
        world = self.world
        if self.owned(partition) and partition not in world.revoked:
            world.hand_over(partition, world.undelivered(partition)[:count])
            self.tick()

    @rule(partition=PARTITIONS, what=st.sampled_from(["twice", "late", "reached"]))
    def delivered_oddly(self, partition: Partition, what: str) -> None:
        """Deliver again in this ownership, deliver from an earlier one, or report only how far the log was read."""
        world = self.world
        if what == "late":
            stale = Delivery(event("a", 1, partition, 0), partition, 0, 0)
            world.plane.delivered([stale], world.at)
        elif self.owned(partition) and what == "twice":
            world.hand_over(partition, sorted(world.seen[partition])[-2:])
        elif self.owned(partition):
            to = next(iter(world.undelivered(partition)), world.ends[partition])
            world.read[partition] = max(world.read[partition], to)
            world.plane.reached(partition, world.owned[partition], to, world.at)
        self.tick()

    # -- runs ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.calls)
    @rule(
        number=st.integers(0, 3),
        how=st.sampled_from(["done", "again", "dead", "dead", "cancel", "crash"]),
        in_s=SECONDS,
    )
    def ended(self, number: int, how: str, in_s: float) -> None:
        """A call ends. A failed batch is split; a single event gets its outcome."""
        world = self.world
        runs = sorted(world.calls[number % len(world.calls)])
        outcomes: dict[str, Outcome] = {
            "done": DONE,
            "again": Again(world.now + in_s, failure()),
            "dead": Dead(failure()),
            "cancel": RELEASED,
            "crash": Again(world.now + in_s, failure(), crashed=True),
        }
        outcome = outcomes[how]
        if len(runs) > 1 and outcome not in (DONE, RELEASED):
            outcome = SPLIT
        world.end({run[2]: outcome for run in runs}, partition=runs[0][0], epoch=runs[0][1], turn=False)
        self.tick()

    @rule(
        count=st.integers(1, 20),
        every=st.integers(1, 5),
        how=st.sampled_from(["done", "again", "dead"]),
        in_s=SECONDS,
    )
    def life_goes_on(self, count: int, every: int, how: str, in_s: float) -> None:
        """The broker answers, time passes, calls end; one in `every` calls ends badly."""
        for number in range(count):
            if not self.step(how if number % every == 0 else "done", in_s):
                return

    def step(self, how: str, in_s: float) -> bool:
        """Answer a request, or end a call, or let time pass. False: there is nothing to do."""
        world = self.world
        if world.loads or world.pages:
            world.read_pages()
            world.hand_page()
        elif world.settlement is not None and world.settlement.aside and world.store_down:
            world.refuse_settle()
        elif world.settlement is not None:
            world.answer_settle()
        elif world.calls:
            self.ended(0, how, in_s)
            return True
        elif world.wake_at is not None:
            world.now = max(world.now, world.wake_at)
        else:
            return False
        self.tick()
        return True

    # -- answers ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.settlement)
    @rule(how=st.sampled_from(["stored", "stored", "refused", "lost", "half"]))
    def settled(self, how: str) -> None:
        """Half: the records were stored, then ownership was lost. The contract fixes only the order of the writes."""
        world = self.world
        assert world.settlement is not None
        if how == "refused" and world.settlement.aside:
            world.refuse_settle()
        elif how == "half":
            ours = [each for each in world.settlement.progress if world.owned.get(each.partition) == each.epoch]
            partitions = [each.partition for each in ours]
            world.records |= {each.id: each for each in world.settlement.aside if each.partition in partitions}
            world.answer_settle(partitions)
        else:
            world.answer_settle([world.settlement.progress[0].partition] if how == "lost" else ())
        self.tick()

    @rule(down=st.booleans())
    def the_store_goes_down_or_up(self, down: bool) -> None:
        self.world.store_down = down

    @precondition(lambda self: self.world.loads or self.world.pages)
    @rule(at_once=st.booleans())
    def a_page_is_read_or_handed_over(self, at_once: bool) -> None:
        """The page may be outdated when it is passed to the plane."""
        if at_once or not self.world.pages:
            self.world.read_pages()
        if at_once or not self.world.loads:
            self.world.hand_page()
            self.tick()

    @precondition(lambda self: self.letters())
    @rule(data=st.data(), to=st.sampled_from([State.WAITING, State.WAITING, None]))
    def a_letter_is_moved(self, data: st.DataObject, to: State | None) -> None:
        """An operator replays or drops a dead letter."""
        letter = data.draw(st.sampled_from(self.letters()))
        self.move(letter, to)
        self.tick()

    def letters(self) -> list[AsideRecord]:
        dead = [each for each in self.world.records.values() if each.state is State.DEAD]
        return sorted((each for each in dead if self.owned(each.partition)), key=lambda each: each.id)

    def move(self, letter: AsideRecord, to: State | None) -> None:
        world, partition, position = self.world, letter.partition, letter.position
        world.replayed.add((partition, position))
        if to is None:
            world.done_now[partition].add(position)
        world.move(position, to=to, due=world.now + WALL if to else None, partition=partition, turn=False)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        world = self.world
        until = world.now + seconds
        if world.wake_at is not None and world.wake_at <= until:
            world.now = max(world.now, world.wake_at)
            self.tick()
        else:
            world.now = until

    def tick(self) -> None:
        world, before = self.world, len(self.world.drained)
        world.tick()
        while self.answers_at_once():
            world.read_pages()
            world.hand_page()
            world.tick()
        while "settles" in self.swift and world.settlement is not None:
            world.answer_settle()
            world.tick()
        for partition in world.drained[before:]:
            self.unclean[partition] = False

    def answers_at_once(self) -> bool:
        loads = self.world.loads
        first = any(load.partition in self.world.closed for load in loads)
        return bool(loads) and (self.swift.startswith("loads") or (self.swift == "first loads" and first))

    # -- what holds at any time ---------------------------------------------------------------------------------

    @invariant()
    def the_plane_holds_what_the_broker_gave(self) -> None:
        world = self.world
        assert set(world.plane.held) == set(world.owned)

    @invariant()
    def numbers_are_never_negative(self) -> None:
        for lag in self.world.plane.lag(self.world.now).values():
            assert min(lag.queued, lag.running, lag.delayed, lag.parked, lag.gap) >= 0
            assert lag.blocking is None or lag.blocking.for_s >= 0

    # -- the end ------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.store_down = False
        self.tick()
        self.finish()
        for letter in self.letters():
            self.move(letter, State.WAITING)
        self.tick()
        self.finish()
        self.check_the_end()

    def finish(self) -> None:
        """Run without faults until nothing is left to do. Time passes only as the plane asks for it."""
        world = self.world
        for _ in range(1_000):
            if self.step("done", 0.0):
                continue
            if away := [each for each in (P, Q) if not self.owned(each)]:
                self.assigned(away[0])
            elif late := [each for each in (P, Q) if world.undelivered(each) and each not in world.revoked]:
                self.delivered(late[0], 3)
            else:
                return
        raise AssertionError("the plane never stops asking for something")

    def check_the_end(self) -> None:
        world, plane = self.world, self.world.plane
        for partition in (P, Q):
            missing = set(world.log[partition]) - world.done_now[partition]
            assert not missing, f"{partition}: {sorted(missing)} were never done"
            assert world.all_settled(partition)
            if world.log[partition]:
                assert all(claims(world.progress[partition], p) for p in world.log[partition])
            lag = plane.lag(world.now)[partition]
            assert (lag.queued, lag.running, lag.delayed, lag.parked, lag.blocking) == (0, 0, 0, 0, None)
        assert world.records == {}
        assert world.paused == set()
        assert (plane.open, plane.running) == (0, 0)
        for holding in plane._holdings.values():  # no public figure shows these, but a leak would fill them
            events, aside, pending = holding.events, holding.aside, holding.pending
            assert (events.bytes, len(events.lanes), len(aside.parking), holding.stale) == (0, 0, 0, {})
            assert (pending.leaving, pending.gone, pending.doubled) == ({}, [], set())
            assert (holding.blame.marking, aside.loading.wanted) == ({}, set())
        plane.fenced([P, Q])
        assert (plane.held, plane.open, plane.lag(world.now)) == ([], 0, {})
        assert not plane._holdings, "the plane remembers an ended ownership"


def test_the_plane_keeps_its_promises_in_any_history() -> None:
    run_state_machine_as_test(
        PlaneMachine,
        settings=settings(
            max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, report_multiple_bugs=False
        ),
    )
