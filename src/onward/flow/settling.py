"""The settles of one plane, one in flight at a time. Pure."""

import msgspec

from onward.brokers.base import AsideRecord, Progress
from onward.flow.actions import Settlement
from onward.flow.holding import Holding
from onward.flow.letters import Leaving

SPAN_PACE_S = 1e-5  # the more intervals a settle carries the rarer it is: it stays a small share of the work


class Part(msgspec.Struct):
    """One partition in the settle in flight."""

    holding: Holding
    epoch: int
    fresh: int
    gone: int
    letters: dict[int, Leaving]
    marks: list[int]


class Settling:
    """`dirty`: the partitions that the next settle is for. `pending`: what the one in flight is about."""

    __slots__ = ("_interval_s", "_spans", "at", "dirty", "pending", "pressed")

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._spans = 0  # intervals in the last settle
        self.at = 0.0  # no sooner than this, unless something waits for it
        self.dirty: dict[Holding, None] = {}
        self.pending: list[Part] | None = None
        self.pressed = False  # something may wait for the next settle: only then is it worth a look

    def press(self, holding: Holding) -> None:
        """To be settled, and perhaps soon."""
        self.dirty[holding] = None
        self.pressed = True

    def is_urgent(self, now: float) -> bool:
        """Something waits for this settle: a lane for its record, a start for its mark, the next owner."""
        for holding in self.dirty:
            letters = holding.letters
            if holding.blame.marking or holding.release_at is not None:
                return True
            if letters.leaving and now >= letters.retry_at:
                return True
        return False

    def settle(self, now: float) -> Settlement:
        """All that is dirty, at once."""
        progress: list[Progress] = []
        aside: list[AsideRecord] = []
        gone: list[str] = []
        self.pending = []
        for holding in self.dirty:
            letters = holding.post(now)
            aside.extend(leaving.record for leaving in letters.values())
            gone.extend(id_ for id_, _ in holding.letters.gone)
            progress.append(holding.progress())
            self.pending.append(_part(holding, letters))
            holding.dirty = holding.letters.dirty = False
        self.dirty.clear()
        self.pressed = False
        self._spans = sum(len(each.done_above) for each in progress)
        return Settlement(progress, aside, gone)

    def answered(self, now: float) -> list[Part]:
        """The settle in flight was answered. Returns its parts, without those of an earlier ownership: the partition
        may be ours again, and this is not about that."""
        self.at = now + self._interval_s + self._spans * SPAN_PACE_S
        pending, self.pending = self.pending, None
        assert pending is not None, "a settle was answered that was not asked for"
        return [part for part in pending if part.holding.epoch == part.epoch]

    def marking(self) -> int:
        """How many wait for their starts to be recorded."""
        settling = [part.holding for part in self.pending or ()]
        return sum(len(holding.blame.marking) for holding in dict.fromkeys([*settling, *self.dirty]))


def _part(holding: Holding, letters: dict[int, Leaving]) -> Part:
    marks = [p for p in holding.blame.marking if p in letters or p in holding.tracker.open]
    fresh, gone = len(holding.tracker.fresh), len(holding.letters.gone)
    return Part(holding, holding.epoch or 0, fresh, gone, letters, marks)
