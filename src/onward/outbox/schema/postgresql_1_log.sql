-- Mode log, an append-only table: a relay remembers which transactions it has seen, so it neither updates nor deletes
-- rows to publish them. `xid` comes before `id`, so that a transaction has its number before its first row has an id.
CREATE TABLE {table} (
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id text NOT NULL,
    topic text NOT NULL,
    event_key text,                         -- null: an event without a key
    event_type text NOT NULL DEFAULT '',
    event_time double precision NOT NULL,   -- Unix time
    headers text,                           -- a JSON object of texts; null: none
    payload bytea,                          -- null: a tombstone
    shard smallint NOT NULL GENERATED ALWAYS AS (
        abs(hashtextextended(coalesce(event_key, event_id), 0) % {shards})::smallint
    ) STORED
);

CREATE INDEX {name}_xid ON {table} (xid);

CREATE TABLE {table}_shard (
    shard smallint PRIMARY KEY,
    owner text,
    fence bigint NOT NULL DEFAULT 0,
    seen pg_snapshot NOT NULL,              -- every row that is visible in this snapshot is published
    until pg_snapshot,                      -- while a backlog is read page by page: the rows that belong to it
    last bigint NOT NULL DEFAULT 0,         -- of these, the rows up to this id are published
    top bigint NOT NULL DEFAULT 0,          -- the highest id of the backlog
    high bigint NOT NULL DEFAULT 0          -- the highest id that was published; tells old rows from new ones after a restore
) WITH (fillfactor = 50);

-- No transaction is visible in the snapshot 1:1. The current snapshot would be wrong: the transaction that creates the
-- tables may also write the first events, and it may count as visible in its own snapshot.
INSERT INTO {table}_shard (shard, seen) SELECT number, '1:1:' FROM generate_series(0, {shards} - 1) AS number;
