-- Rows are deleted when they are published. AUTOINCREMENT: an id is never used again. SQLite has one writer at a time,
-- so one shard is enough.
CREATE TABLE {table} (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id TEXT NOT NULL,
    topic TEXT NOT NULL,
    event_key TEXT,
    event_type TEXT NOT NULL DEFAULT '',
    event_time REAL NOT NULL,
    headers TEXT,
    payload BLOB,
    shard INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE {table}_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE {table}_relay (name TEXT PRIMARY KEY, beat INTEGER NOT NULL, lease_s REAL NOT NULL) WITHOUT ROWID;

CREATE TABLE {table}_shard (shard INTEGER PRIMARY KEY, owner TEXT, fence INTEGER NOT NULL DEFAULT 0);

CREATE TABLE {table}_parked (
    id INTEGER PRIMARY KEY,
    shard INTEGER NOT NULL,
    event_id TEXT NOT NULL,
    topic TEXT NOT NULL,
    event_key TEXT,
    event_type TEXT NOT NULL,
    event_time REAL NOT NULL,
    headers TEXT,
    payload BLOB,
    refused INTEGER NOT NULL,
    why TEXT NOT NULL,
    since REAL NOT NULL
);

INSERT INTO {table}_shard (shard)
    WITH RECURSIVE numbers AS (SELECT 0 AS number UNION ALL SELECT number + 1 FROM numbers WHERE number + 1 < {shards})
    SELECT number FROM numbers;

INSERT INTO {table}_meta VALUES
    ('version', '1'),
    ('works_from', '1'),
    ('outbox_id', lower(hex(randomblob(16)))),
    ('identity', ''),
    ('shards', '{shards}'),
    ('mode', '{mode}');
