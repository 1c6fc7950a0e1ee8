CREATE TABLE {table}_meta (name text PRIMARY KEY, value text NOT NULL);

INSERT INTO {table}_meta VALUES
    ('version', '1'),
    ('works_from', '1'),
    ('outbox_id', replace(gen_random_uuid()::text, '-', '')),
    ('identity', ''),
    ('shards', '{shards}'),
    ('mode', '{mode}');

CREATE TABLE {table}_relay (
    name text PRIMARY KEY,
    beat bigint NOT NULL,
    lease_s double precision NOT NULL
);

CREATE TABLE {table}_parked (
    id bigint PRIMARY KEY,
    shard smallint NOT NULL,
    event_id text NOT NULL,
    topic text NOT NULL,
    event_key text,
    event_type text NOT NULL,
    event_time double precision NOT NULL,
    headers text,
    payload bytea,
    refused boolean NOT NULL,               -- it waits for an operator; otherwise the relay tries again
    why text NOT NULL,
    since double precision NOT NULL         -- Unix time
);

CREATE INDEX {name}_parked_lane ON {table}_parked (shard, id);
