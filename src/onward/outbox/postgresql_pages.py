"""Reads the rows of an append-only outbox on PostgreSQL in pages that are bounded in rows and bytes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from onward.outbox.base import OutboxRow
from onward.outbox.postgresql import PgConnection
from onward.outbox.postgresql_cursors import Condition, Section, backlog_rows, new_rows
from onward.outbox.rows import COLUMNS, row_of

FIELDS = ", ".join(("id", "shard", *COLUMNS))
_LONG_S = 600.0  # for a statement that looks at a whole backlog

# The window functions count and measure rows before their payloads are fetched. `some` has the rows of a page, and one
# more if there are more.
_PAGE = f"""
SELECT {FIELDS}, many, top FROM (
    SELECT {FIELDS}, count(*) OVER () AS many, max(id) OVER () AS top, row_number() OVER ascending AS nth,
        sum({" + ".join(f"coalesce(octet_length({each}), 0)" for each in ("payload", "headers", "event_key"))})
            OVER ascending AS bytes
    FROM ({{some}}) AS found WINDOW ascending AS (ORDER BY id)
) AS measured
WHERE nth = 1 OR (bytes <= %s AND nth <= CASE WHEN many <= %s THEN many ELSE %s END) ORDER BY id
"""
_BOUNDS = "SELECT min(id), max(id), count(*) FROM ({some}) AS found"  # count: so that it does not use the index on id


class SectionPage(NamedTuple):
    """Rows of a section. `published`: the id up to which its rows are published after this page; None if all are."""

    section: Section
    rows: Sequence[OutboxRow]
    published: int | None


class PageReader:
    """Reads in the transaction of the caller, in which all statements have one snapshot."""

    def __init__(self, connection: PgConnection, table: str, *, limit: int, max_bytes: int) -> None:
        self._connection = connection
        self._table = table
        self._limit = limit
        self._max_bytes = max_bytes

    def page(self, section: Section, snapshot: str) -> SectionPage:
        """The next rows of a section. If a section without a backlog has more rows than fit, they become a backlog."""
        if section.until is None:
            some = _united(new_rows(section), FIELDS, self._limit + 1)
            rows, many, top = self._measured(some, if_more=1)
            if many <= self._limit:
                return _page(section.backlog(snapshot, 0, top), rows, many)
            section = section.backlog(snapshot, *self._bounds(section))
        where = backlog_rows(section)
        statement = f"SELECT {FIELDS} FROM {{t}} WHERE {where.sql} ORDER BY id LIMIT %s"
        rows, many, _ = self._measured(Condition(statement, (*where.values, self._limit + 1)), if_more=self._limit)
        return _page(section, rows, many)

    def rows(self, some: Condition) -> list[OutboxRow]:
        """Those of the rows that fit."""
        return self._measured(some, if_more=self._limit)[0]

    def _bounds(self, section: Section) -> tuple[int, int]:
        """The id before the first one, and the last one."""
        with self._connection.patience(_LONG_S):
            ((low, high, _),) = self._run(_BOUNDS, _united(new_rows(section), "id"))
        return low - 1, high

    def _measured(self, some: Condition, *, if_more: int) -> tuple[list[OutboxRow], int, int]:
        """Those of the rows that fit, how many there are, and the highest id. `if_more`: how many to fetch if there are
        more than the limit."""
        bounds = (self._max_bytes, self._limit, if_more)
        found = self._run(_PAGE, Condition(some.sql, (*some.values, *bounds)))
        many, top = found[0][-2:] if found else (0, 0)
        return [row_of(*row[:-2]) for row in found], many, top

    def _run(self, text: str, some: Condition) -> list[tuple[Any, ...]]:
        statement = text.replace("{some}", some.sql).replace("{t}", self._table)
        return self._connection.execute(statement, some.values, binary=True).fetchall()


def _page(section: Section, rows: Sequence[OutboxRow], many: int) -> SectionPage:
    return SectionPage(section, rows, rows[-1].id if len(rows) < many else None)


def _united(conditions: Sequence[Condition], fields: str, limit: int | None = None) -> Condition:
    """The rows that meet one of the conditions. Each of them stops at the limit by itself, and so do all together."""
    end = "" if limit is None else f" LIMIT {limit}"
    some = " UNION ALL ".join(f"(SELECT {fields} FROM {{t}} WHERE {each.sql}{end})" for each in conditions)
    values = [value for each in conditions for value in each.values]
    return Condition(f"SELECT {fields} FROM ({some}) AS united{end}", values)
