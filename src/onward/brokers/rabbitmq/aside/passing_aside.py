"""The aside of a temporary group: it exists only in the memory of its member."""

import time
from collections.abc import Iterable, Sequence

from onward.brokers.base import AsideRecord, State, record_log
from onward.brokers.core.asides import buried
from onward.brokers.core.folded_aside import FENCE, AsideRow, AsideTable, BodyRoom, LogEntry, MoveRequest
from onward.brokers.rabbitmq.aside.aside_entries import AsidePlace, move_entry, record_entry
from onward.brokers.rabbitmq.aside.aside_log import RECREATED, OnMoves

_ROOM_BYTES = 1 << 62  # bodies are nowhere else


class PassingAside:
    """As AsideStream. No other process writes into it, so nothing is ever lost or refused."""

    def __init__(self, place: AsidePlace) -> None:
        self.place = place
        self.on_moves: OnMoves | None = None
        self.is_new = True
        self.is_claimed = True
        self.is_closed = False
        self.table = AsideTable(BodyRoom(_ROOM_BYTES))
        self.witnessed: tuple[int, bytes] | None = None
        self.log_id: str | None = None

    @property
    def fence_seen(self) -> int:
        return self.table.fence

    async def catch_up(self) -> None:
        pass

    async def records(self, rows: Sequence[AsideRow]) -> list[AsideRecord]:
        return [row.record(row.body) for row in rows if row.body is not None]

    async def claim(self, fence: int) -> AsideTable:
        self.table.apply(LogEntry(FENCE, b"", fence))
        return self.table

    async def store(self, records: Sequence[AsideRecord], fence: int = 0) -> str | None:
        for record in records:
            self.table.apply(LogEntry(record.id, record_entry(record, fence).value, fence))
        return None

    async def remove(self, ids: Iterable[str], fence: int = 0) -> None:
        for name in ids:
            self.table.apply(LogEntry(name, None, fence))

    async def witness(self, progress: bytes, fence: int) -> None:
        self.witnessed = (fence, progress)

    async def bury(self, log_id: str, fence: int) -> int:
        self.log_id = log_id
        rows = [row for row in self.table.rows.values() if row.state is not State.DEAD and record_log(row.id) != log_id]
        await self.store([buried(each, RECREATED, time.time()) for each in await self.records(rows)], fence)
        return len(rows)

    async def request(self, name: str, request: MoveRequest) -> int:
        entry = move_entry(name, request)
        self.table.apply(LogEntry(entry.key, entry.value))
        moves = list(self.table.news)
        self.table.news.clear()
        if moves and self.on_moves is not None:
            self.on_moves(moves)
        return self.table.outcomes[entry.key]

    async def compact_if_long(self, fence: int = 0) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True
        self.table.clear()
