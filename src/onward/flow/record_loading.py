"""Which records of a partition are to be read from the store. Pure."""


class RecordLoading:
    """Of one ownership. First all of them, page by page; later those whose events did not stay in memory."""

    __slots__ = ("_after", "asked", "doubted", "loaded", "loading", "wanted")

    def __init__(self, *, loaded: bool) -> None:
        self.loaded = loaded  # the records of the aside are known: until then nothing is dispatched
        self.loading = False
        self.wanted: set[int] = set()  # records whose turn has come and whose events are not in memory
        self.asked: set[int] = set()  # of the wanted, those known when the page was asked for
        self.doubted: set[int] = set()  # of the wanted, those whose state is not sure
        self._after: int | None = None

    def next(self) -> int | None:
        """After which position to read records, -1 for the first; None: nothing to read."""
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
        """A page was read that ended here; None: there were no more. Returns which of the wanted it could have had."""
        self.loading = False
        after = self._after if self._after is not None else -1
        if not self.loaded:
            self._after = last if last is not None else None
            self.loaded = last is None
            return []
        return [p for p in self.wanted if p > after and (last is None or p <= last)]

    def forget(self, position: int) -> None:
        """Its record is not to be read any more."""
        self.wanted.discard(position)
