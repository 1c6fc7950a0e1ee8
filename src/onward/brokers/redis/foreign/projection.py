"""Which entries of a partition a consumer group's pending list must show: those that were handed out and are not done.
Pure."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onward.brokers.base import AsideRecord, Progress, State, Tries
from onward.brokers.redis.positions import id_of
from onward.event import Partition


class ListChange(NamedTuple):
    """What a settle says of a partition."""

    progress: Progress | None = None
    records: Sequence[AsideRecord] = ()
    gone: Sequence[int] = ()  # positions of records that are removed

    @classmethod
    def of(
        cls, partition: Partition, progress: Iterable[Progress], aside: Iterable[AsideRecord], gone: Iterable[str]
    ) -> "ListChange":
        """Its part of a settle. `gone`: the places of records."""
        return cls(
            next((each for each in progress if each.partition == partition), None),
            [record for record in aside if record.partition == partition],
            [int(place.partition(":")[0], 16) for place in gone],
        )


class Plan(NamedTuple):
    """What to change in the pending list."""

    next_out: int  # everything before it was handed out
    claims: Mapping[int, int]  # by position that must be pending: its delivery count
    acks: Sequence[int]  # positions that are done
    added: int | None = None  # entries that were ever added before `next_out`; None: unknown

    def arguments(self) -> list[str | int]:
        """As SETTLE_STREAM takes them: the ids of equal counts together."""
        runs: dict[int, list[str]] = {}
        for position, count in self.claims.items():
            runs.setdefault(count, []).append(id_of(position))
        claims: list[str | int] = []
        for count, ids in runs.items():
            claims += [count, len(ids), *ids]
        added = "" if self.added is None else self.added
        return [id_of(max(self.next_out, 1) - 1), added, len(runs), *claims, len(self.acks), *map(id_of, self.acks)]


class Projection:
    """The pending list of one ownership, as we have written it. The server is asked for it once. One thread uses it,
    but any thread may report what an operator moved."""

    def __init__(self, stored: Progress | None, position: int) -> None:
        self.is_loaded = False
        self._done = _Done(stored, position)
        self._tries: Mapping[int, Tries] = {} if stored is None else stored.tries
        self._listed: dict[int, int] = {}  # what is pending at the server: position and delivery count
        self._open: set[int] = set()  # read from the log, and not done
        self._parked: dict[int, int] = {}  # done by their records, which are waiting or held: they stay pending
        self._doubtful: set[int] = set()  # whose place in the list may have to change
        self._undone: set[int] = set()  # pending, and to be acknowledged when they are done
        self._moved: deque[tuple[Sequence[int], State | None]] = deque()
        self._handed_out = position  # as far as the group at the server knows

    def load(self, pending: Mapping[int, int]) -> None:
        """What is pending under our name: what the owner before had not done, and what waits in the aside."""
        self.is_loaded = True
        self._listed |= pending
        self._doubtful.update(position for position in pending if self._done.has(position))

    def reset(self) -> None:
        """The server may have lost what we wrote: ask it again for the list, and write what is missing."""
        self.is_loaded = False
        self._listed.clear()
        self._doubtful |= self._parked.keys()
        self._handed_out = -1

    def saw(self, positions: Iterable[int]) -> None:
        """These were read from the log."""
        self._open.update(positions)

    def buried(self, positions: Iterable[int]) -> None:
        """These were read from the log, and are dead letters already."""
        self._doubtful.update(positions)

    def moved(self, positions: Sequence[int], to: State | None) -> None:
        """An operator moved the records of these positions, or removed them."""
        self._moved.append((positions, to))

    def recount(self) -> None:
        """What the group at the server has read must be written again."""
        self._handed_out = -1

    def is_behind(self, next_out: int) -> bool:
        """More was handed out, or is done, than the group at the server knows of, or records were moved."""
        return next_out > self._handed_out or bool(self._moved) or bool(self._doubtful)

    def plan(self, change: ListChange, next_out: int) -> Plan:
        """`next_out`: everything before it was handed out."""
        if change.progress is not None:
            self._done, self._tries = _Done(change.progress), change.progress.tries
        self._note_records(change)
        done = {position for position in self._open if self._done.has(position)}
        self._open -= done
        self._doubtful |= done | {position for position in self._undone if self._done.has(position)}
        self._undone -= self._doubtful
        claims = {each: self._count(each) for each in self._open if each < next_out}
        claims |= {each: self._parked[each] for each in self._doubtful if each in self._parked}
        listed = self._listed
        return Plan(
            next_out,
            {each: count for each, count in sorted(claims.items()) if listed.get(each, 0) < count},
            sorted(each for each in self._doubtful if each in listed and self._is_finished(each)),
        )

    def projected(self, plan: Plan, kept: Iterable[int], *, is_new: bool) -> None:
        """The server has done it. `kept`: it did not acknowledge these, because their records are waiting or held.
        `is_new`: the group had been removed, so nothing else is pending."""
        kept = dict.fromkeys(kept)
        self._parked |= {each: self._listed.get(each, 1) for each in kept}
        if is_new:
            self._listed.clear()
        self._listed |= plan.claims
        for each in plan.acks:
            if each not in kept:
                self._listed.pop(each, None)
        self._handed_out = -1 if is_new else max(self._handed_out, plan.next_out)
        self._undone |= {each for each in self._doubtful if each in self._listed and each not in self._parked}
        self._doubtful = set(self._parked) if is_new else set()

    def _note_records(self, change: ListChange) -> None:
        for record in change.records:
            self._note({record.position: 1 + record.tries.failed}, record.state)
        self._note(dict.fromkeys(change.gone, 1), None)
        while self._moved:
            positions, to = self._moved.popleft()
            self._note(dict.fromkeys(positions, 1), to)

    def _note(self, counts: Mapping[int, int], to: State | None) -> None:
        self._doubtful.update(counts)
        if to is None or to is State.DEAD:
            for each in counts:
                self._parked.pop(each, None)
        else:
            self._parked |= counts

    def _is_finished(self, position: int) -> bool:
        return position not in self._parked and self._done.has(position)

    def _count(self, position: int) -> int:
        """The attempt that it is at."""
        tries = self._tries.get(position)
        return 1 if tries is None else 1 + tries.failed


class _Done:
    """Which positions are done."""

    def __init__(self, progress: Progress | None, watermark: int = 0) -> None:
        self._watermark = watermark if progress is None else progress.watermark
        above = () if progress is None else progress.done_above
        self._starts = [start for start, _ in above]
        self._ends = [end for _, end in above]

    def has(self, position: int) -> bool:
        if position < self._watermark:
            return True
        at = bisect_right(self._starts, position) - 1
        return at >= 0 and position < self._ends[at]
