"""The aside of one partition, rebuilt from a log. Pure: every process that reads the same log gets the same records.

The log may be compacted. It has three kinds of keys:

- A record's id. The value is the record, or nothing after the record was removed.
- "!fence". The fence of the owner. An entry with a lower fence after it is from a former owner and has no effect.
- "!move:<uuid>". A request by a process that is not the owner. It takes effect at its place in the log, for records
  that are in the expected state there. So every reader knows the outcome without an answer from the owner.

In memory, a record is a row. Its body may be large, so the row has it only while there is room. Otherwise the body is
read again from its offset in the log.
"""

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from onward.brokers.base import AsideRecord, State, Tries

FENCE = "!fence"
MOVE = "!move:"
_MOST_NEWS = 10_000
_decode = msgspec.msgpack.Decoder(AsideRecord).decode


class MoveRequest(msgspec.Struct, frozen=True):
    ids: Sequence[str]
    expect: State
    to: State | None  # None: remove
    due: float | None


class LogEntry(msgspec.Struct, frozen=True):
    """One message of the log. If `value` is None, the key is removed."""

    key: str
    value: bytes | None
    fence: int = 0
    offset: int = 0


class AppliedMove(msgspec.Struct, frozen=True):
    """A request that has taken effect."""

    offset: int  # the offset of the request
    ids: Sequence[str]
    to: State | None
    due: float | None


class AsideRow(msgspec.Struct, frozen=True, gc=False):
    """A record without its body. If `body` is None, it must be read at `offset`."""

    id: str
    position: int
    state: State
    due: float | None
    tries: Tries
    key: str | None
    error: str | None
    failed_at: float | None
    offset: int
    size: int  # the size of the body
    body: bytes | None

    def record(self, body: bytes) -> AsideRecord:
        """The record: the body as it was written, with the changes of later moves."""
        written = _decode(body)
        if (written.state, written.due, written.tries) == (self.state, self.due, self.tries):
            return written
        return msgspec.structs.replace(written, state=self.state, due=self.due, tries=self.tries, wait_s=None)


class BodyRoom:
    """Limits the bytes of bodies in memory, over all tables that share it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, size: int, state: State) -> bool:
        """Reserve room for a body. False if it does not fit. Dead records are rarely read, so they get at most half."""
        fits = self.taken + size <= (self.most // 2 if state is State.DEAD else self.most)
        self.taken += size if fits else 0
        return fits


class AsideTable:
    def __init__(self, room: BodyRoom) -> None:
        self.fence = 0
        self.rows: dict[str, AsideRow] = {}
        self.news: deque[AppliedMove] = deque(maxlen=_MOST_NEWS)  # not yet reported to the owner
        self.outcomes: dict[str, int] = {}  # by key of a request: how many records it moved
        # Keys whose last entry has no effect. Compaction may keep that entry instead of the one that counts.
        self.spoilt: dict[str, None] = {}
        self._room = room
        self._order: list[tuple[int, str]] = []  # sorted by position; removed records stay until there are many
        self._sorted = True
        self._effects: dict[str, set[str]] = {}  # by key of a request: the records that it still changes

    def apply(self, entry: LogEntry) -> None:
        """Apply the next entry of the log. Raises MsgspecError, and changes nothing, if the entry is not valid."""
        if entry.key == FENCE:
            self.fence = max(self.fence, entry.fence)
        elif entry.key.startswith(MOVE):
            self._requested(entry)
        elif entry.fence < self.fence:
            self.spoilt[entry.key] = None
        else:
            self._written(entry)

    def above(self, position: int) -> Iterator[AsideRow]:
        """The rows above a position, sorted by position."""
        if len(self._order) > 2 * len(self.rows) + 100:
            self._order = [(row.position, name) for name, row in self.rows.items()]
            self._sorted = False
        if not self._sorted:
            self._order.sort()
            self._sorted = True
        for at in range(bisect_right(self._order, (position + 1,)), len(self._order)):
            row = self.rows.get(self._order[at][1])
            again = at > 0 and self._order[at] == self._order[at - 1]  # the record was removed and written again
            if row is not None and not again:
                yield row

    def spent(self) -> list[str]:
        """The requests that no longer have an effect. The owner removes them from the log."""
        return [key for key, ids in list(self._effects.items()) if not ids]

    def remove(self, name: str) -> None:
        row = self.rows.pop(name, None)
        if row is not None and row.body is not None:
            self._room.taken -= row.size

    def relocate(self, name: str, offset: int) -> None:
        """The body of this record can also be read at this offset, and soon only there."""
        self.rows[name] = msgspec.structs.replace(self.rows[name], offset=offset)

    def clear(self) -> None:
        """Remove all rows and free their room."""
        for name in list(self.rows):
            self.remove(name)

    def _written(self, entry: LogEntry) -> None:
        record = None if entry.value is None else self._decoded(entry)
        self.spoilt.pop(entry.key, None)
        for ids in self._effects.values():
            ids.discard(entry.key)
        known = entry.key in self.rows
        self.remove(entry.key)
        if record is not None:
            self.rows[entry.key] = self._row(entry, record)
            if not known:
                self._place(record.position, entry.key)

    def _decoded(self, entry: LogEntry) -> AsideRecord:
        try:
            return _decode(entry.value or b"")
        except msgspec.MsgspecError:
            if entry.key in self.rows:
                self.spoilt[entry.key] = None  # after compaction it would hide the record
            raise

    def _row(self, entry: LogEntry, record: AsideRecord) -> AsideRow:
        failure, key, size = record.failure, record.event.key, len(entry.value or b"")
        return AsideRow(
            id=entry.key,
            position=record.position,
            state=record.state,
            due=record.due,
            tries=record.tries,
            key=None if key is None else sys.intern(key),  # many records have the same key
            error=sys.intern(failure.error) if failure else None,
            failed_at=failure.last if failure else None,
            offset=entry.offset,
            size=size,
            body=entry.value if self._room.take(size, record.state) else None,
        )

    def _place(self, position: int, name: str) -> None:
        place = (position, name)
        self._sorted = self._sorted and (not self._order or self._order[-1] < place)
        self._order.append(place)

    def _requested(self, entry: LogEntry) -> None:
        if entry.value is None:
            self._effects.pop(entry.key, None)
            self.outcomes.pop(entry.key, None)
            return
        request = msgspec.msgpack.decode(entry.value, type=MoveRequest)
        moved = [name for name in dict.fromkeys(request.ids) if self._move(name, request)]
        self.outcomes[entry.key] = len(moved)
        self._effects[entry.key] = set(moved)
        if moved:
            self.news.append(AppliedMove(entry.offset, moved, request.to, request.due))

    def _move(self, name: str, request: MoveRequest) -> bool:
        row = self.rows.get(name)
        if row is None or row.state is not request.expect:
            return False
        if request.to is None:
            self.remove(name)
            return True
        tries = Tries() if request.expect is State.DEAD else row.tries
        self.rows[name] = msgspec.structs.replace(row, state=request.to, due=request.due, tries=tries)
        return True
