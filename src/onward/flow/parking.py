"""An index of one partition's records in the aside: which keys are parked, and in which order they come back."""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from onward.event import Event
from onward.flow.entry import ParkedRecord


class Parking:
    """Pure. An index of a partition's waiting and held records (and dead ones that hold their key).

    A key is parked while it has a record here. Its records come back by position, one at a time. Up to `cache_bytes`
    of events stay in memory; the others are read again from the store when their turn comes. Adding a record and
    finding the next one of a key take constant time.
    """

    __slots__ = ("_cache_bytes", "_cached", "_keys", "records")

    def __init__(self, cache_bytes: int) -> None:
        self.records: dict[int, ParkedRecord] = {}  # by position
        self._keys: dict[str, deque[ParkedRecord]] = {}  # by key, ascending; only the first is certain to be current
        self._cache_bytes = cache_bytes
        self._cached = 0

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, position: int) -> bool:
        return position in self.records

    def __iter__(self) -> Iterator[ParkedRecord]:
        return iter(self.records.values())

    @property
    def keys(self) -> int:
        return len(self._keys)

    def head(self, key: str | None) -> ParkedRecord | None:
        """The next record of a key."""
        records = self._keys.get(key) if key is not None else None
        return records[0] if records else None

    def add(self, parked: ParkedRecord) -> None:
        """Add a new record, or a new version of a known one."""
        self.remove(parked.position)
        self.records[parked.position] = parked
        self._fit(parked)
        if parked.key is not None:
            records = self._keys.setdefault(parked.key, deque())
            if not records or parked.position >= records[-1].position:
                records.append(parked)
            elif parked.position < records[0].position:
                records.appendleft(parked)
            else:
                insort(records, parked, key=_position)

    def remove(self, position: int) -> ParkedRecord | None:
        parked = self.records.pop(position, None)
        if parked is None:
            return None
        self._cached -= parked.size if parked.event is not None else 0
        if parked.key is not None:
            records = self._keys[parked.key]
            while records and self.records.get(records[0].position) is not records[0]:
                records.popleft()
            if not records:
                del self._keys[parked.key]
        return parked

    def refill(self, parked: ParkedRecord, event: Event, *, must: bool) -> None:
        """A known record was read again. Keep its event in memory if it is needed now (`must`) or there is room."""
        if parked.event is None and (must or self._cached + parked.size <= self._cache_bytes):
            parked.event = event
            self._cached += parked.size

    def drop(self, parked: ParkedRecord) -> None:
        """Drop the event from memory: it must be read again."""
        if parked.event is not None:
            parked.event = None
            self._cached -= parked.size

    def _fit(self, parked: ParkedRecord) -> None:
        if parked.event is None:
            return
        if self._cached + parked.size > self._cache_bytes and parked.stored:
            parked.event = None
        else:
            self._cached += parked.size

    def shed(self, parked: ParkedRecord) -> None:
        """The record is stored, so drop its event from memory if there is no room."""
        if parked.event is not None and not parked.drawn and self._cached > self._cache_bytes:
            parked.event = None
            self._cached -= parked.size


def _position(parked: ParkedRecord) -> int:
    return parked.position
