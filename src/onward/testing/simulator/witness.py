"""The witness of a run: the simulation reports every fact to it; it records the fact and calls the checkers."""

from typing import TYPE_CHECKING

from onward.brokers.base import AsideRecord, Assigned, Progress, State
from onward.event import Delivery, Event, Partition
from onward.testing.simulator.checkers import (
    BoundsChecker,
    EpochChecker,
    LaneChecker,
    OrderChecker,
    RecordChecker,
    RepeatChecker,
    SettledChecker,
)
from onward.testing.simulator.ledger import HandlerRun, Story

if TYPE_CHECKING:
    from onward.flow.actions import Actions, SettleCall
    from onward.testing.simulator.broker import OwnedPartition
    from onward.testing.simulator.process import SimulatedProcess
    from onward.testing.simulator.world import World


class Witness:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.order = OrderChecker()
        self.repeats = RepeatChecker()
        self.lanes = LaneChecker()
        self.settled = SettledChecker(world.ledger)
        self.epochs = EpochChecker()
        self.bounds = BoundsChecker(world.profile)
        self.records = RecordChecker(world.ledger, world.profile)

    # -- in a process -------------------------------------------------------------------------------------------

    def assigned(self, process: "SimulatedProcess", message: Assigned) -> None:
        self.bounds.assigned(process, message.partition, self._parked(message.partition))

    def ended(self, process: "SimulatedProcess", partition: Partition) -> None:
        self.bounds.ended(process, partition)

    def delivered(self, process: "SimulatedProcess", delivery: Delivery) -> None:
        self._world.counts["delivered"] += 1
        if process.epochs.get(delivery.partition) == delivery.epoch:
            self.bounds.delivered(process, delivery, self._world.ledger.story(delivery.event))
            if not self._world.profile.shared:  # in a shared partition only the broker knows how many retries wait
                self.bounds.parked(process, delivery.partition, self._parked(delivery.partition))

    def loaded(self, process: "SimulatedProcess", page: list[AsideRecord]) -> None:
        self._world.counts["records loaded"] += len(page)
        for record in page:  # a record replaces its event in memory
            self.bounds.done(process, record.partition, record.position)

    def started(self, run: HandlerRun, sure_until: float) -> None:
        self._world.counts["started"] += 1
        self.epochs.started(run, self._world.now, sure_until)
        if not self._truncated:
            self.epochs.removed(run)
            self.records.started(run)
        self.epochs.early(run, run.process.at.wall)
        self.order.started(run)
        self.lanes.started(run)

    def effect(self, run: HandlerRun, story: Story) -> None:
        self.order.effect(run, story)
        unclean = story.unclean if self._world.profile.shared else self._world.counts["taken over unclean"]
        self.repeats.effect(story, excused=unclean + self._truncated)
        self._world.counts["repeats" if story.effects else "effects"] += 1
        self._world.counts["stale effects"] += run.stale
        story.effects += 1

    def failed(self, story: Story) -> None:
        if not self._truncated:
            self.records.failed(story)

    @property
    def _truncated(self) -> int:
        """How often the broker could not store all progress. Those events run again, also dead and removed ones."""
        return self._world.counts["truncated"]

    def run_ended(self, run: HandlerRun) -> None:
        self.lanes.ended(run)

    def reported(self, run: HandlerRun) -> None:
        """A call has succeeded, and its process reports that to the plane now."""
        if run.process.epochs.get(run.partition) == run.epoch:
            for delivery, story in zip(run.deliveries, run.stories, strict=True):
                self.bounds.done(run.process, delivery.partition, delivery.position)
                story.handled = not run.stale

    def killed(self, story: Story) -> None:
        if not self._truncated:
            self.records.crashed(story)

    def ticked(self, process: "SimulatedProcess", actions: "Actions") -> None:
        self.bounds.ticked(process, actions, self._world.now)

    def resumed(self, process: "SimulatedProcess", partition: Partition) -> None:
        self._world.counts["resumes"] += 1
        self.bounds.resumed(process, partition)

    def settling(self, process: "SimulatedProcess", settlement: "SettleCall") -> None:
        self.epochs.settling(process, settlement)
        self.bounds.lag(process, self._world.now)

    def answered(self, process: "SimulatedProcess", settlement: "SettleCall") -> None:
        epochs = {each.partition: each.epoch for each in settlement.progress}
        for record in settlement.aside:
            if process.epochs.get(record.partition) == epochs[record.partition]:
                self.bounds.done(process, record.partition, record.position)

    def refused(self) -> None:
        self.records.refusals += 1

    # -- at the broker ------------------------------------------------------------------------------------------

    def owned(self, claim: "OwnedPartition") -> None:
        self._world.counts["taken over unclean" if claim.unclean else "assigned"] += 1
        self.records.assigned(claim.partition, unclean=claim.unclean, killed=claim.killed)
        if not claim.unclean:
            for story in self._world.ledger.uncovered[claim.partition]:
                story.orphaned = story.orphaned or story.is_dead

    def progress(self, progress: Progress, log_end: int) -> None:
        self._world.counts["settled"] += 1
        self.settled.progress(progress, log_end)

    def written(self, record: AsideRecord) -> None:
        story = self._world.ledger.story(record.event)
        self.records.written(story, record, self._stored(record.partition))
        self._world.counts[f"{record.state} records"] += 1
        tried = story.record is None or record.tries.failed > story.record.tries.failed
        if record.state is State.WAITING and record.due is not None and tried:
            story.due = record.due
        story.handled = False
        if story.record is None:
            story.record_effects = story.effects
        story.record = record
        story.ever_dead = story.ever_dead or record.state is State.DEAD

    def gone(self, record: AsideRecord) -> None:
        story = self._world.ledger.story(record.event)
        self._world.counts["records removed"] += 1
        self.records.gone(story, self._stored(record.partition))
        story.record = None

    # -- in a shared partition ----------------------------------------------------------------------------------

    def acknowledged(self, event: Event) -> None:
        self._world.counts["settled"] += 1
        self.settled.acknowledged(self._world.ledger.story(event))

    def retried(self, record: AsideRecord) -> None:
        """The broker is about to deliver a waiting record."""
        story = self._world.ledger.story(record.event)
        story.record = None
        story.covered = False
        story.copies += 1

    def requeued(self, event: Event, *, unclean: bool) -> None:
        """The member that had this event lost its share without settling the event."""
        story = self._world.ledger.story(event)
        self._world.counts["shared requeued"] += 1
        story.orphaned = story.orphaned or story.is_dead
        story.unclean = story.unclean or unclean

    def left(self, partition: Partition, *, unclean: bool) -> None:
        """A member has lost its share."""
        self.records.assigned(partition, unclean=unclean, killed=False)

    def _parked(self, partition: Partition) -> int:
        return sum(each.state is not State.DEAD for each in self._world.broker.records(partition))

    def _stored(self, partition: Partition) -> Progress | None:
        return self._world.broker.stored(partition)

    def moved(self, record: AsideRecord, moved: AsideRecord | None) -> None:
        """An operator moved or removed a record."""
        story = self._world.ledger.story(record.event)
        self._world.trace("operator", f"moves {story} from {record.state} to {moved.state if moved else 'removed'}")
        story.touched = True
        story.handled = False
        story.wait = None
        story.removed = story.removed or moved is None
        story.record = moved
        story.record_effects = story.effects
        if moved is None:
            self.bounds.removed(record.partition, record.position)
        elif moved.state is State.DEAD:
            story.ever_dead = True
        elif record.state is State.DEAD:
            story.fresh_failures = 0
