"""One process of the group. It drives a control plane as the consumer does, but on the simulated clock."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onward.brokers.base import (
    AsideRecord,
    Assigned,
    Fenced,
    Message,
    Moved,
    Reached,
    Revoked,
    record_position,
)
from onward.engines.base import Work
from onward.event import Delivery, Partition
from onward.flow.actions import Actions, LoadPage
from onward.flow.entry import Again, Instant
from onward.flow.plane import ControlPlane
from onward.testing.simulator.group import SKEW_S, WALL
from onward.testing.simulator.handler import HandlerVerdict
from onward.testing.simulator.ledger import HandlerRun, Story
from onward.testing.simulator.settling import SettleClient

if TYPE_CHECKING:
    from onward.testing.simulator.world import World

DRAIN_S = 6.0
PATIENCE_S = 5.0


class SimulatedProcess:
    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.killed = False  # an event killed it
        self.frozen_until = 0.0
        self.handlers_frozen = False  # the handlers are frozen too
        self.cut_until = 0.0  # it cannot reach the broker before this time
        self.news = 0  # how often something happened to the plane
        self.epochs: dict[Partition, int] = {}  # of the partitions that the plane believes it owns
        self.revoked: dict[Partition, None] = {}
        self.read: dict[Partition, int] = {}  # the epoch under which all records of a partition were read
        self.removed: dict[tuple[Partition, int], None] = {}  # records that Moved messages reported as removed
        self.runs: dict[HandlerRun, None] = {}
        self._skew_s = world.rng.uniform(-SKEW_S, SKEW_S)  # how far its wall clock is off
        self._receiving = False
        self._ticking = False
        self._alarm = 0
        self._stop_at: float | None = None
        self.plane = ControlPlane(world.profile.limits)
        self.settling = SettleClient(self)
        self.session = world.broker.join(self)
        self._renew()

    # -- time ---------------------------------------------------------------------------------------------------

    @property
    def at(self) -> Instant:
        return Instant(self.world.now, self.world.now + WALL + self._skew_s)

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.world.after(delay_s, self._do, call, args)

    def _do(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.dead:
            return
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until, self._do, call, args)
        else:
            call(*args)

    def cut(self) -> float:
        """For how much longer it cannot reach the broker."""
        return max(0.0, self.cut_until - self.world.now)

    def _renew(self) -> None:
        """Renew the lease, as the thread of the broker in this process does."""
        world, session = self.world, self.session
        if self.dead:
            return
        if world.now < self.frozen_until or self.cut():
            world.at(max(world.now, session.lease_until + world.profile.grace_s), self._expire)
        else:
            world.broker.renew(session)
        world.after(world.profile.lease_s / 3, self._renew)

    def _expire(self) -> None:
        if self.world.now >= self.session.lease_until + self.world.profile.grace_s:
            self.world.broker.expire(self.session)

    # -- receiving ----------------------------------------------------------------------------------------------

    def ring(self) -> None:
        if not self._receiving and not self.dead:
            self._receiving = True
            self.later(self.world.latency(), self._receive)

    def _receive(self) -> None:
        if self.cut():
            self.later(self.cut(), self._receive)
            return
        limits = self.world.profile.limits
        messages = self.world.broker.receive(self.session, self.world.profile.receive_batch, limits.max_in_flight_bytes)
        if messages:
            self.later(self.world.latency(), self._arrive, messages)
        else:
            self._receiving = False

    def _arrive(self, messages: Sequence[Message]) -> None:
        batch: list[Delivery] = []
        for message in messages:
            if type(message) is Delivery:
                batch.append(message)
                continue
            self._deliver(batch)
            batch = []
            if self.world.tracing:
                self.world.trace(self.name, f"receives {message}")
            self._handle(message)
        self._deliver(batch)
        self.tick()
        self.later(self.world.latency(), self._receive)

    def _deliver(self, batch: list[Delivery]) -> None:
        if not batch:
            return
        self.news += 1
        if self.world.tracing:
            self.world.trace(
                self.name, "receives " + " ".join(f"{d.partition}@{d.position}({d.event.key})" for d in batch)
            )
        for delivery in batch:
            self.world.witness.delivered(self, delivery)
        self.plane.delivered(batch, self.at)

    def _handle(self, message: Message) -> None:
        plane = self.plane
        self.news += 1
        match message:
            case Assigned():
                self.forget(message.partition)
                plane.assigned(message)
                self.epochs[message.partition] = message.epoch
                if message.shared:
                    self.read[message.partition] = message.epoch  # a shared partition has no records to read
                self.world.witness.assigned(self, message)
                if self._stop_at is not None:
                    self._give_up([message.partition], 0.0)
            case Reached():
                plane.reached(message.partition, message.epoch, message.position, self.at)
            case Revoked():
                self._give_up(message.partitions, message.deadline_s)
                self.world.broker.revocation_received(self.session, message, self.epochs)
            case Fenced():
                plane.fenced(message.partitions)
                for partition in message.partitions:
                    self.forget(partition)
                self.session.loss_received()
            case Moved():
                plane.moved(message, self.at)
                self._note_moved(message)

    def _note_moved(self, message: Moved) -> None:
        current = self.epochs.get(message.partition) == message.epoch
        for id_ in message.ids:
            name = message.partition, record_position(id_)
            story = self.world.ledger.stories[name[0]][name[1]]
            story.wait = None
            if message.to is None and current and story.covered:  # else it is open in the log
                self.removed[name] = None
            else:
                self.removed.pop(name, None)

    def _give_up(self, partitions: Sequence[Partition], deadline_s: float) -> None:
        self.plane.revoked(partitions, self.at, deadline_s)
        self.revoked.update((partition, None) for partition in partitions if partition in self.epochs)

    def forget(self, partition: Partition) -> None:
        if self.epochs.pop(partition, None) is not None:
            self.revoked.pop(partition, None)
            self.removed = {name: None for name in self.removed if name[0] != partition}
            self.world.witness.ended(self, partition)

    # -- actions of the plane -----------------------------------------------------------------------------------

    def wake(self) -> None:
        self.news += 1
        if not self._ticking:
            self._ticking = True
            self.later(self.world.lag(), self._tick_now)

    def _tick_now(self) -> None:
        self._ticking = False
        self.tick()

    def _ring_alarm(self, alarm: int) -> None:
        if alarm == self._alarm:
            self.tick()

    def tick(self) -> None:
        world = self.world
        sure_until = self.session.sure_until()
        actions = self.plane.tick(self.at, sure_until)
        world.witness.ticked(self, actions)
        for work in actions.work:
            self._start(work, sure_until)
        for load in actions.load:
            self.later(world.latency(), self._fetch, load)
        if actions.settle is not None:
            self.settling.begin(actions.settle)
        self._gates(actions)
        self._release(actions)
        self._alarm += 1
        if actions.wake_at is not None:
            world.at(max(world.now, actions.wake_at), self._do, self._ring_alarm, (self._alarm,))
        if self._stop_at is not None:
            self._finish(self._stop_at)

    def _gates(self, actions: Actions) -> None:
        broker = self.world.broker
        for partition in actions.pause:
            broker.pause(self.session, partition, self.epochs[partition], paused=True)
            self.world.counts["pauses"] += 1
        for partition in actions.resume:
            self.world.witness.resumed(self, partition)
            broker.pause(self.session, partition, self.epochs[partition], paused=False)
            self.ring()

    def _release(self, actions: Actions) -> None:
        for partitions, drained in ((actions.drained, True), (actions.undrained, False)):
            for partition in partitions:
                epoch = self.epochs[partition]
                self.forget(partition)
                self.session.leaving = self.session.leaving or self._stop_at is not None
                if self.world.tracing:
                    self.world.trace(self.name, f"releases {partition} {'drained' if drained else 'undrained'}")
                self.world.counts["drained" if drained else "undrained"] += 1
                delay_s = self.cut() + self.world.latency()
                self.world.after(delay_s, self.world.broker.release, self.session, partition, epoch, drained)

    # -- the aside ----------------------------------------------------------------------------------------------

    def _fetch(self, load: LoadPage) -> None:
        world = self.world
        if self.cut() or world.trouble("load"):
            world.counts["loads failed"] += 1
            self.later(self.cut() + 0.5, self._fetch, load)
            return
        limits = world.profile.limits
        page = world.broker.load(load.partition, load.after, world.profile.page, limits.max_in_flight_bytes)
        late_s = world.rng.uniform(0.2, 3.0) if world.trouble("load late") else 0.0
        self.later(world.latency() + late_s, self._loaded, load, page)

    def _loaded(self, load: LoadPage, page: list[AsideRecord]) -> None:
        self.world.witness.loaded(self, page)
        if not page and self.epochs.get(load.partition) == load.epoch:
            self.read[load.partition] = load.epoch
        self.plane.loaded(load, page, self.at)
        self.wake()

    # -- running ------------------------------------------------------------------------------------------------

    def _start(self, work: Work, sure_until: float) -> None:
        world = self.world
        deliveries = (work,) if isinstance(work, Delivery) else work
        stories = [world.ledger.story(each.event) for each in deliveries]
        run = HandlerRun(self, deliveries, stories, world.now)
        if world.tracing:
            world.trace(self.name, f"starts {run} attempt {deliveries[0].attempt}")
        world.witness.started(run, sure_until)
        self.runs[run] = None
        world.after(world.handler.duration_s(run), self._end, run)

    def _end(self, run: HandlerRun) -> None:
        world = self.world
        if self.dead or run.over:
            return
        if self.handlers_frozen and world.now < self.frozen_until:
            world.at(self.frozen_until, self._end, run)
            return
        killer = world.handler.killer(run)
        if killer is not None and world.profile.kills == "process":
            killer.crashes += 1
            killer.lone_crashes += len(run.stories) == 1 and len(self.runs) == 1
            world.witness.killed(killer)
            world.counts["killed"] += 1
            self.crash(killer)
            return
        if killer is not None:
            killer.crashes += 1
            killer.lone_crashes += len(run.stories) == 1
        done, verdict = world.handler.ends(run)
        if verdict in (HandlerVerdict.FAILED, HandlerVerdict.WORKER_DIED):
            world.witness.failed(run.stories[0])
        self._over(run, done, verdict)

    def _over(self, run: HandlerRun, done: Sequence[Story], verdict: HandlerVerdict) -> None:
        self._drop(run, done)
        if self.world.tracing:
            self.world.trace(self.name, f"ends {run}: {verdict.value}, {len(done)} effects")
        self.later(self.world.lag(), self._report, run, verdict)

    def _drop(self, run: HandlerRun, done: Sequence[Story]) -> None:
        """End the run, with these effects."""
        run.over = True
        for story in done:
            self.world.witness.effect(run, story)
        self.world.witness.run_ended(run)
        del self.runs[run]

    def _report(self, run: HandlerRun, verdict: HandlerVerdict) -> None:
        at = self.at
        handler = self.world.handler
        self.world.counts[verdict.value] += 1
        if verdict is HandlerVerdict.DONE:
            self.world.witness.reported(run)
        outcomes = [(each, handler.outcome(each, verdict, at)) for each in run.deliveries]
        outcome = outcomes[0][1]
        run.stories[0].wait = (self.name, run.epoch, outcome.at) if isinstance(outcome, Again) else None
        self.plane.completed(outcomes, at)
        self.wake()

    # -- the end ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Receive no more events, drain, settle, release and leave."""
        if self._stop_at is None:
            self._stop_at = self.world.now + DRAIN_S
            self._give_up(self.plane.held, DRAIN_S)
            if self.world.rng.random() < 0.5:
                self.later(self.world.rng.uniform(0.0, 0.1), self._cancel)
            self.wake()

    def _cancel(self) -> None:
        """The engine cancels the runs that have not ended."""
        for run in list(self.runs):
            self._over(run, (), HandlerVerdict.RELEASED)

    def _finish(self, stop_at: float) -> None:
        patient = self.world.now <= stop_at + PATIENCE_S
        if (self.plane.held or self.settling.busy) and patient:
            if self._alarm and self.world.now + 1.0 > stop_at:
                self.later(1.0, self.wake)
            return
        self.world.counts["stopped"] += 1
        self._die()
        self.world.broker.close(self.session)

    def crash(self, killer: Story | None = None) -> None:
        """The process loses all its state. Events that were running may or may not have had their effect."""
        world = self.world
        world.trace(self.name, f"crashes{f', killed by {killer}' if killer else ''}")
        self.killed = killer is not None
        self._die()
        noticed = world.rng.random() < 0.5
        lease_s = self.session.lease_until + world.profile.grace_s - world.now
        world.after(0.0 if noticed else max(0.0, lease_s), world.broker.expire, self.session)
        world.ended(self)

    def _die(self) -> None:
        for run in list(self.runs):
            innocent = self._stop_at is None and all(story.fate in ("ok", "slow") for story in run.stories)
            self._drop(run, run.stories if innocent and self.world.rng.random() < 0.3 else ())
        self.dead = True
        for partition in list(self.epochs):
            self.forget(partition)
