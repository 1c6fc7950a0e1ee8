"""What happened to every event, as seen from outside. The simulation writes it; the checkers read it."""

from typing import TYPE_CHECKING

from onward.brokers.base import AsideRecord, State
from onward.event import Delivery, Event, Partition
from onward.flow.limits import Limits

if TYPE_CHECKING:
    from onward.testing.simulator.group import Session
    from onward.testing.simulator.process import SimulatedProcess


class Lane:
    """The events that must complete one after the other: those of a key, or of a whole partition."""

    __slots__ = ("frontier", "holds", "last", "name", "runs", "stories")

    def __init__(self, name: str, holds: bool) -> None:
        self.name = name
        self.holds = holds  # events behind a dead one wait (on_dead="hold")
        self.stories: list[Story] = []
        self.frontier = 0  # the rank of the first event that has not completed
        self.last = -1  # the rank of the last effect
        self.runs: list[HandlerRun] = []  # that run now, in all processes

    def first_open(self) -> int:
        stories, rank = self.stories, self.frontier
        while rank < len(stories) and stories[rank].completed:
            rank += 1
        self.frontier = rank
        return rank


class Story:
    """One published event and what happened to it."""

    __slots__ = (
        "compacted",
        "copies",
        "covered",
        "crashes",
        "due",
        "effects",
        "event",
        "ever_dead",
        "failures",
        "fate",
        "fresh_failures",
        "halved",
        "handled",
        "lane",
        "lone_crashes",
        "orphaned",
        "partition",
        "position",
        "rank",
        "record",
        "record_effects",
        "removed",
        "stubborn",
        "touched",
        "unclean",
        "wait",
    )

    def __init__(self, partition: Partition, position: int, event: Event, lane: Lane | None) -> None:
        self.partition = partition
        self.position = position
        self.event = event
        self.lane = lane
        self.rank = 0
        self.fate = "ok"
        self.stubborn = 0  # how often it fails before it succeeds
        self.effects = 0
        self.failures = 0  # failed runs of this event alone
        self.fresh_failures = 0  # of those, how many since the last replay
        self.crashes = 0  # how many processes it killed
        self.lone_crashes = 0  # of those, how many while it ran alone
        self.record: AsideRecord | None = None  # its record in the aside now
        self.record_effects = 0  # how many effects it had when that record was stored
        self.due = 0.0  # when its waiting record may be tried again, on the wall clock
        self.ever_dead = False
        self.handled = False  # an owner knows that it succeeded, and no record was stored since
        self.orphaned = False  # its dead letter was stored without the progress, and the next owner was assigned clean
        self.halved = False  # it had its effect in a batch that failed and was split
        self.wait: tuple[str, int, float] | None = None  # its retry in memory: process, epoch and due time
        self.touched = False  # an operator moved or removed its record
        self.removed = False  # an operator removed its record
        self.unclean = False  # in a shared partition: a member lost it in an unclean end
        self.copies = 1  # unsettled copies of it in a shared partition
        self.compacted = False  # it was removed from the log
        self.covered = False  # the stored progress says that it is done

    @property
    def completed(self) -> bool:
        if self.effects or self.removed:
            return True
        return self.ever_dead and not (self.lane is not None and self.lane.holds)

    @property
    def exempt(self) -> bool:
        """Is this event exempt from the checks of repeats? Dead letters, and events whose record an operator changed,
        run again on request. A compacted event does not run again, even if later events of its lane do."""
        return self.ever_dead or self.touched or self.compacted

    @property
    def is_dead(self) -> bool:
        return self.record is not None and self.record.state is State.DEAD

    def __str__(self) -> str:
        return f"{self.partition}@{self.position}({self.event.key})"


class HandlerRun:
    """One call of the handler in one process."""

    __slots__ = ("deliveries", "epoch", "lanes", "over", "partition", "process", "session", "started", "stories")

    def __init__(
        self, process: "SimulatedProcess", deliveries: tuple[Delivery, ...], stories: list[Story], now: float
    ) -> None:
        self.process = process
        self.session: Session = process.session
        self.deliveries = deliveries
        self.stories = stories
        self.partition = deliveries[0].partition
        self.epoch = deliveries[0].epoch
        self.started = now
        self.over = False
        self.lanes = list(dict.fromkeys(story.lane for story in stories if story.lane is not None))

    @property
    def stale(self) -> bool:
        """Has its process lost the ownership under which the run started?"""
        return not self.session.owns(self.partition, self.epoch)

    def __str__(self) -> str:
        return f"{self.process.name}:e{self.epoch} {' '.join(map(str, self.stories))}"


class Ledger:
    def __init__(self, limits: Limits, partitions: list[Partition]) -> None:
        self._limits = limits
        self._lanes: dict[tuple[Partition, str | None], Lane] = {}
        self.stories: dict[Partition, dict[int, Story]] = {partition: {} for partition in partitions}
        self._by_event: dict[str, Story] = {}
        self.uncovered: dict[Partition, list[Story]] = {partition: [] for partition in partitions}

    def publish(self, partition: Partition, position: int, event: Event) -> Story:
        lane = self._lane(partition, event.key)
        story = Story(partition, position, event, lane)
        if lane is not None:
            story.rank = len(lane.stories)
            lane.stories.append(story)
        self.stories[partition][position] = story
        self._by_event[event.id] = story
        self.uncovered[partition].append(story)
        return story

    def story(self, event: Event) -> Story:
        return self._by_event[event.id]

    def _lane(self, partition: Partition, key: str | None) -> Lane | None:
        by_key = self._limits.ordering == "key"
        if self._limits.ordering == "none" or (by_key and key is None):
            return None
        name = (partition, key if by_key else None)
        if name not in self._lanes:
            self._lanes[name] = Lane(f"{partition}:{name[1]}", by_key and self._limits.on_dead == "hold")
        return self._lanes[name]

    def all(self) -> list[Story]:
        return [story for stories in self.stories.values() for story in stories.values()]
