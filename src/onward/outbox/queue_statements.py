"""The SQL of the queue store, for MariaDB, MySQL, PostgreSQL and SQLite. Pure.

Numbers are written into the text. %s stands for each text and each time. Every UPDATE and DELETE has a condition on the
primary key: our connections to MariaDB refuse others, see queue_connections.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onward.outbox.rows import COLUMNS

CHUNK = 500
"""The most numbers of an IN list. From 1,000 on, MariaDB turns a list into a subquery."""

LONG_TEXT = 4_096
"""Bytes. A key and headers that are longer count as payload."""

PENDING, PARKED = "", "_parked"  # the two tables with rows, by the end of their names


class QueueWords(NamedTuple):
    """What differs between the databases."""

    octets: str  # the length of {} in bytes
    lane: str  # the key as a short text or as it is, compared byte by byte; a row without a key is a lane of its own
    lock: str = " FOR UPDATE"
    columns: Sequence[str] = COLUMNS
    by_id: str = ""  # a hint to use the primary key
    by_shard: str = ""  # a hint to use the index on shard and id


MARIADB = QueueWords(
    octets="OCTET_LENGTH({})",
    lane="COALESCE(SHA1(event_key), CAST(id AS CHAR))",  # MariaDB ignores trailing spaces when it compares texts
    by_id=" FORCE INDEX (PRIMARY)",
    by_shard=" FORCE INDEX ({name}_shard)",
)
POSTGRESQL = QueueWords(octets="octet_length({})", lane="COALESCE(md5(event_key), CAST(id AS text))")
SQLITE = QueueWords(
    octets="LENGTH(CAST({} AS BLOB))",
    lane="COALESCE('=' || event_key, id)",
    lock="",  # BEGIN IMMEDIATE has locked everything
    columns=(  # a column of SQLite may contain any type
        "CAST(event_id AS TEXT)",
        "CAST(topic AS TEXT)",
        "CAST(event_key AS TEXT)",
        "CAST(event_type AS TEXT)",
        "CAST(event_time AS REAL)",
        "CAST(headers AS TEXT)",
        "CAST(payload AS BLOB)",
    ),
)
_WORDS = {"mariadb": MARIADB, "postgresql": POSTGRESQL, "sqlite": SQLITE}
_COLUMNS = ", ".join(COLUMNS)
_NEVER = -(1 << 63)  # no row has this id


class QueueSql:
    """The statements for one outbox."""

    def __init__(self, dialect: str, table: str) -> None:
        words = _WORDS[dialect]
        self._words = words._replace(by_shard=words.by_shard.format(name=table.rpartition(".")[2]))
        self._table = t = table
        self.meta = f"SELECT name, value FROM {t}_meta"
        self.lock_meta = f"{self.meta} ORDER BY name{words.lock}"
        self.set_meta = f"UPDATE {t}_meta SET value = %s WHERE name = %s"
        self.relays = f"SELECT name, beat, lease_s FROM {t}_relay ORDER BY name"
        self.shards = f"SELECT shard, owner, fence FROM {t}_shard ORDER BY shard"
        self.beat = f"SELECT beat FROM {t}_relay WHERE name = %s"
        self.held = f"SELECT shard, fence FROM {t}_shard WHERE owner = %s"
        self.count_parked = f"SELECT COUNT(*), MIN(id), MAX(id) FROM {t}_parked"

    def probes(self) -> Sequence[str]:
        """Statements that change nothing, but need every right that a relay needs."""
        t, never, nobody = self._table, f"= {_NEVER}", "= ''"
        copy = self._copy(refused=False).replace("%s, %s", "'', 0")
        return (
            f"DELETE FROM {t} WHERE id {never}",
            f"UPDATE {t}_meta SET value = value WHERE name {nobody}",
            f"INSERT INTO {t}_relay (name, beat, lease_s) SELECT name, 0, 0 FROM {t}_relay WHERE name {nobody}",
            f"UPDATE {t}_relay SET beat = beat, lease_s = lease_s WHERE name {nobody}",
            f"DELETE FROM {t}_relay WHERE name {nobody}",
            f"UPDATE {t}_shard SET owner = owner, fence = fence WHERE shard = -1",
            f"{copy} WHERE id {never}",
            f"UPDATE {t}_parked SET id = id, refused = refused, why = why WHERE id {never}",
            f"DELETE FROM {t}_parked WHERE id {never}",
        )

    # -- rows: `suffix` is PENDING or PARKED ------------------------------------------------------------------------

    def read(self, shards: Iterable[int] | None, limit: int, small: int) -> str:
        """The rows with the lowest ids, of these shards or of all, in any order.

        The first column is the size of a large row, whose long columns are left out; it is null for other rows.
        A row is large if its payload has more than `small` bytes."""
        t, words = self._table, self._words
        if shards is None:
            return f"SELECT {self._thin(small)} FROM {t}{words.by_id} ORDER BY id LIMIT {limit}"
        # One scan for all shards would pass over the rows of other shards. There may be a million of them.
        pages = " UNION ALL ".join(
            f"SELECT id FROM (SELECT id FROM {t}{words.by_shard} WHERE shard = {shard} ORDER BY id LIMIT {limit}) "
            f"AS page_{shard}"
            for shard in shards
        )
        return self._at(f"SELECT id AS at_id FROM ({pages}) AS pages ORDER BY at_id LIMIT {limit}", PENDING, small)

    def parked(self, shards: Iterable[int], limit: int, small: int, *, without: int = 0) -> str:
        """As `read`, of the parked rows in lanes without a refused row. Values: the topics to leave out, `without` of
        them."""
        t, lane, ours = f"{self._table}{PARKED}", self._words.lane, f"shard IN ({numbers(shards)})"
        others = f" AND topic NOT IN ({', '.join(['%s'] * without)})" if without else ""
        free = (
            f"SELECT topic AS free_topic, {lane} AS free_lane FROM {t} WHERE {ours} GROUP BY topic, {lane} "
            "HAVING SUM(CASE WHEN refused THEN 1 ELSE 0 END) = 0"
        )
        lowest = (
            f"SELECT id AS at_id FROM {t} JOIN ({free}) AS free ON topic = free_topic AND {lane} = free_lane "
            f"WHERE {ours}{others} ORDER BY at_id LIMIT {limit}"
        )
        return self._at(lowest, PARKED, small)

    def whole(self, suffix: str, ids: Iterable[int]) -> str:
        """These rows with all columns."""
        columns = ", ".join(self._words.columns)
        return f"SELECT id, shard, {columns} FROM {self._table}{suffix}{self._words.by_id} WHERE id IN ({numbers(ids)})"

    def delete(self, suffix: str, ids: Iterable[int]) -> str:
        return f"DELETE FROM {self._table}{suffix} WHERE id IN ({numbers(ids)})"

    def park(self, ids: Iterable[int], *, refused: bool) -> str:
        """Copy rows to the parked ones. Values: why, and the time."""
        return f"{self._copy(refused=refused)}{self._words.by_id} WHERE id IN ({numbers(ids)})"

    def displaced(self, ids: Sequence[int]) -> str:
        """How many parked rows have a higher id than a later row of their lane, one of `ids`, or the same id."""
        pending, parked = self._table, f"{self._table}{PARKED}"
        return (
            f"SELECT COUNT(*) FROM {pending} AS later JOIN {parked} AS earlier "
            "ON earlier.shard = later.shard AND earlier.id >= later.id "
            f"WHERE later.id IN ({numbers(ids)}) AND earlier.id >= {min(ids)} AND "
            "(earlier.id = later.id OR (earlier.topic = later.topic AND earlier.event_key = later.event_key))"
        )

    def lower_parked(self, by: int) -> str:
        return f"UPDATE {self._table}{PARKED} SET id = id - {by} WHERE id > {_NEVER}"

    def refuse(self, row_id: int) -> str:
        """Value: why."""
        return f"UPDATE {self._table}_parked SET refused = TRUE, why = %s WHERE id = {row_id}"

    def parked_lanes(self, shards: Iterable[int]) -> str:
        """Shard, topic and key of each lane."""
        t, ours = f"{self._table}{PARKED}", f"shard IN ({numbers(shards)}) AND event_key IS NOT NULL"
        first = f"SELECT MIN(id) AS at_id FROM {t} WHERE {ours} GROUP BY topic, {self._words.lane}"
        return f"SELECT shard, topic, event_key FROM ({first}) AS places JOIN {t} ON id = at_id"

    def _copy(self, *, refused: bool) -> str:
        t = self._table
        return (
            f"INSERT INTO {t}_parked (id, shard, {_COLUMNS}, refused, why, since) "
            f"SELECT id, shard, {_COLUMNS}, {'TRUE' if refused else 'FALSE'}, %s, %s FROM {t}"
        )

    def _at(self, ids: str, suffix: str, small: int) -> str:
        """The rows that a subquery names. They are not sorted: that could write the payloads to a temporary file."""
        rows = f"{self._table}{suffix}{self._words.by_id}"
        return f"SELECT {self._thin(small)} FROM ({ids}) AS places JOIN {rows} ON id = at_id"

    def _thin(self, small: int) -> str:
        payload, texts = self._octets("payload"), f"{self._octets('event_key')} + {self._octets('headers')}"
        size = f"CASE WHEN {texts} > {LONG_TEXT} THEN {payload} + {texts} WHEN {payload} > {small} THEN {payload} END"
        longest = {"event_key": LONG_TEXT, "headers": LONG_TEXT, "payload": small}
        columns = [
            f"CASE WHEN {self._octets(name)} <= {longest[name]} THEN {column} END" if name in longest else column
            for name, column in zip(COLUMNS, self._words.columns, strict=True)
        ]
        return ", ".join([size, "id", "shard", *columns])

    def _octets(self, column: str) -> str:
        return f"COALESCE({self._words.octets.format(column)}, 0)"

    # -- leases: the last value is the name of a relay --------------------------------------------------------------

    def renew(self, beat: int | None) -> str:
        """With `beat`: only if the relay's beat is this one. First value: the lease."""
        known = "" if beat is None else f" AND beat = {beat}"
        return f"UPDATE {self._table}_relay SET beat = beat + 1, lease_s = %s WHERE name = %s{known}"

    def enlist(self, beat: int) -> str:
        """First value: the lease."""
        return f"INSERT INTO {self._table}_relay (beat, lease_s, name) VALUES ({beat}, %s, %s)"

    def strike(self, *, everybody: bool = False) -> str:
        return f"DELETE FROM {self._table}_relay WHERE name " + ("> ''" if everybody else "= %s")

    def free(self, *, everything: bool = False) -> str:
        return f"UPDATE {self._table}_shard SET owner = NULL WHERE shard >= 0" + (
            "" if everything else " AND owner = %s"
        )

    def release(self, shard: int) -> str:
        return f"UPDATE {self._table}_shard SET owner = NULL WHERE shard = {shard} AND owner = %s"

    def claim(self, shard: int) -> str:
        return f"UPDATE {self._table}_shard SET fence = fence + 1, owner = %s WHERE shard = {shard}"

    def raise_fence(self, shard: int, fence: int, to: int) -> str:
        return f"UPDATE {self._table}_shard SET fence = {to} WHERE shard = {shard} AND fence = {fence} AND owner = %s"

    def lock_shards(self, shards: Iterable[int]) -> str:
        """Those of the shards that the relay owns."""
        return f"{self.held} AND shard IN ({numbers(shards)}) ORDER BY shard{self._words.lock}"


def numbers(values: Iterable[int]) -> str:
    return ", ".join(str(int(value)) for value in values)
