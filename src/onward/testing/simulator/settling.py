"""A settle on its way to the broker: in one step or several, late, refused, or with its answer lost."""

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
    """One call of settle, and the part of it that the broker accepts."""

    sent: SettleCall
    accepted: SettleCall  # without the refused partitions
    refused: Sequence[Partition]
    mode: str

    @property
    def epochs(self) -> dict[Partition, int]:
        return {each.partition: each.epoch for each in self.accepted.progress}


class SettleClient:
    """The settles of one process, one at a time."""

    def __init__(self, process: "SimulatedProcess") -> None:
        self._process = process
        self._applied: set[Partition] = set()  # where the current settle took effect although its answer was lost
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
            world.trace(process.name, f"settles {describe(settlement)}")
        mode = "error" if process.cut() else world.settle_mode()
        delay_s = world.latency()
        if mode == "late":
            delay_s = world.rng.uniform(0.3, 7.0)
        if mode != "ok":
            world.counts[f"settle {mode}"] += 1
        # The request is on the wire now: it arrives even if its sender dies.
        world.after(delay_s, self._apply, settlement, mode)

    def _apply(self, settlement: SettleCall, mode: str) -> None:
        process, world = self._process, self._process.world
        if mode == "error":
            process.later(world.latency() + AGAIN_S, self._send, settlement)
            return
        request = self._request(settlement, mode)
        if world.profile.atomic:
            world.broker.write(process.session, request.epochs, request.accepted.aside)
            lost = world.broker.commit(process.session, request.accepted.progress)
            world.broker.erase(process.session, request.epochs, request.accepted.gone)
            self._reply(request, lost)
        else:
            self._write(request)

    def _request(self, settlement: SettleCall, mode: str) -> SettleRequest:
        """In mode "refuse" the broker cannot store the records of some partitions, and does nothing there."""
        refused: Sequence[Partition] = ()
        if mode == "refuse":
            rng = self._process.world.rng
            partitions = dict.fromkeys(record.partition for record in settlement.aside)
            refusable = [partition for partition in partitions if partition not in self._applied]
            refused = rng.sample(refusable, rng.randint(1, len(refusable))) if refusable else ()
            others = [
                each.partition for each in settlement.progress if each.partition not in (*refused, *self._applied)
            ]
            if refused and others and rng.random() < 0.3:
                self._process.world.broker.fence(rng.choice(others))  # the answer names refused and lost partitions
        accepted = SettleCall(
            [each for each in settlement.progress if each.partition not in refused],
            [record for record in settlement.aside if record.partition not in refused],
            [id_ for id_ in settlement.gone if partition_of(id_) not in refused],
        )
        return SettleRequest(settlement, accepted, refused, mode)

    # Without a transaction, the sender may die or be fenced between any two steps.

    def _write(self, request: SettleRequest) -> None:
        process, world, aside = self._process, self._process.world, request.accepted.aside
        first = world.rng.randint(0, len(aside))
        world.broker.write(process.session, request.epochs, aside[:first])

        def rest() -> None:
            world.broker.write(process.session, request.epochs, aside[first:])
            process.later(world.latency(), self._commit, request)

        process.later(world.latency(), rest)

    def _commit(self, request: SettleRequest) -> None:
        process, world = self._process, self._process.world
        lost = world.broker.commit(process.session, request.accepted.progress)
        gone = request.accepted.gone
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
            process.later(world.latency() + AGAIN_S, self._send, request.sent)
        else:
            process.later(world.latency(), self._answered, request, lost)

    def _answered(self, request: SettleRequest, lost: Sequence[Partition]) -> None:
        process, world, refused = self._process, self._process.world, request.refused
        self.busy = False
        if world.tracing:
            also = f", refused {refused}" if refused else ""
            world.trace(process.name, f"gets the answer to its settle{also}" + (f", lost {lost}" if lost else ""))
        for partition in lost:
            if process.epochs.get(partition) == request.epochs[partition]:
                process.forget(partition)
        world.witness.answered(process, request.accepted)
        if refused:
            world.counts["refused in part"] += len(request.accepted.progress) > len(lost)
            world.counts["refused and lost"] += bool(lost)
            world.witness.refused()
            process.plane.aside_refused(refused, lost, process.at)
        else:
            process.plane.settled(lost, process.at)
        process.wake()


def describe(settlement: SettleCall) -> str:
    parts = [
        f"{each.partition} epoch {each.epoch}: watermark {each.watermark}, "
        f"done above {list(each.done_above) or 'none'}, tries {dict(each.tries) or 'none'}"
        for each in settlement.progress
    ]
    parts += [f"stores {record.state} record {record.partition.index}:{record.position}" for record in settlement.aside]
    parts += [f"removes record {id_}" for id_ in settlement.gone]
    return "; ".join(parts)
