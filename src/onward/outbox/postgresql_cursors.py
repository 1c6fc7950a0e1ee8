"""How far the shards of an append-only outbox are published, and what to read next. Pure.

A snapshot of PostgreSQL, such as 10:20:10,14, says which transactions have ended: those below its xmax (20) except the
listed ones. If a row is visible in a snapshot, then so are the earlier rows of its key: the transaction that wrote them
had committed before the later one could write. So the rows between two snapshots, by id, have each key in its order.
A transaction that stays open for long is listed in the snapshots, and delays only its own rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ShardCursor(NamedTuple):
    """Every row of the shard that is visible in `seen` is published.

    With `until`, a backlog is read page by page: the rows that are visible in `until` but not in `seen`. Those with ids
    up to `last` are published. `top` is the highest id of the backlog, or above it."""

    seen: str
    until: str | None = None
    last: int = 0
    top: int = 0

    @property
    def text(self) -> str:
        """To compare it with the stored one."""
        return f"{self.seen} {self.until or '-'} {self.last} {self.top}"


class CursorMove(NamedTuple):
    before: ShardCursor
    after: ShardCursor


class Section(NamedTuple):
    """Shards that are read together. `parts`: which of them have the same `seen`. Without `until` they have no backlog
    that was begun, and everything after `seen` is to be read."""

    until: str | None
    last: int
    top: int
    parts: Sequence[tuple[str, Sequence[int]]]

    def backlog(self, until: str, last: int, top: int) -> "Section":
        """The same shards, read page by page from now on."""
        return Section(until, last, top, self.parts)

    def moves(self, before: Mapping[int, ShardCursor], published: int | None) -> dict[int, CursorMove]:
        """How the cursors move if the rows of the backlog with ids up to `published` are published. None: all rows."""
        assert self.until is not None
        moves = {}
        for seen, shards in self.parts:
            after = ShardCursor(seen, self.until, published, self.top) if published is not None else None
            for shard in shards:
                moves[shard] = CursorMove(before[shard], after or ShardCursor(self.until))
        return moves


def sections(cursors: Mapping[int, ShardCursor]) -> list[Section]:
    """All shards without a backlog are one section. Of the others, those that are equally far."""
    found: dict[tuple[str | None, int, int], dict[str, list[int]]] = {}
    for shard, cursor in sorted(cursors.items()):
        place = (cursor.until, cursor.last, cursor.top) if cursor.until else (None, 0, 0)
        found.setdefault(place, {}).setdefault(cursor.seen, []).append(shard)
    return [Section(*place, tuple(parts.items())) for place, parts in found.items()]


def rotated(every: Sequence[Section], by: int) -> list[Section]:
    """Each section comes first in its turn, so that none starves."""
    start = by % len(every) if every else 0
    return [*every[start:], *every[:start]]


# -- conditions in SQL, with %s for each value ------------------------------------------------------------------------


class Condition(NamedTuple):
    sql: str
    values: Sequence[Any]


def new_rows(section: Section) -> list[Condition]:
    """Disjoint conditions: together, the rows that are not visible in `seen`. The index on xid finds each."""
    found = []
    for seen, shards in section.parts:
        xmax, listed = _numbers(seen)
        found.append(Condition("shard = ANY(%s::smallint[]) AND xid >= %s::xid8", (list(shards), xmax)))
        if listed:
            among = Condition("shard = ANY(%s::smallint[]) AND xid = ANY(%s::xid8[])", (list(shards), listed))
            found.append(among)
    return found


def backlog_rows(section: Section) -> Condition:
    """The rows of the backlog that are not published. Only the index on id can find them: in its order, a page is the
    beginning of what is left."""
    assert section.until is not None
    part = "(shard = ANY(%s::smallint[]) AND NOT pg_visible_in_snapshot(xid, %s::pg_snapshot))"
    some = " OR ".join([part] * len(section.parts))
    values = [value for seen, shards in section.parts for value in (list(shards), seen)]
    return Condition(
        f"id > %s AND id <= %s AND pg_visible_in_snapshot(xid, %s::pg_snapshot) AND ({some})",
        (section.last, section.top, section.until, *values),
    )


def _numbers(snapshot: str) -> tuple[str, str]:
    """Its xmax, and the transactions that it lists, as an array of PostgreSQL; "" if it lists none."""
    _, xmax, listed = snapshot.split(":")
    return xmax, f"{{{listed}}}" if listed else ""
