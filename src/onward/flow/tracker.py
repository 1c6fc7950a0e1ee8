"""Which delivered positions of one ownership are still open, hence how far everything is done."""

from collections import OrderedDict, deque
from collections.abc import Mapping
from itertools import islice

from onward.brokers.base import Progress
from onward.flow.entry import Entry

MAX_SCAN = 10_000  # open positions looked at for one progress: its cost must not grow with the backlog


class Tracker:
    """Pure. Holds the *incomplete* positions, so holes in a log (compaction, markers, retention) never stall it.

    `end` is the position up to which the log has been seen. Completion is O(1) in any order.
    """

    __slots__ = ("_ahead", "_open", "end", "fresh", "skipped")

    def __init__(self, stored: Progress | None) -> None:
        self.end = stored.watermark if stored else 0
        self.fresh: list[int] = []  # done since the last answered settle
        self.skipped = 0  # delivered again although done or known
        self._open: OrderedDict[int, Entry] = OrderedDict()
        self._ahead = deque(stored.done_above if stored else ())  # done before this ownership, not yet passed

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open(self) -> Mapping[int, Entry]:
        return self._open

    @property
    def watermark(self) -> int:
        """The next position not known done."""
        return next(iter(self._open), self.end)

    def add(self, position: int, entry: Entry) -> bool:
        """Take a delivered position. False: it is done or known already, and must not run."""
        if position < self.end:
            self.skipped += 1
            return False
        self.end = position + 1
        ahead = self._ahead
        while ahead and ahead[0][1] <= position:
            ahead.popleft()
        if ahead and ahead[0][0] <= position:
            self.skipped += 1
            return False
        self._open[position] = entry
        return True

    def reached(self, position: int) -> None:
        """The log was read up to here; what was not delivered below is a hole."""
        self.end = max(self.end, position)

    def done(self, position: int) -> bool:
        """Complete a position; harmless when it is not open."""
        if self._open.pop(position, None) is None:
            return False
        self.fresh.append(position)
        return True

    def reopen(self, entries: dict[int, Entry]) -> None:
        """Undo `done` for these: what should have gone with them was not stored."""
        self._open = OrderedDict(sorted((entries | self._open).items()))
        self.fresh = [position for position in self.fresh if position not in entries]

    def done_above(self) -> list[tuple[int, int]]:
        """Intervals done above the watermark, ascending. A long list is cut at the top: any prefix of it is true."""
        positions = iter(self._open)
        below = next(positions, None)
        if below is None:
            return [(max(start, self.end), stop) for start, stop in self._ahead if stop > self.end]
        spans = []
        for position in islice(positions, MAX_SCAN):
            if position > below + 1:
                spans.append((below + 1, position))
            below = position
        if next(positions, None) is not None:
            return spans
        if self.end > below + 1:
            spans.append((below + 1, self.end))
        spans.extend((max(start, self.end), stop) for start, stop in self._ahead if stop > self.end)
        return spans
