"""The aside of one partition, folded from its log. Pure: whoever reads the same log sees the same records.

The log is a compacted topic. Under a record's id stands the record, or nothing once it is gone; under "!fence" the
number of the owner; under "!move:<uuid>" a request of somebody who is not the owner. A request takes effect at its
place in the log, if the record is in the expected state there: so its outcome is known without an answer. What comes
behind a fence from an owner before it is void.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from onward.brokers.base import AsideRecord, State

FENCE = "!fence"
MOVE = "!move:"
_MOST_NEWS = 10_000
_decode = msgspec.msgpack.Decoder(AsideRecord).decode


class Request(msgspec.Struct, frozen=True):
    ids: Sequence[str]
    expect: State
    to: State | None  # None: remove
    due: float | None


class Entry(msgspec.Struct, frozen=True):
    """One message of the log. `value` None: what stood under the key is gone."""

    key: str
    value: bytes | None
    fence: int = 0
    offset: int = 0


class Moves(msgspec.Struct, frozen=True):
    """A request as it took effect."""

    offset: int  # of the request
    ids: Sequence[str]
    to: State | None
    due: float | None


class Table:
    def __init__(self) -> None:
        self.fence = 0
        self.records: dict[str, AsideRecord] = {}
        self.news: deque[Moves] = deque(maxlen=_MOST_NEWS)  # not yet told to the owner
        self.outcomes: dict[str, int] = {}  # of requests, by their keys
        self.spoilt: dict[str, None] = {}  # keys with a void entry, which compaction may keep in place of the true one
        self._order: list[tuple[int, str]] = []  # by position; what is gone stands there until there is much of it
        self._sorted = True
        self._effects: dict[str, set[str]] = {}  # requests that still change what is written of records

    def apply(self, entry: Entry) -> None:
        if entry.key == FENCE:
            self.fence = max(self.fence, entry.fence)
        elif entry.key.startswith(MOVE):
            self._requested(entry)
        elif entry.fence < self.fence:
            self.spoilt[entry.key] = None
        else:
            self._written(entry)

    def above(self, position: int) -> Iterator[AsideRecord]:
        """The records above a position, by position."""
        if len(self._order) > 2 * len(self.records) + 100:
            self._order = [(record.position, name) for name, record in self.records.items()]
            self._sorted = False
        if not self._sorted:
            self._order.sort()
            self._sorted = True
        for at in range(bisect_right(self._order, (position + 1,)), len(self._order)):
            record = self.records.get(self._order[at][1])
            again = at > 0 and self._order[at] == self._order[at - 1]  # gone once, and there anew
            if record is not None and not again:
                yield record

    def restored(self, key: str, fence: int) -> Entry:
        """What the owner writes over a void entry."""
        record = self.records.get(key)
        return Entry(key, None if record is None else msgspec.msgpack.encode(record), fence)

    def spent(self) -> list[str]:
        """Requests that have no effect any more; the owner removes them from the log."""
        return [key for key, ids in self._effects.items() if not ids]

    def _written(self, entry: Entry) -> None:
        self.spoilt.pop(entry.key, None)
        for ids in self._effects.values():
            ids.discard(entry.key)
        if entry.value is None:
            self.records.pop(entry.key, None)
        else:
            self._put(entry.key, _decode(entry.value))

    def _put(self, name: str, record: AsideRecord) -> None:
        if name not in self.records:
            place = (record.position, name)
            self._sorted = self._sorted and (not self._order or self._order[-1] < place)
            self._order.append(place)
        self.records[name] = record

    def _requested(self, entry: Entry) -> None:
        if entry.value is None:
            self._effects.pop(entry.key, None)
            self.outcomes.pop(entry.key, None)
            return
        request = msgspec.msgpack.decode(entry.value, type=Request)
        moved = [name for name in dict.fromkeys(request.ids) if self._move(name, request)]
        self.outcomes[entry.key] = len(moved)
        self._effects[entry.key] = set(moved)
        if moved:
            self.news.append(Moves(entry.offset, moved, request.to, request.due))

    def _move(self, name: str, request: Request) -> bool:
        record = self.records.get(name)
        if record is None or record.state is not request.expect:
            return False
        if request.to is None:
            del self.records[name]
            return True
        self.records[name] = record.moved(request.to, request.due)
        return True
