"""What the pending list of a group says about its progress in a stream of another program. Pure.

Where other consumers have read, all is done except what is pending. Where we have read, our own progress counts, and
whatever became of the pending list."""

import bisect
import heapq
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from onward.brokers.base import Progress, Tries
from onward.brokers.redis.positions import position_of
from onward.errors import BrokerError
from onward.event import Partition

_MOST_TRIES = 1_000  # stored with every settle; the entries that were delivered most often
_THEIRS, _MISSING = b"tT", b"OT"  # kinds of LOOK
_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(tuple[list[tuple[int, int]], bytes]).decode


class LostEntry(NamedTuple):
    """It was removed from the stream before it was finished."""

    id: bytes
    position: int
    deliveries: int = 1


class PendingPage(NamedTuple):
    """A page of the pending list, as LOOK answers it."""

    last: bytes  # the last id that the group was given
    is_ours: bool  # it was adopted before, so our own progress counts too
    ours: bytes  # the last id that we gave out
    ids: Sequence[bytes]
    deliveries: Sequence[int]
    kinds: bytes

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "PendingPage":
        last, adopted, ours, ids, deliveries, kinds = reply[1:]
        return cls(last, bool(adopted), ours or b"0-0", ids, deliveries, kinds)


class Leftovers:
    """The intervals that other consumers have read. Of the entries in them only those at `positions` are open."""

    __slots__ = ("intervals", "positions")

    def __init__(self, intervals: Sequence[tuple[int, int]], positions: Iterable[int]) -> None:
        self.intervals = intervals  # ascending and disjoint
        self.positions = array("q", positions)  # ascending

    @classmethod
    def decode(cls, data: bytes | None) -> "Leftovers":
        """As `encoded` made it; nothing: there are none."""
        if not data:
            return cls((), ())
        intervals, positions = _decode(data)
        left = cls(intervals, ())
        left.positions.frombytes(positions)
        return left

    def encoded(self) -> bytes:
        return _encode((self.intervals, self.positions.tobytes())) if self.intervals else b""

    @property
    def until(self) -> int:
        """Above it, we were the only reader."""
        return self.intervals[-1][1] if self.intervals else 0

    def is_theirs(self, position: int) -> bool:
        at = bisect.bisect_right(self.intervals, position, key=lambda interval: interval[0]) - 1
        return at >= 0 and position < self.intervals[at][1]

    def between(self, start: int, stop: int) -> set[int]:
        """The open positions in [start, stop)."""
        positions = self.positions
        return set(positions[bisect.bisect_left(positions, start) : bisect.bisect_left(positions, stop)])


class PageWork(NamedTuple):
    """What to do about the entries of a page."""

    takes: Sequence[bytes] = ()  # from other consumers
    lost: Sequence[LostEntry] = ()


class Stocktaking:
    """Goes through the pages of a pending list."""

    def __init__(self, stored: Progress | None, ours: bytes, left: Leftovers) -> None:
        """`stored`: what was settled last. None if the group was never adopted: then only its own list counts. `ours`:
        the last id that we gave out. `left`: what was left at the last adoption."""
        self._stored = stored
        self._ours = fitting_position(ours)
        self._left = left
        self.pending: dict[int, int] = {}  # by position: how often it was delivered
        self.is_changed = stored is None  # others have read, or entries are lost: our own counts are void
        self._open = array("q")  # where others have read since
        self._lost: set[int] = set()
        self._failed: dict[int, int] = {}

    def page(self, page: PendingPage) -> PageWork:
        takes: list[bytes] = []
        lost: list[LostEntry] = []
        for id_, deliveries, kind in zip(page.ids, page.deliveries, page.kinds, strict=True):
            position = fitting_position(id_)
            self.pending[position] = deliveries
            is_done = self._is_done(position)  # it waits in the aside, or could not be acknowledged when it was done
            if kind in _MISSING and not is_done:
                lost.append(LostEntry(id_, position, deliveries))
                self._lost.add(position)
                del self.pending[position]
                continue
            if kind in _THEIRS:
                takes.append(id_)
            if not is_done:
                if self._stored is None or position > self._ours:
                    self._open.append(position)
                # Each delivery but the last was followed by another one, so it failed. The last was interrupted.
                if kind in _THEIRS and deliveries > 1:
                    self._failed[position] = deliveries - 1
        if len(self._failed) > 10 * _MOST_TRIES:
            self._failed = _worst(self._failed)
        self.is_changed |= bool(takes or lost)
        return PageWork(takes, lost)

    def result(self, partition: Partition, epoch: int, last: bytes) -> tuple[Progress, Leftovers]:
        """When all pages are through. `last`: the last id that the group was given."""
        stored, given = self._stored, fitting_position(last)
        until = given + 1 if given else 0
        if stored is None:
            intervals, positions = [(0, until)] if until else [], self._open
            progress = Progress(partition, epoch, positions[0] if positions else until, (), tries=self._tries())
        else:
            left = self._left
            intervals = [interval for interval in left.intervals if interval[1] > stored.watermark]
            positions = array("q", [each for each in left.positions if self._is_left(each)])
            if until > self._ours + 1:
                intervals.append((self._ours + 1, until))
                positions += self._open
            progress = Progress(partition, epoch, stored.watermark, stored.done_above, tries=self._tries())
        return progress, Leftovers(intervals, positions)

    def passed(self, progress: Progress) -> int:
        """The position of the last id that the group must have been given."""
        return max(self._ours, progress.watermark - 1)

    def _is_left(self, position: int) -> bool:
        return position not in self._lost and not self._is_done(position)

    def _tries(self) -> dict[int, Tries]:
        stored = dict(self._stored.tries) if self._stored else {}
        return {position: Tries(failed) for position, failed in _worst(self._failed).items()} | stored

    def _is_done(self, position: int) -> bool:
        stored = self._stored
        if stored is None:
            return False
        if position < stored.watermark:
            return True
        at = bisect.bisect_right(stored.done_above, position, key=lambda interval: interval[0]) - 1
        return at >= 0 and position < stored.done_above[at][1]


def _worst(failed: dict[int, int]) -> dict[int, int]:
    if len(failed) <= _MOST_TRIES:
        return failed
    return dict(heapq.nlargest(_MOST_TRIES, failed.items(), key=lambda item: item[1]))


def fitting_position(id_: bytes) -> int:
    position = position_of(id_)
    if position is None:
        raise BrokerError(f"the id {id_.decode()} in its pending list is too large for a position; XACK it")
    return position
