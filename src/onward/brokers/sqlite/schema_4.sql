-- The highest fence seen of each outbox shard: what a relay with a lower one publishes is refused.
CREATE TABLE onward_relay (shard TEXT PRIMARY KEY, fence INTEGER NOT NULL) WITHOUT ROWID;
