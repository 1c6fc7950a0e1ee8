"""The questions that `onward outbox status` asks a database."""

MOST_LANES = 100  # of parked rows that are listed

# PostgreSQL, mode log: a row is published if it is visible in `seen`. While a backlog is read page by page, the rows of
# `until` up to `last` are published too. The first condition uses the index on xid.
_WAITING_LOG = """\
SELECT count(*), min(event_time) FROM {t} JOIN {t}_shard USING (shard)
WHERE xid >= (SELECT pg_snapshot_xmin(seen) FROM {t}_shard ORDER BY 1 LIMIT 1)
    AND NOT pg_visible_in_snapshot(xid, seen)
    AND NOT coalesce(id <= last AND pg_visible_in_snapshot(xid, until), false)
"""
_WAITING_QUEUE = "SELECT COUNT(*), MIN(event_time) FROM {t}"
_PARKED = "SELECT COUNT(*), SUM(CASE WHEN refused THEN 1 ELSE 0 END), MIN(event_time) FROM {t}_parked"
_RELAYS = "SELECT name, beat, lease_s FROM {t}_relay ORDER BY name"
_SHARDS = "SELECT shard, owner, fence FROM {t}_shard ORDER BY shard"
_LANES = f"""\
SELECT head.topic, head.event_key, lane.number, lane.refused, lane.since, head.event_id, head.why
FROM (
    SELECT COUNT(*) AS number, MAX(CASE WHEN refused THEN 1 ELSE 0 END) AS refused, MIN(since) AS since,
        COALESCE(MIN(CASE WHEN refused THEN id END), MIN(id)) AS head
    FROM {{t}}_parked GROUP BY topic, {{key}}
) AS lane
JOIN {{t}}_parked AS head ON head.id = lane.head
ORDER BY lane.refused DESC, lane.since, lane.head LIMIT {MOST_LANES}
"""
_KEY = {"mariadb": "BINARY event_key"}  # otherwise MariaDB ignores trailing spaces

_TRANSACTIONS_POSTGRESQL = """\
SELECT pid, age_s, who, query_start::text FROM (
    SELECT pid, extract(epoch FROM clock_timestamp() - xact_start) AS age_s, application_name AS who, query_start
    FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
    UNION ALL
    SELECT NULL, extract(epoch FROM clock_timestamp() - prepared), 'prepared transaction ' || gid, NULL
    FROM pg_prepared_xacts WHERE database = current_database()
) AS transactions WHERE age_s > %s ORDER BY age_s DESC
"""
_TRANSACTIONS_MARIADB = """\
SELECT * FROM (
    SELECT trx_mysql_thread_id, TIMESTAMPDIFF(MICROSECOND, trx_started, NOW(6)) / 1000000 AS age_s,
        CONCAT(user, '@', host), NULL
    FROM information_schema.innodb_trx LEFT JOIN information_schema.processlist ON id = trx_mysql_thread_id
) AS transactions WHERE age_s > %s ORDER BY age_s DESC
"""
_UPKEEP = """\
SELECT seqcache, n_dead_tup, last_autovacuum::text FROM pg_sequence, pg_stat_user_tables
WHERE seqrelid = pg_get_serial_sequence('{t}', 'id')::regclass AND relid = '{t}'::regclass
"""
_MAY_SEE = {
    "postgresql": "SELECT pg_has_role('pg_read_all_stats', 'USAGE')",
    "mariadb": "SELECT COUNT(*) >= 0 FROM information_schema.innodb_trx",  # an error without the right
}
_TRANSACTIONS = {"postgresql": _TRANSACTIONS_POSTGRESQL, "mariadb": _TRANSACTIONS_MARIADB, "sqlite": ""}


class Queries:
    """Each is one statement. `transactions` takes an age in seconds; `may_see_transactions` is None if there is no such
    list."""

    def __init__(self, dialect: str, mode: str, table: str) -> None:
        self.waiting = (_WAITING_LOG if mode == "log" else _WAITING_QUEUE).format(t=table)
        self.parked = _PARKED.format(t=table)
        self.relays = _RELAYS.format(t=table)
        self.shards = _SHARDS.format(t=table)
        self.lanes = _LANES.format(t=table, key=_KEY.get(dialect, "event_key"))
        self.transactions = _TRANSACTIONS[dialect]
        self.may_see_transactions = _MAY_SEE.get(dialect)
        self.upkeep = _UPKEEP.format(t=table) if dialect == "postgresql" else None


def release(dialect: str, table: str, *, key: bool, topic: bool) -> str:
    """Lets the relay try refused rows again. Its values: a key and a topic, if they are asked for."""
    of_key = f" AND {_KEY.get(dialect, 'event_key')} = %s" if key else ""
    of_topic = " AND topic = %s" if topic else ""
    return f"UPDATE {table}_parked SET refused = FALSE WHERE refused{of_key}{of_topic}"
