"""Tracks which delivered positions of one ownership are still open, and so how far everything is done."""

from array import array
from collections import deque
from collections.abc import Sequence

from onward.brokers.base import Progress
from onward.flow.entry import Entry

MAX_INTERVALS = 10_000  # in one progress; events beyond it would run again after a crash, none is lost
_TRIM_AT = 4_096
_MANY = 8  # from this number on, adding them together is faster


class Tracker:
    """Pure. Stores the *incomplete* positions, so holes in a log (compaction, markers, retention) never stall it.

    `end` is the position up to which the log has been read. Completion is O(1) in any order. There is one byte for each
    delivered position, 1 while it is open. So `bytearray.find` finds the first open one and the intervals of done ones.
    """

    __slots__ = ("_ahead", "_base", "_low", "_lowest", "_positions", "end", "flags", "fresh", "leaving", "open")

    def __init__(self, stored: Progress | None) -> None:
        self.open: dict[int, Entry] = {}  # by position
        self.leaving: dict[int, Entry] = {}  # done, if the settle in flight stores their records
        self.end = stored.watermark if stored else 0
        self.fresh: list[int] = []  # done since the last answered settle
        self.flags = bytearray()  # one for each position: 1 is open, 0 is done; the zeros are at least the gap
        self._positions = array("q")  # of the flags; so an event done above a stuck one takes nine bytes
        self._base = 0  # the slot of the first flag
        self._low = 0  # no flag below this one is open
        self._lowest = -1  # the lowest open position; -1: not known, search for it
        self._ahead = deque(stored.done_above if stored else ())  # done before this ownership, not yet passed

    def __len__(self) -> int:
        return len(self.open)

    @property
    def watermark(self) -> int:
        """The first position that is not known to be done."""
        if self._lowest >= 0:
            return self._lowest
        first = self._first()
        if first >= 0:
            self._lowest = self._positions[first]
            return self._lowest
        mark = self.end
        for start, stop in self._ahead:  # intervals done before this ownership may follow without a gap
            if start > mark:
                break
            mark = max(mark, stop)
        return mark

    def blocking(self) -> Entry | None:
        """The first open event: the watermark cannot pass it."""
        return self.open.get(self.watermark)

    @property
    def gap(self) -> int:
        """How many events are done above one that is open or leaving. An interval of an earlier owner counts as one,
        because its number of events is unknown."""
        first = self._first()
        if self.leaving:
            lowest = min(entry.slot for entry in self.leaving.values()) - self._base
            first = lowest if first < 0 else min(first, lowest)
        return len(self.flags) - first - len(self.open) - len(self.leaving) if first >= 0 else 0

    def add(self, position: int, entry: Entry) -> bool:
        """Open a delivered position. False: it is already done or known, and must not run."""
        if (position < self.end or self._ahead) and not self._fits(position):
            return False
        flags = self.flags
        self.end = position + 1
        entry.slot = self._base + len(flags)
        flags.append(1)
        self._positions.append(position)
        self.open[position] = entry
        return True

    def add_all(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """`add` for many. Returns those that should run."""
        positions = [entry.delivery.position for entry in entries] if len(entries) >= _MANY and not self._ahead else []
        if not positions or positions[0] < self.end or sorted(set(positions)) != positions:
            return [entry for entry in entries if self.add(entry.delivery.position, entry)]
        slot = self._base + len(self.flags)
        for entry in entries:
            entry.slot = slot
            slot += 1
        self.end = positions[-1] + 1
        self.flags += b"\1" * len(positions)
        self._positions.extend(positions)
        self.open.update(zip(positions, entries, strict=True))
        return entries

    def pass_over(self, position: int) -> bool:
        """A delivered position is done without running: the aside has a record of it, or the handler filters it out.
        False: it was already done."""
        fits = self._fits(position)
        if fits:
            self._skip(position)
            self.fresh.append(position)
        return fits

    def _fits(self, position: int) -> bool:
        if position < self.end:
            return False
        self.end = position + 1
        ahead = self._ahead
        while ahead and ahead[0][1] <= position:
            self._skip(ahead.popleft()[1] - 1)  # the interval is done, even if it is never delivered again
        if ahead and ahead[0][0] <= position:
            self._skip(position)
            return False
        return True

    def reached(self, position: int) -> None:
        """The log was read up to this position. Lower positions that were not delivered are holes."""
        self.end = max(self.end, position)

    def done(self, position: int) -> None:
        """Complete a position. Does nothing if it is not open."""
        entry = self.open.pop(position, None)
        if entry is not None:
            self.flags[entry.slot - self._base] = 0
            self.fresh.append(position)
            if position == self._lowest:
                self._lowest = -1

    def leave(self, position: int) -> None:
        """Complete a position in the next settle, which carries its record. Then `forget` or `reopen` follows."""
        entry = self.open.get(position)
        if entry is not None:
            self.leaving[position] = entry
            self.done(position)

    def reopen(self) -> None:
        """The settle in flight did not store its records: open their positions again."""
        again, self.leaving = self.leaving, {}
        self.open |= again
        self.fresh = [position for position in self.fresh if position not in again]
        self._lowest = -1
        for entry in again.values():
            self.flags[entry.slot - self._base] = 1
            self._low = min(self._low, entry.slot - self._base)

    def forget(self, fresh: int) -> None:
        """A settle with this many fresh positions was answered."""
        self.leaving.clear()
        del self.fresh[:fresh]
        first = self._first()
        settled = len(self.flags) if first < 0 else first
        if settled >= _TRIM_AT:
            del self.flags[:settled]
            del self._positions[:settled]
            self._base += settled
            self._low = 0

    def done_above(self) -> list[tuple[int, int]]:
        """Intervals done above the watermark, ascending. A long list is cut at the end; the rest is still true."""
        find, positions = self.flags.find, self._positions
        spans: list[tuple[int, int]] = []
        is_open = self._first()
        while is_open >= 0 and (is_done := find(0, is_open)) >= 0:
            if len(spans) == MAX_INTERVALS:
                return spans
            is_open = find(1, is_done)
            spans.append((positions[is_done - 1] + 1, positions[is_open] if is_open >= 0 else self.end))
        if is_open >= 0 and self.end > positions[-1] + 1:
            spans.append((positions[-1] + 1, self.end))
        above = self.end if self.open else self.watermark
        spans.extend((max(start, above), stop) for start, stop in self._ahead if stop > above)
        return spans

    def _skip(self, position: int) -> None:
        """Remember a position that was done before it was delivered. The next progress must include all that the stored
        one had."""
        self.flags.append(0)
        self._positions.append(position)

    def _first(self) -> int:
        """The first open flag; -1: there is none. The search starts where the last one ended."""
        first = self.flags.find(1, self._low)
        self._low = len(self.flags) if first < 0 else first
        return first
