"""Decides which records of a partition to read from the store. Pure."""


class RecordLoading:
    """The loading of one ownership: first all records, page by page, later those whose events did not fit in memory."""

    __slots__ = ("_after", "asked", "doubted", "loaded", "loading", "wanted")

    def __init__(self, *, loaded: bool) -> None:
        self.loaded = loaded  # all records of the aside have been read; until then nothing is dispatched
        self.loading = False
        self.wanted: set[int] = set()  # records whose turn has come and whose events are not in memory
        self.asked: set[int] = set()  # those that were wanted when the page was requested
        self.doubted: set[int] = set()  # wanted records whose state in the store is uncertain
        self._after: int | None = None

    def next(self) -> int | None:
        """The position after which to read the next page, -1 for the first page. None: there is nothing to read."""
        if self.loading:
            return None
        if not self.loaded:
            return -1 if self._after is None else self._after
        if not self.wanted:
            return None
        self._after = min(self.wanted) - 1
        self.asked = set(self.wanted)
        return self._after

    def read_to(self, last: int | None) -> list[int]:
        """A page was read up to `last`; None: there were no more records. Returns the wanted positions in its range."""
        self.loading = False
        after = self._after if self._after is not None else -1
        if not self.loaded:
            self._after = last if last is not None else None
            self.loaded = last is None
            return []
        return [p for p in self.wanted if p > after and (last is None or p <= last)]

    def forget(self, position: int) -> None:
        """The record at this position need not be read any more."""
        self.wanted.discard(position)
