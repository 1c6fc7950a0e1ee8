"""Which keys bring the most events, in bounded memory."""

from collections import Counter
from collections.abc import Iterable

_COUNT_AT = 512  # keys


class HotKeys:
    """Pure. The keys with more than 1/capacity of all events are never missed (Misra and Gries, 1982)."""

    __slots__ = ("_capacity", "_counts", "_seen")

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._counts: Counter[str | None] = Counter()
        self._seen: list[str | None] = []  # not counted yet: many at once cost less

    def add(self, keys: Iterable[str | None]) -> None:
        self._seen += keys
        if len(self._seen) >= _COUNT_AT:
            self._count()

    def _count(self) -> None:
        counts, seen, self._seen = self._counts, self._seen, []
        counts.update(seen)
        if len(counts) > 16 * self._capacity:  # seldom: the cut costs as much as the table is long
            cut = counts.most_common(self._capacity + 1)[-1][1]
            self._counts = Counter({key: count - cut for key, count in counts.items() if count > cut})

    def top(self, count: int) -> list[tuple[str, int]]:
        """The hottest keys with a lower bound of their counts."""
        self._count()
        self._counts.pop(None, None)
        return [(key, many) for key, many in self._counts.most_common(count) if key is not None]
