"""The aside of one partition, folded from its log. Pure: everyone who reads the same log sees the same records.

The log may be compacted. Its keys are of three kinds. A record's id: the record, or nothing once it is gone. "!fence":
the fence of the owner. "!move:<uuid>": a request by a process that is not the owner. A request takes effect at its
place in the log, if the record is in the expected state there, so its outcome is known without an answer. What a former
owner writes behind a higher fence is void.

A record is a row here. Its body, which may be large, is kept with the row while there is room; otherwise it is read
again at its offset in the log.
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
    """One message of the log. `value` None: the key is removed."""

    key: str
    value: bytes | None
    fence: int = 0
    offset: int = 0


class AppliedMove(msgspec.Struct, frozen=True):
    """A request as it took effect."""

    offset: int  # of the request
    ids: Sequence[str]
    to: State | None
    due: float | None


class AsideRow(msgspec.Struct, frozen=True, gc=False):
    """What is known of a record without its body. `body` None: it is to be read at `offset`."""

    id: str
    position: int
    state: State
    due: float | None
    tries: Tries
    key: str | None
    error: str | None
    failed_at: float | None
    offset: int
    size: int  # of the body
    body: bytes | None

    def record(self, body: bytes) -> AsideRecord:
        """The record: its body as it was written, and what was moved since."""
        written = _decode(body)
        if (written.state, written.due, written.tries) == (self.state, self.due, self.tries):
            return written
        return msgspec.structs.replace(written, state=self.state, due=self.due, tries=self.tries, wait_s=None)


class BodyRoom:
    """How many bytes of bodies are kept, over all tables that share it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, size: int, state: State) -> bool:
        """Dead ones are seldom read: they may fill half of it."""
        fits = self.taken + size <= (self.most // 2 if state is State.DEAD else self.most)
        self.taken += size if fits else 0
        return fits


class AsideTable:
    def __init__(self, room: BodyRoom) -> None:
        self.fence = 0
        self.rows: dict[str, AsideRow] = {}
        self.news: deque[AppliedMove] = deque(maxlen=_MOST_NEWS)  # not yet reported to the owner
        self.outcomes: dict[str, int] = {}  # of requests, by their keys
        self.spoilt: dict[str, None] = {}  # keys with a void entry, which compaction may keep in place of the true one
        self._room = room
        self._order: list[tuple[int, str]] = []  # by position; removed ones stay until there are many
        self._sorted = True
        self._effects: dict[str, set[str]] = {}  # requests that still change what is written of records

    def apply(self, entry: LogEntry) -> None:
        """MsgspecError: it is no entry of ours, and changes nothing."""
        if entry.key == FENCE:
            self.fence = max(self.fence, entry.fence)
        elif entry.key.startswith(MOVE):
            self._requested(entry)
        elif entry.fence < self.fence:
            self.spoilt[entry.key] = None
        else:
            self._written(entry)

    def above(self, position: int) -> Iterator[AsideRow]:
        """The rows above a position, by position."""
        if len(self._order) > 2 * len(self.rows) + 100:
            self._order = [(row.position, name) for name, row in self.rows.items()]
            self._sorted = False
        if not self._sorted:
            self._order.sort()
            self._sorted = True
        for at in range(bisect_right(self._order, (position + 1,)), len(self._order)):
            row = self.rows.get(self._order[at][1])
            again = at > 0 and self._order[at] == self._order[at - 1]  # removed once, and written again
            if row is not None and not again:
                yield row

    def spent(self) -> list[str]:
        """Requests that have no effect any more; the owner removes them from the log."""
        return [key for key, ids in list(self._effects.items()) if not ids]

    def remove(self, name: str) -> None:
        row = self.rows.pop(name, None)
        if row is not None and row.body is not None:
            self._room.taken -= row.size

    def clear(self) -> None:
        """Give back the room."""
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
                self.spoilt[entry.key] = None  # it hides a record of ours
            raise

    def _row(self, entry: LogEntry, record: AsideRecord) -> AsideRow:
        failure, key, size = record.failure, record.event.key, len(entry.value or b"")
        return AsideRow(
            id=entry.key,
            position=record.position,
            state=record.state,
            due=record.due,
            tries=record.tries,
            key=None if key is None else sys.intern(key),  # records of one key are many
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
