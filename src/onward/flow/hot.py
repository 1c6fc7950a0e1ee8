"""Which keys bring the most events, in bounded memory."""

from collections import Counter
from collections.abc import Iterable


class HotKeys:
    """Pure. The keys with more than 1/capacity of all events are never missed (Misra and Gries, 1982)."""

    __slots__ = ("_capacity", "_counts")

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._counts: Counter[str | None] = Counter()

    def add(self, keys: Iterable[str | None]) -> None:
        counts = self._counts
        counts.update(keys)
        if len(counts) > 16 * self._capacity:  # seldom: the cut costs as much as the table is long
            cut = counts.most_common(self._capacity + 1)[-1][1]
            self._counts = Counter({key: count - cut for key, count in counts.items() if count > cut})

    def top(self, count: int) -> list[tuple[str, int]]:
        """The hottest keys with a lower bound of their counts."""
        self._counts.pop(None, None)
        return [(key, many) for key, many in self._counts.most_common(count) if key is not None]
