"""The settles of one plane, one in flight at a time. Pure."""

import msgspec

from onward.brokers.base import AsideRecord, Progress
from onward.flow.actions import SettleCall
from onward.flow.entry import Entry
from onward.flow.holding import Holding
from onward.flow.pending_records import PendingRecord

ASIDE_RETRY_S = 1.0
SPAN_PACE_S = 1e-5  # pause per interval in a settle, so that large settles stay a small share of the work


class SettlePart(msgspec.Struct):
    """One partition in the settle in flight."""

    holding: Holding
    epoch: int
    fresh: int
    gone: int
    records: dict[int, PendingRecord]
    marks: list[int]


class Settling:
    """`dirty`: the partitions of the next settle. `pending`: the parts of the settle in flight."""

    __slots__ = ("_interval_s", "_spans", "at", "dirty", "pending", "pressed")

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._spans = 0  # intervals in the last settle
        self.at = 0.0  # the next settle is not before this time, unless it is urgent
        self.dirty: dict[Holding, None] = {}
        self.pending: list[SettlePart] | None = None
        self.pressed = False  # the next settle may be urgent; if False, `is_urgent` need not be called

    def press(self, holding: Holding) -> None:
        """Settle this partition next; that may be urgent."""
        self.dirty[holding] = None
        self.pressed = True

    def is_urgent(self, now: float) -> bool:
        """Whether something waits for this settle: a lane for its record, a start for its mark, or the next owner."""
        for holding in self.dirty:
            pending = holding.pending
            if holding.blame.marking or holding.release_at is not None:
                return True
            if pending.leaving and now >= pending.retry_at:
                return True
        return False

    def settle(self, now: float) -> SettleCall:
        """One settle for all dirty partitions."""
        progress: list[Progress] = []
        aside: list[AsideRecord] = []
        gone: list[str] = []
        self.pending = []
        for holding in self.dirty:
            records = _post(holding, now)
            aside.extend(leaving.record for leaving in records.values())
            gone.extend(id_ for id_, _ in holding.pending.gone)
            progress.append(_progress(holding))
            self.pending.append(_part(holding, records))
            holding.pending.dirty = False
        self.dirty.clear()
        self.pressed = False
        self._spans = sum(len(each.done_above) for each in progress)
        return SettleCall(progress, aside, gone)

    def answered(self, now: float) -> list[SettlePart]:
        """The settle in flight was answered. Returns its parts, except those of an earlier ownership: the answer does
        not apply to a partition that was lost and assigned again."""
        self.at = now + self._interval_s + self._spans * SPAN_PACE_S
        pending, self.pending = self.pending, None
        assert pending is not None, "an answer arrived, but no settle is in flight"
        return [part for part in pending if part.holding.epoch == part.epoch]

    def marking(self) -> int:
        """How many events wait for their starts to be recorded."""
        settling = [part.holding for part in self.pending or ()]
        return sum(len(holding.blame.marking) for holding in dict.fromkeys([*settling, *self.dirty]))


def _post(holding: Holding, now: float) -> dict[int, PendingRecord]:
    """The records that the next settle carries. Their events count as done in its progress."""
    pending, tracker = holding.pending, holding.events.tracker
    if now < pending.retry_at:
        return {}
    for position, leaving in pending.leaving.items():
        if leaving.entry is not None:
            tracker.leave(position)
    return dict(pending.leaving)


def _progress(holding: Holding) -> Progress:
    tracker = holding.events.tracker
    tries = holding.blame.open_tries(tracker, holding.pending.leaving)
    fresh = tuple(tracker.fresh)
    return Progress(holding.partition, holding.epoch or 0, tracker.watermark, tracker.done_above(), fresh, tries)


def _part(holding: Holding, records: dict[int, PendingRecord]) -> SettlePart:
    tracker = holding.events.tracker
    marks = [p for p in holding.blame.marking if p in records or p in tracker.open]
    return SettlePart(holding, holding.epoch or 0, len(tracker.fresh), len(holding.pending.gone), records, marks)


def part_settled(part: SettlePart, now: float) -> list[Entry]:
    """This part of a settle took effect. Returns the events whose starts are recorded now."""
    holding = part.holding
    holding.events.tracker.forget(part.fresh)
    holding.pending.removed(part.gone)
    _stored(holding, part.records, now)
    return holding.blame.marked(part.marks)


def _stored(holding: Holding, records: dict[int, PendingRecord], now: float) -> None:
    pending, aside, dirty = holding.pending, holding.aside, holding.pending.dirty
    if pending.refusing and (records or not pending.leaving):
        pending.refusing = False
        holding.unshelve()
    for position, stored in records.items():
        if pending.leaving.get(position) is stored:
            del pending.leaving[position]
        if stored.entry is not None:
            holding.done(stored.entry, now)
        parked = stored.parked
        if parked is not None and aside.parking.records.get(position) is parked and position not in pending.leaving:
            following = aside.stored(parked)
            if following is not None:
                holding.turn(following, now)
    pending.dirty = dirty  # the same settle already stored that these are done


def part_refused(part: SettlePart, now: float) -> None:
    """This part of a settle had no effect: reopen its events."""
    holding, pending = part.holding, part.holding.pending
    if part.records:
        pending.retry_at, pending.refusing = now + ASIDE_RETRY_S, True
        for entry in [entry for entry in holding.blame.marking.values() if entry.parked is not None]:
            holding.shelve(entry)
    holding.events.tracker.reopen()
    for position, leaving in part.records.items():
        if leaving.entry is not None and position not in pending.leaving:  # an operator removed its record
            holding.done(leaving.entry, now)
    pending.dirty = True
