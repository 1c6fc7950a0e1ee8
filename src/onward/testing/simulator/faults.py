"""The faults of a run and the actions of operators. The seed decides what happens and when, during the active time."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from onward.brokers.base import AsideRecord, State
from onward.event import Partition
from onward.testing.simulator.group import WALL
from onward.testing.simulator.process import SimulatedProcess

if TYPE_CHECKING:
    from onward.testing.simulator.world import World


class Faults:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._rng = world.rng
        self._kinds: tuple[Callable[[], None], ...] = (
            self.crash,
            self.freeze,
            self.freeze,
            self.cut,
            self.stop,
            self.rebalance,
            self.fence,
            self.reconnect,
            self.settle_trouble,
            self.settle_trouble,
            self.load_trouble,
            self.slow_down,
            *world.broker.faults(),
        )
        self._operations = (self.replay, self.hurry, self.give_up, self.remove)

    def schedule(self) -> None:
        """Plan faults and actions of operators; all happen within the active time."""
        world = self._world
        for _ in range(world.profile.faults):
            world.after(self._rng.uniform(0.0, world.profile.active_s), self._rng.choice(self._kinds))
        for _ in range(world.profile.operations):
            world.after(self._rng.uniform(0.0, world.profile.active_s), self._rng.choice(self._operations))

    # -- faults of a process ------------------------------------------------------------------------------------

    def _process(self) -> SimulatedProcess | None:
        alive = [process for process in self._world.processes if not process.dead]
        return self._rng.choice(alive) if alive else None

    def crash(self) -> None:
        if process := self._process():
            self._world.note(process.name, "crash")
            process.crash()

    def freeze(self) -> None:
        """Freeze the whole process, or only its event loop while its handlers go on."""
        if process := self._process():
            process.frozen_until = self._world.now + self._rng.uniform(0.2, 10.0)
            process.handlers_frozen = self._rng.random() < 0.5
            self._world.note(process.name, "freeze")

    def cut(self) -> None:
        """Cut the process off from the broker."""
        if process := self._process():
            process.cut_until = self._world.now + self._rng.uniform(0.2, 8.0)
            self._world.note(process.name, "cut")

    def stop(self) -> None:
        if process := self._process():
            self._world.note(process.name, "stop")
            process.stop()
            self._world.after(self._rng.uniform(0.0, 8.0), self._world.start)

    # -- faults of the broker -----------------------------------------------------------------------------------

    def _partition(self) -> Partition:
        return self._rng.choice(self._world.broker.partitions)

    def rebalance(self) -> None:
        self._world.note("broker", "rebalance")
        self._world.broker.rebalance()

    def fence(self) -> None:
        self._world.note("broker", "fence")
        self._world.broker.fence(self._partition())

    def reconnect(self) -> None:
        self._world.note("broker", "reconnect")
        self._world.broker.fence(self._partition(), again=True)

    def settle_trouble(self) -> None:
        mode = self._rng.choice(("error", "lost answer", "late", "refuse"))
        self._world.note("broker", f"trouble: settle {mode}")
        self._world.troubles[f"settle {mode}"] = self._world.now + self._rng.uniform(0.5, 6.0)

    def load_trouble(self) -> None:
        mode = self._rng.choice(("load", "load late"))
        self._world.note("broker", f"trouble: {mode}")
        self._world.troubles[mode] = self._world.now + self._rng.uniform(0.5, 6.0)

    def slow_down(self) -> None:
        self._world.note("handler", "slow down")
        self._world.handler.slowness = self._rng.choice((5.0, 20.0))
        self._world.after(self._rng.uniform(0.5, 5.0), self._speed_up)

    def _speed_up(self) -> None:
        self._world.handler.slowness = 1.0

    # -- operators ----------------------------------------------------------------------------------------------

    def _records(self, *states: State) -> list[AsideRecord]:
        records = self._world.broker.records(self._partition())
        found = sorted((r for r in records if r.state in states), key=lambda record: (record.position, record.id))
        return self._rng.sample(found, min(len(found), self._rng.choice((1, 1, 3))))

    def replay(self) -> None:
        if records := self._records(State.DEAD):
            self._world.note("operator", "replay")
            for record in records:
                self._world.handler.cure(self._world.ledger.story(record.event))
            self._world.broker.move(records, State.WAITING, self._world.now + WALL)

    def hurry(self) -> None:
        """Make waiting records due now."""
        if records := self._records(State.WAITING):
            self._world.note("operator", "hurry")
            self._world.broker.move(records, State.WAITING, self._world.now + WALL)

    def give_up(self) -> None:
        if records := self._records(State.WAITING, State.HELD):
            self._world.note("operator", "give up")
            self._world.broker.move(records, State.DEAD, None)

    def remove(self) -> None:
        if records := self._records(State.WAITING, State.HELD, State.DEAD):
            self._world.note("operator", "remove")
            self._world.broker.move(records, None, None)
