"""A settle on its way: to the broker in one step or in several, late, lost, refused or answered, until it ends."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from onward.event import Partition
from onward.flow.actions import SettleCall
from onward.testing.simulator.group import partition_of

if TYPE_CHECKING:
    from onward.testing.simulator.process import SimulatedProcess

AGAIN_S = 0.5


class SettleRequest(msgspec.Struct, frozen=True):
    """One call of settle, as the broker treats it."""

    whole: SettleCall
    kept: SettleCall  # without what is refused
    refused: Sequence[Partition]
    mode: str

    @property
    def epochs(self) -> dict[Partition, int]:
        return {each.partition: each.epoch for each in self.kept.progress}


class SettleClient:
    """One process's settles, one at a time."""

    def __init__(self, process: "SimulatedProcess") -> None:
        self._process = process
        self._applied: set[Partition] = set()  # where the settle in flight took effect, though its answer was lost
        self.busy = False

    def begin(self, settlement: SettleCall) -> None:
        assert not self.busy, "two settles in flight"
        self.busy = True
        self._applied = set()
        self._process.world.witness.settling(self._process, settlement)
        self._send(settlement)

    def _send(self, settlement: SettleCall) -> None:
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

    def _apply(self, settlement: SettleCall, mode: str) -> None:
        process, world = self._process, self._process.world
        if mode == "error":
            process.later(world.latency() + AGAIN_S, self._send, settlement)
            return
        request = self._request(settlement, mode)
        if world.profile.atomic:
            world.broker.write(process.session, request.epochs, request.kept.aside)
            lost = world.broker.commit(process.session, request.kept.progress)
            world.broker.erase(process.session, request.epochs, request.kept.gone)
            self._reply(request, lost)
        else:
            self._write(request)

    def _request(self, settlement: SettleCall, mode: str) -> SettleRequest:
        """In "refuse" the records of some partitions cannot be stored: nothing is done there."""
        refused: Sequence[Partition] = ()
        if mode == "refuse":
            rng = self._process.world.rng
            full = dict.fromkeys(record.partition for record in settlement.aside)
            able = [partition for partition in full if partition not in self._applied]
            refused = rng.sample(able, rng.randint(1, len(able))) if able else ()
            others = [
                each.partition for each in settlement.progress if each.partition not in (*refused, *self._applied)
            ]
            if refused and others and rng.random() < 0.3:
                self._process.world.broker.fence(rng.choice(others))  # the answer names both
        kept = SettleCall(
            [each for each in settlement.progress if each.partition not in refused],
            [record for record in settlement.aside if record.partition not in refused],
            [id_ for id_ in settlement.gone if partition_of(id_) not in refused],
        )
        return SettleRequest(settlement, kept, refused, mode)

    # Without transactions: the sender may die, or be fenced, between any two steps.

    def _write(self, request: SettleRequest) -> None:
        process, world, aside = self._process, self._process.world, request.kept.aside
        first = world.rng.randint(0, len(aside))
        world.broker.write(process.session, request.epochs, aside[:first])

        def rest() -> None:
            world.broker.write(process.session, request.epochs, aside[first:])
            process.later(world.latency(), self._commit, request)

        process.later(world.latency(), rest)

    def _commit(self, request: SettleRequest) -> None:
        process, world = self._process, self._process.world
        lost = world.broker.commit(process.session, request.kept.progress)
        gone = request.kept.gone
        first = world.rng.randint(0, len(gone))

        def rest() -> None:
            world.broker.erase(process.session, request.epochs, gone[first:])
            self._reply(request, lost)

        def erase() -> None:
            world.broker.erase(process.session, request.epochs, gone[:first])
            process.later(world.latency(), rest)

        process.later(world.latency(), erase)

    def _reply(self, request: SettleRequest, lost: Sequence[Partition]) -> None:
        process, world = self._process, self._process.world
        if request.mode == "lost answer" or (request.refused and world.rng.random() < 0.2):
            self._applied |= request.epochs.keys() - set(lost)
            process.later(world.latency() + AGAIN_S, self._send, request.whole)
        else:
            process.later(world.latency(), self._answered, request, lost)

    def _answered(self, request: SettleRequest, lost: Sequence[Partition]) -> None:
        process, world, refused = self._process, self._process.world, request.refused
        self.busy = False
        if world.tracing:
            but = f", refused {refused}" if refused else ""
            world.say(process.name, f"is answered{but}" + (f", lost {lost}" if lost else ""))
        for partition in lost:
            if process.epochs.get(partition) == request.epochs[partition]:
                process.forget(partition)
        world.witness.answered(process, request.kept)
        if refused:
            world.counts["refused in part"] += len(request.kept.progress) > len(lost)
            world.counts["refused and lost"] += bool(lost)
            world.witness.refused()
            process.plane.aside_refused(refused, lost, process.at)
        else:
            process.plane.settled(lost, process.at)
        process.wake()


def describe(settlement: SettleCall) -> str:
    parts = [
        f"{each.partition} e{each.epoch} <{each.watermark} {list(each.done_above) or ''} {dict(each.tries) or ''}"
        for each in settlement.progress
    ]
    parts += [f"{record.state}@{record.partition.index}:{record.position}" for record in settlement.aside]
    parts += [f"gone {id_}" for id_ in settlement.gone]
    return "; ".join(parts)
