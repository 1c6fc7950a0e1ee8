-- The highest fence seen for each outbox shard. A relay with a lower fence cannot publish.
CREATE TABLE onward_relay (shard TEXT PRIMARY KEY, fence INTEGER NOT NULL) WITHOUT ROWID;
