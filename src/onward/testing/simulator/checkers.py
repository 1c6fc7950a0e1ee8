"""What must be true of every run. The checkers do not know how the plane works. They see what was published, what ran,
which effects happened, what the broker stores, and what the plane asked for."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from onward.brokers.base import AsideRecord, Progress, State
from onward.event import Delivery, Partition
from onward.flow.limits import Limits
from onward.testing.simulator.ledger import HandlerRun, Ledger, Story
from onward.testing.simulator.profile import Profile

if TYPE_CHECKING:
    from onward.flow.actions import Actions, SettleCall
    from onward.testing.simulator.process import SimulatedProcess

RESUME_AT = 0.7
CLOCKS_S = 0.6  # how far two wall clocks may differ, with a margin
SPINS = 20


class Violation(Exception):
    """A promise was broken."""

    def __init__(self, checker: str, what: str) -> None:
        super().__init__(f"{checker}: {what}")
        self.checker = checker


def broken(checker: str, what: str) -> NoReturn:
    raise Violation(checker, what)


def covers(progress: Progress | None, position: int) -> bool:
    """Is the position done, according to this progress?"""
    if progress is None:
        return False
    return position < progress.watermark or any(start <= position < stop for start, stop in progress.done_above)


class OrderChecker:
    """Key order. No event of a lane starts or completes before the earlier ones have completed. After a crash only the
    most recent events of a lane run again, in order."""

    def started(self, run: HandlerRun) -> None:
        for story in run.stories:
            lane = story.lane
            if lane is None or (first := lane.first_open()) >= story.rank:
                continue
            for earlier in lane.stories[first : story.rank]:
                if not earlier.completed and earlier not in run.stories:
                    broken("order", f"{story} starts in {run.process.name} before {earlier} has completed")

    def effect(self, run: HandlerRun, story: Story) -> None:
        lane = story.lane
        if lane is None:
            return
        if lane.first_open() < story.rank:
            broken("order", f"{story} completes before {lane.stories[lane.frontier]}")
        if run.stale or story.exempt:
            return
        for skipped in lane.stories[lane.last + 1 : story.rank]:
            if not skipped.exempt:
                broken(
                    "suffix", f"{story} runs again after {lane.stories[lane.last]}, and {skipped} between them does not"
                )
        lane.last = story.rank


class RepeatChecker:
    """No needless repeats: if every ownership ended drained, no event has its effect twice."""

    def effect(self, story: Story, excused: int) -> None:
        if story.effects and not excused and not story.exempt and not story.halved:
            broken("repeats", f"{story} has its effect again, although every ownership ended drained")


class LaneChecker:
    """One run per lane: always within a process, and in the fleet except for runs that outlive their ownership."""

    def started(self, run: HandlerRun) -> None:
        for lane in run.lanes:
            for other in lane.runs:
                if other.process is run.process or not other.stale:
                    broken("lanes", f"{run} starts while {other} runs")
            lane.runs.append(run)

    def ended(self, run: HandlerRun) -> None:
        for lane in run.lanes:
            lane.runs.remove(run)


class SettledChecker:
    """No open event is settled: every event that the stored progress covers had its effect or has a record."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._watermarks: dict[Partition, int] = {}

    def progress(self, progress: Progress, log_end: int) -> None:
        partition = progress.partition
        if progress.watermark < self._watermarks.get(partition, 0):
            broken("settled", f"the watermark of {partition} goes back to {progress.watermark}")
        self._watermarks[partition] = progress.watermark
        if max([progress.watermark, *(stop for _, stop in progress.done_above)]) > log_end:
            broken("settled", f"{partition} is settled beyond the end of its log, {log_end}: {progress}")
        uncovered = self._ledger.uncovered[partition]
        still = [story for story in uncovered if not self._covers(progress, story)]
        if len(still) < len(uncovered):
            self._ledger.uncovered[partition] = still

    def acknowledged(self, story: Story) -> None:
        """An event of a shared partition was settled. Its record may already have been delivered again."""
        story.copies -= 1
        if not (story.effects or story.record or story.removed or story.copies):
            broken("settled", f"{story} was settled, but has no effect and no record")
        story.covered = True

    def _covers(self, progress: Progress, story: Story) -> bool:
        position = story.position
        if not covers(progress, position):
            return False
        if not (story.effects or story.record or story.removed):
            broken("settled", f"{story} was settled as done, but has no effect and no record")
        story.covered = True
        return True


class EpochChecker:
    """Fencing. After the plane received the end of an ownership, nothing of it starts or settles. Nothing starts after
    Revoked, nor from `sure_until` on, nor before the records of the partition were read."""

    def started(self, run: HandlerRun, now: float, sure_until: float) -> None:
        if now >= sure_until:
            broken("epochs", f"{run} starts at {now:.3f}, but ownership is certain only until {sure_until:.3f}")
        for delivery in run.deliveries:
            if run.process.epochs.get(delivery.partition) != delivery.epoch:
                broken("epochs", f"{run} starts under an ownership that has ended")
            if delivery.partition in run.process.revoked:
                broken("epochs", f"{run} starts after the partition was revoked")
            if run.process.read.get(delivery.partition) != delivery.epoch:
                broken("loading", f"{run} starts before the records of its partition were read")

    def early(self, run: HandlerRun, wall: float) -> None:
        """No retry runs before it is due, neither in the memory of its process nor from the aside. In a shared
        partition the event may run again beside its record, if the member lost its share in the middle of a settle."""
        for story in run.stories:
            if story.unclean:
                continue
            process, epoch, until = story.wait or ("", 0, 0.0)
            if process == run.process.name and epoch == run.epoch and run.started < until:
                broken("early", f"{run} starts {until - run.started:.2f} s before it is due")
            waits = story.record is not None and story.record.state is State.WAITING and not story.touched
            if waits and wall < story.due - CLOCKS_S:
                broken("early", f"{run} starts {story.due - wall:.2f} s before it is due")

    def removed(self, run: HandlerRun) -> None:
        for story in run.stories:
            if story.covered and (story.partition, story.position) in run.process.removed:
                broken("removed", f"{run} starts after its process received the removal of its record")

    def settling(self, process: "SimulatedProcess", settlement: "SettleCall") -> None:
        partitions = {each.partition for each in settlement.progress}
        for each in settlement.progress:
            if process.epochs.get(each.partition) != each.epoch:
                broken("epochs", f"{process.name} settles {each.partition} under epoch {each.epoch}, which has ended")
        for record in settlement.aside:
            if record.partition not in partitions:
                broken("epochs", f"{process.name} stores {record.id} without the progress of its partition")
        if settlement.gone and not partitions:
            broken("epochs", f"{process.name} removes records without any progress")


class BoundsChecker:
    """Bounds. A process stays within its limits, and resumes a paused partition only when enough is done."""

    def __init__(self, profile: Profile) -> None:
        self._limits: Limits = profile.limits
        self._batch = profile.receive_batch
        self._events = profile.events
        self._bytes = profile.limits.max_in_flight_bytes + max(profile.limits.max_in_flight_bytes, profile.largest + 64)
        self._open: dict[tuple[str, Partition], dict[int, int]] = {}  # position: size
        self._seen_in: dict[tuple[str, Partition], list[int]] = {}  # positions delivered in this ownership
        self._records: dict[tuple[str, Partition], int] = {}  # records in the aside when the ownership began
        self._spins: Counter[str] = Counter()
        self._seen: dict[str, tuple[float, int]] = {}

    def assigned(self, process: "SimulatedProcess", partition: Partition, records: int) -> None:
        self._records[process.name, partition] = records
        self._open[process.name, partition] = {}
        self._seen_in[process.name, partition] = []

    def ended(self, process: "SimulatedProcess", partition: Partition) -> None:
        self._open.pop((process.name, partition), None)

    def delivered(self, process: "SimulatedProcess", delivery: Delivery, story: Story) -> None:
        name = process.name, delivery.partition
        held = self._open.get(name)
        seen = self._seen_in[name] if held is not None else []
        known = bool(seen) and delivery.position <= seen[-1]
        if held is None or known or story.covered or story.removed or story.record is not None:
            return
        seen.append(delivery.position)
        held[delivery.position] = story.event.size
        most = self._limits.max_in_flight - 1 + self._batch
        gap = len(seen) - bisect_left(seen, min(held)) - len(held)
        if gap > self._limits.max_gap + most:
            broken("bounds", f"{process.name} has done {gap} events of {delivery.partition} above an open one")
        if len(held) > most:
            broken("bounds", f"{process.name} holds {len(held)} events of {delivery.partition}")
        if sum(held.values()) > self._bytes:
            broken("bounds", f"{process.name} holds {sum(held.values())} bytes of {delivery.partition}")

    def parked(self, process: "SimulatedProcess", partition: Partition, records: int) -> None:
        """An event was delivered while the aside has this many records of its partition."""
        limits, before = self._limits, self._records.get((process.name, partition), 0)
        if records > max(limits.max_parked, before) + 2 * (limits.max_in_flight + self._batch):
            broken("bounds", f"{process.name} receives more of {partition}, which has {records} records in the aside")

    def done(self, process: "SimulatedProcess", partition: Partition, position: int) -> None:
        held = self._open.get((process.name, partition))
        if held is not None:
            held.pop(position, None)

    def removed(self, partition: Partition, position: int) -> None:
        for (_, each), held in self._open.items():
            if each == partition:
                held.pop(position, None)

    def resumed(self, process: "SimulatedProcess", partition: Partition) -> None:
        held = self._open.get((process.name, partition), {})
        limits, size = self._limits, sum(held.values())
        if len(held) > RESUME_AT * limits.max_in_flight or size > RESUME_AT * limits.max_in_flight_bytes:
            broken("hysteresis", f"{process.name} resumes {partition} with {len(held)} events, {size} bytes")

    def ticked(self, process: "SimulatedProcess", actions: "Actions", now: float) -> None:
        limits = self._limits
        most = len(process.plane.held) * (2 * limits.max_in_flight + self._batch)
        if process.plane.open > most:
            broken("bounds", f"{process.name} has {process.plane.open} events in memory, {most} allowed")
        if len(process.runs) > limits.concurrency:
            broken("bounds", f"{process.name} runs {len(process.runs)} calls, {limits.concurrency} allowed")
        still = actions.wake_at is not None and self._seen.get(process.name) == (now, process.news)
        self._seen[process.name] = now, process.news
        self._spins[process.name] = self._spins[process.name] + 1 if still else 0
        if self._spins[process.name] > SPINS:
            broken("spin", f"{process.name} asks again and again to be called at once")

    def lag(self, process: "SimulatedProcess", now: float) -> None:
        """The lag counts events, not positions."""
        for partition, lag in process.plane.lag(now).items():
            if lag.gap > 2 * self._events + 1:  # intervals of earlier owners count too, even without events
                broken("lag", f"{process.name} counts a gap of {lag.gap} events in {partition}, {self._events} exist")


class RecordChecker:
    """No record is lost, dead letters are correct, killers are found, and no other event is blamed for a crash."""

    def __init__(self, ledger: Ledger, profile: Profile) -> None:
        self._ledger = ledger
        self._attempts = profile.attempts
        self._limit = profile.limits.crash_limit
        self._kills = profile.kills
        self._killers = profile.fates[-1] > 0
        self.refusals = 0  # refused settles: the next owner does not learn how these runs ended
        self._unclean: Counter[Partition] = Counter()  # unclean ends that no killer caused
        self._changes: Counter[Partition] = Counter()  # all changes of owner that no killer caused

    def assigned(self, partition: Partition, *, unclean: bool, killed: bool) -> None:
        if killed:
            return
        self._changes[partition] += 1
        self._unclean[partition] += unclean

    def written(self, story: Story, record: AsideRecord, stored: Progress | None) -> None:
        """The owner stored a record. If the broker had no room for the progress of an event, the event is open again,
        and its dead letter may be replaced."""
        kept = story.is_dead and not story.touched and covers(stored, story.position)
        if kept and record.state is not State.DEAD:
            broken("records", f"the dead letter of {story} was replaced by a {record.state} record")
        if record.state is not State.DEAD:
            return
        failure = record.failure
        if failure is None:
            broken("records", f"the dead letter of {story} has no failure")
        elif failure.reason == "exhausted":
            # A settle that is sent again may replace a record that an operator replayed meanwhile.
            stated, seen = failure.attempts, story.failures if story.touched else story.fresh_failures
            if stated != self._attempts or seen < self._attempts:
                broken("records", f"{story} is dead after {stated} attempts, {seen} seen, {self._attempts} expected")
        elif not self.refusals and story.lone_crashes + self._unclean[story.partition] < self._limit:
            broken(
                "blame", f"{story} ({story.fate}) is dead as {failure.reason} after {story.lone_crashes} crashes alone"
            )

    def failed(self, story: Story) -> None:
        """An event failed. A drained release loses no attempts; a crash may lose those that were not settled."""
        most = self._attempts * (1 + self._unclean[story.partition])
        if not self._killers and not self.refusals and story.fresh_failures > most and not story.touched:
            broken("records", f"{story} was tried {story.fresh_failures} times, {self._attempts} allowed")

    def started(self, run: HandlerRun) -> None:
        """An event that has killed before runs alone. After its first crash nothing points to it, and after its second
        it is only a suspect. Each change of owner may allow one more crash."""
        if not self._killers or self._kills != "process":
            return
        for other in run.process.runs:
            for story in (*run.stories, *other.stories):
                if story.crashes >= 2 + self._changes[story.partition] and not story.touched:
                    broken("blame", f"{run} starts while {other} runs, although {story} has killed before")

    def gone(self, story: Story, stored: Progress | None) -> None:
        """A record was removed. If its event is not settled as done, the event will run again, so the record may be
        removed first."""
        if covers(stored, story.position) and story.effects <= story.record_effects and not story.touched:
            broken("records", f"the record of {story} was removed, but it had no effect since the record was stored")

    def crashed(self, story: Story) -> None:
        most = self._limit + 2 + self._changes[story.partition]
        if story.crashes > most:
            broken("blame", f"{story} has killed {story.crashes} times, {most} allowed")


class EndChecker:
    """Once the faults stop, every event completes, every log is settled to its end, and no process has open events."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def lost(self) -> list[str]:
        return [
            f"{story} ({story.fate}) has no effect and no record"
            for story in self._ledger.all()
            if not (story.effects or story.removed or story.record)
        ]

    def untrue(self) -> list[str]:
        """Dead letters of events that succeeded later. An orphaned one may stay: only the first owner after a crash
        looks for it, and that owner may have left before it got there."""
        dead = [story for story in self._ledger.all() if story.is_dead and not story.touched and not story.orphaned]
        return [f"{story} has a dead letter, but was handled since" for story in dead if story.handled]

    def stuck(self) -> list[str]:
        """Records that should have left the aside."""
        return [
            f"{story} ({story.fate}) is still {story.record.state}"
            for story in self._ledger.all()
            if story.record is not None and story.record.state is not State.DEAD and not self._behind_dead(story)
        ]

    def open(
        self, watermarks: Sequence[tuple[Partition, int, int]], processes: Sequence["SimulatedProcess"]
    ) -> list[str]:
        unsettled = [f"{p} is settled up to {mark} of {end}" for p, mark, end in watermarks if mark != end]
        busy = [process for process in processes if process.plane.open or process.plane.running]
        return unsettled + [f"{p.name} has {p.plane.open} open events, {p.plane.running} running" for p in busy]

    def _behind_dead(self, story: Story) -> bool:
        lane = story.lane
        return lane is not None and lane.holds and any(each.is_dead for each in lane.stories[: story.rank])
