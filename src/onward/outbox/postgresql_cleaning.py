"""Deletes published rows of an append-only outbox on PostgreSQL, in short steps."""

import time
from typing import NamedTuple

from onward.outbox.postgresql import PgConnection
from onward.outbox.postgresql_rebaseline import PUBLISHED

_MOST_PAGES = 20  # in one call
_RESTART_S = 600.0
_FUTURE_S = 86_400.0

# A time that is far in the future, or not a number, says nothing about the age of an event.
_OLD = "({0} < %(before)s OR {0} > %(future)s)"
_DELETE = f"""
WITH page AS MATERIALIZED (
    SELECT id, xid, shard, event_time FROM {{t}} WHERE id > %(after)s ORDER BY id LIMIT %(page)s
), old AS (
    SELECT r.id FROM page AS r JOIN {{t}}_shard AS s USING (shard)
    WHERE {_OLD.format("r.event_time")} AND {PUBLISHED} ORDER BY r.id LIMIT %(most)s
), gone AS (
    DELETE FROM {{t}} WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING id
)
SELECT
    (SELECT count(*) FROM gone),
    (SELECT max(id) FROM gone),
    count(*),
    max(id),
    min(id) FILTER (WHERE id NOT IN (SELECT id FROM gone)),
    coalesce(bool_or({_OLD.format("event_time")}), false)
FROM page
"""
# One cleaner at a time: two of them would wait for each other's rows.
_ALONE = "SELECT pg_try_advisory_xact_lock(hashtextextended('onward clean {t}', 0))"


class PageResult(NamedTuple):
    deleted: int
    last_deleted: int | None
    rows: int
    last: int | None
    first_left: int | None  # the lowest id that was not deleted
    old: bool  # some rows of the page are old enough


class Sweep:
    """Where the cleaner is. It goes from low ids to high ones, and then back to the first row that it had to leave.

    So it does not look again and again at rows that it has deleted: until a vacuum, they cost as much as others. From
    time to time it begins at the lowest id, for rows that were committed late."""

    def __init__(self) -> None:
        self.after = 0
        self._first_left: int | None = None
        self._restart_at = time.monotonic() + _RESTART_S

    def page(self, result: PageResult, *, page_rows: int, full: bool) -> bool:
        """Continue after this page. Returns whether there is more to do. `full`: as many rows as were asked for were
        deleted, so that the rest of the page was not looked at."""
        if full and result.last_deleted is not None:
            self._left(result.first_left, before=result.last_deleted)
            self.after = result.last_deleted
            return False
        self._left(result.first_left, before=result.last)
        if result.rows == page_rows and result.old and result.last is not None:
            self.after = result.last
            return True
        self._turn_back(result)
        return False

    def _left(self, first: int | None, *, before: int | None) -> None:
        if self._first_left is None and first is not None and before is not None and first <= before:
            self._first_left = first

    def _turn_back(self, result: PageResult) -> None:
        if time.monotonic() >= self._restart_at:
            self.after, self._restart_at = 0, time.monotonic() + _RESTART_S
        elif self._first_left is not None:
            self.after = self._first_left - 1
        elif result.last is not None:
            self.after = result.last
        self._first_left = None


def clean(connection: PgConnection, table: str, sweep: Sweep, *, keep_s: float, limit: int) -> int:
    """Delete up to `limit` published rows that are older than `keep_s`, in the transaction of the caller."""
    row = connection.execute(_ALONE.replace("{t}", table)).fetchone()
    if row is None or not row[0]:
        return 0
    deleted = 0
    for _ in range(_MOST_PAGES):
        now = time.time()
        values = {
            "after": sweep.after,
            "page": limit,
            "before": now - keep_s,
            "future": now + _FUTURE_S,
            "most": limit - deleted,
        }
        found = connection.execute(_DELETE.replace("{t}", table), values).fetchone()
        assert found is not None
        result = PageResult(*found)
        deleted += result.deleted
        if not sweep.page(result, page_rows=limit, full=deleted == limit):
            break
    return deleted
