-- Mode queue: rows are deleted when they are published.
CREATE TABLE {table} (
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

CREATE INDEX {name}_shard_id ON {table} (shard, id);

CREATE TABLE {table}_shard (shard smallint PRIMARY KEY, owner text, fence bigint NOT NULL DEFAULT 0);

INSERT INTO {table}_shard (shard) SELECT number FROM generate_series(0, {shards} - 1) AS number;
