"""What the pending list of a group says about its progress in a stream of another program. Pure.

Up to the last id that the group was given, all is done except what is pending."""

import bisect
import heapq
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from onward.brokers.base import Progress, Tries
from onward.brokers.redis.positions import position_of
from onward.errors import BrokerError
from onward.event import Partition

_MOST_TRIES = 1_000  # stored with every settle; the entries that were delivered most often
_THEIRS, _MISSING = b"tT", b"OT"  # kinds of LOOK


class LostEntry(NamedTuple):
    """It was removed from the stream before it was finished."""

    id: bytes
    position: int
    deliveries: int = 1


class PendingPage(NamedTuple):
    """A page of the pending list, as LOOK answers it."""

    last: bytes  # the last id that the group was given
    is_ours: bool  # it was adopted before, so our own progress counts too
    ids: Sequence[bytes]
    deliveries: Sequence[int]
    kinds: bytes

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "PendingPage":
        last, adopted, ids, deliveries, kinds = reply[1:]
        return cls(last, bool(adopted), ids, deliveries, kinds)


class Leftovers:
    """The entries that a group was given and has not finished."""

    __slots__ = ("positions", "until")

    def __init__(self, positions: Iterable[int], until: int) -> None:
        self.positions = array("q", positions)  # ascending
        self.until = until  # above it, nothing was given out

    def between(self, start: int, stop: int) -> set[int]:
        """Those in [start, stop). Whatever else lies there, below `until`, other consumers have finished."""
        positions = self.positions
        return set(positions[bisect.bisect_left(positions, start) : bisect.bisect_left(positions, stop)])


class PageWork(NamedTuple):
    """What to do about the entries of a page."""

    takes: Sequence[bytes] = ()  # from other consumers
    lost: Sequence[LostEntry] = ()


class Stocktaking:
    """Goes through the pages of a pending list."""

    def __init__(self, stored: Progress | None) -> None:
        """`stored`: what was settled last. None if the group was never adopted: then only its own list counts."""
        self._stored = stored
        self.pending: dict[int, int] = {}  # by position: how often it was delivered
        self.is_changed = stored is None  # others have read, or entries are lost: our own counts are void
        self._open = array("q")
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
                del self.pending[position]
                continue
            if kind in _THEIRS:
                takes.append(id_)
            if not is_done:
                self._open.append(position)
                # Each delivery but the last was followed by another one, so it failed. The last was interrupted.
                if kind in _THEIRS and deliveries > 1:
                    self._failed[position] = deliveries - 1
        if len(self._failed) > 10 * _MOST_TRIES:
            self._failed = _worst(self._failed)
        self.is_changed |= bool(takes or lost)
        return PageWork(takes, lost)

    def result(self, partition: Partition, epoch: int, last: bytes) -> tuple[Progress, Leftovers]:
        """When all pages are through."""
        stored, given = self._stored, fitting_position(last)
        until = given + 1 if given else 0
        above = [] if stored is None else list(stored.done_above)
        if self._open:
            watermark = self._open[0]
        else:
            watermark = max(until, stored.watermark if stored else 0)
            for start, stop in above:
                watermark = max(watermark, stop) if start <= watermark else watermark
        above = [(max(start, watermark), stop) for start, stop in above if stop > watermark]
        progress = Progress(partition, epoch, watermark, above, tries=self._tries())
        return progress, Leftovers(self._open, until)

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
