"""A settle on its way: to the broker in one step or in several, late, lost, refused or answered, until it ends."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onward.event import Partition
from onward.flow.actions import Settlement

if TYPE_CHECKING:
    from onward.testing.simulator.process import Process

TOPIC = "t"
AGAIN_S = 0.5


class Settling:
    """One process's settles, one at a time."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._applied = False  # the settle in flight took effect, but its answer was lost
        self.busy = False

    def begin(self, settlement: Settlement) -> None:
        assert not self.busy, "two settles in flight"
        self.busy = True
        self._applied = False
        self._process.world.witness.settling(self._process, settlement)
        self._send(settlement)

    def _send(self, settlement: Settlement) -> None:
        process, world = self._process, self._process.world
        if world.tracing:
            world.say(process.name, f"settles {describe(settlement)}")
        mode = "error" if process.cut() else world.settle_mode()
        delay_s = world.latency()
        if mode == "late":
            delay_s = world.rng.uniform(0.3, 7.0)
        if mode != "ok":
            world.counts[f"settle {mode}"] += 1
        # From here on the request is on the wire: it arrives even if its sender dies.
        world.after(delay_s, self._apply, settlement, mode)

    def _apply(self, settlement: Settlement, mode: str) -> None:
        process, world = self._process, self._process.world
        if mode == "error":
            process.later(world.latency() + AGAIN_S, self._send, settlement)
        elif mode == "refuse" and settlement.aside and not self._applied:
            process.later(world.latency(), self._refused)
        elif world.profile.atomic:
            epochs = {told.partition: told.epoch for told in settlement.progress}
            world.broker.write(process.session, epochs, settlement.aside)
            lost = world.broker.commit(process.session, settlement.progress)
            world.broker.erase(process.session, epochs, list(map(_parsed, settlement.gone)))
            self._reply(settlement, mode, lost)
        else:
            self._write(settlement, mode)

    # Without transactions: the sender may die, or be fenced, between any two steps.

    def _write(self, settlement: Settlement, mode: str) -> None:
        epochs = {told.partition: told.epoch for told in settlement.progress}
        process, world = self._process, self._process.world
        first = world.rng.randint(0, len(settlement.aside))
        world.broker.write(process.session, epochs, settlement.aside[:first])

        def rest() -> None:
            world.broker.write(process.session, epochs, settlement.aside[first:])
            process.later(world.latency(), self._commit, settlement, mode, epochs)

        process.later(world.latency(), rest)

    def _commit(self, settlement: Settlement, mode: str, epochs: dict[Partition, int]) -> None:
        process, world = self._process, self._process.world
        lost = world.broker.commit(process.session, settlement.progress)
        gone = list(map(_parsed, settlement.gone))
        first = world.rng.randint(0, len(gone))

        def rest() -> None:
            world.broker.erase(process.session, epochs, gone[first:])
            self._reply(settlement, mode, lost)

        def erase() -> None:
            world.broker.erase(process.session, epochs, gone[:first])
            process.later(world.latency(), rest)

        process.later(world.latency(), erase)

    def _reply(self, settlement: Settlement, mode: str, lost: Sequence[Partition]) -> None:
        process, world = self._process, self._process.world
        if mode == "lost answer":
            self._applied = True
            process.later(world.latency() + AGAIN_S, self._send, settlement)
        else:
            process.later(world.latency(), self._answered, settlement, lost)

    def _answered(self, settlement: Settlement, lost: Sequence[Partition]) -> None:
        process = self._process
        self.busy = False
        if process.world.tracing:
            process.world.say(process.name, "is answered" + (f", lost {lost}" if lost else ""))
        epochs = {told.partition: told.epoch for told in settlement.progress}
        for partition in lost:
            if process.told.get(partition) == epochs[partition]:
                process.forget(partition)
        process.world.witness.answered(process, settlement)
        process.plane.settled(lost, process.at)
        process.wake()

    def _refused(self) -> None:
        process = self._process
        self.busy = False
        if process.world.tracing:
            process.world.say(process.name, "is refused its records")
        process.world.witness.refused()
        process.plane.aside_refused(process.at)
        process.wake()


def _parsed(id_: str) -> tuple[Partition, int]:
    _, index, position = id_.rsplit(":", 2)
    return Partition(TOPIC, int(index)), int(position)


def describe(settlement: Settlement) -> str:
    parts = [
        f"{told.partition} e{told.epoch} <{told.watermark} {list(told.done_above) or ''} {dict(told.tries) or ''}"
        for told in settlement.progress
    ]
    parts += [f"{record.state}@{record.partition.index}:{record.position}" for record in settlement.aside]
    parts += [f"gone {id_}" for id_ in settlement.gone]
    return "; ".join(parts)
