"""The records of one partition that wait outside the flow: which keys are parked, in which order they come back."""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from onward.event import Event
from onward.flow.entry import Ref


class Parking:
    """Pure. An index of a partition's waiting and held records (and dead ones that hold their key).

    A key is parked while it has a record here. Its records come back by position, one at a time. Events are kept
    while `cache_bytes` allow; the others are read again from the store when their turn comes. An arrival, and the
    next record of a key, cost the same however many there are.
    """

    __slots__ = ("_cache_bytes", "_cached", "_keys", "refs")

    def __init__(self, cache_bytes: int) -> None:
        self.refs: dict[int, Ref] = {}  # by position
        self._keys: dict[str, deque[Ref]] = {}  # by key, ascending; behind the first may stand what was removed
        self._cache_bytes = cache_bytes
        self._cached = 0

    def __len__(self) -> int:
        return len(self.refs)

    def __contains__(self, position: int) -> bool:
        return position in self.refs

    def __iter__(self) -> Iterator[Ref]:
        return iter(self.refs.values())

    @property
    def keys(self) -> int:
        return len(self._keys)

    def head(self, key: str | None) -> Ref | None:
        """The next record of a key."""
        refs = self._keys.get(key) if key is not None else None
        return refs[0] if refs else None

    def add(self, ref: Ref) -> None:
        """A new record, or a new version of a known one."""
        self.remove(ref.position)
        self.refs[ref.position] = ref
        self._fit(ref)
        if ref.key is not None:
            refs = self._keys.setdefault(ref.key, deque())
            if not refs or ref.position >= refs[-1].position:
                refs.append(ref)
            elif ref.position < refs[0].position:
                refs.appendleft(ref)
            else:
                insort(refs, ref, key=_position)

    def remove(self, position: int) -> Ref | None:
        ref = self.refs.pop(position, None)
        if ref is None:
            return None
        self._cached -= ref.size if ref.event is not None else 0
        if ref.key is not None:
            refs = self._keys[ref.key]
            while refs and self.refs.get(refs[0].position) is not refs[0]:
                refs.popleft()
            if not refs:
                del self._keys[ref.key]
        return ref

    def refill(self, ref: Ref, event: Event, *, must: bool) -> None:
        """A known record was read again: keep its event if its turn has come, or if there is room."""
        if ref.event is None and (must or self._cached + ref.size <= self._cache_bytes):
            ref.event = event
            self._cached += ref.size

    def drop(self, ref: Ref) -> None:
        """Its event is to be read again."""
        if ref.event is not None:
            ref.event = None
            self._cached -= ref.size

    def _fit(self, ref: Ref) -> None:
        if ref.event is None:
            return
        if self._cached + ref.size > self._cache_bytes and ref.stored:
            ref.event = None
        else:
            self._cached += ref.size

    def shed(self, ref: Ref) -> None:
        """The record is stored: its event need not stay in memory when there is no room."""
        if ref.event is not None and not ref.drawn and self._cached > self._cache_bytes:
            ref.event = None
            self._cached -= ref.size


def _position(ref: Ref) -> int:
    return ref.position
