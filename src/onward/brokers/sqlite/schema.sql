-- Onward's tables may share a file with the user's own. They are named onward_*.

CREATE TABLE onward_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE onward_topic (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    partitions INTEGER NOT NULL,
    log_id TEXT NOT NULL,               -- names one life of the log: a recreated topic has a new id
    bytes INTEGER NOT NULL DEFAULT 0    -- all bytes ever appended to its partitions
);

CREATE TABLE onward_partition (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    topic INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    next INTEGER NOT NULL DEFAULT 0,    -- the next position; never reused, even after the log was emptied
    bytes INTEGER NOT NULL DEFAULT 0,   -- all bytes ever appended
    UNIQUE (topic, idx)
);

-- One row per record batch. Sizes are differences of running totals, never sums over rows.
CREATE TABLE onward_log (
    seq INTEGER PRIMARY KEY,            -- so that new batches are appended at the end of the table's B-tree
    at INTEGER NOT NULL UNIQUE,         -- partition id << 40 | first position
    count INTEGER NOT NULL,
    time REAL NOT NULL,                 -- Unix time of acceptance
    before INTEGER NOT NULL,            -- bytes appended to the partition before this batch
    data BLOB NOT NULL                  -- msgpack array of events
);

-- A group's progress in a partition, and the lease of the member that owns it.
CREATE TABLE onward_group (
    part INTEGER NOT NULL,
    grp TEXT NOT NULL,
    watermark INTEGER NOT NULL,
    done_above BLOB,
    tries BLOB,
    owner TEXT,
    fence INTEGER NOT NULL DEFAULT 0,   -- grows with every ownership
    until REAL NOT NULL DEFAULT 0,      -- time since boot
    ttl REAL NOT NULL DEFAULT 0,
    boot TEXT NOT NULL DEFAULT '',
    clean INTEGER NOT NULL DEFAULT 1,   -- 0 from the claim to a drained release
    PRIMARY KEY (part, grp)
) WITHOUT ROWID;

CREATE TABLE onward_member (
    grp TEXT NOT NULL,
    topic INTEGER NOT NULL,
    member TEXT NOT NULL,
    until REAL NOT NULL,
    ttl REAL NOT NULL,
    boot TEXT NOT NULL,
    PRIMARY KEY (grp, topic, member)
) WITHOUT ROWID;

-- The version of a group. It grows when its members must look: after a join, a leave, a release or moved records.
CREATE TABLE onward_roster (grp TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE onward_aside (
    id TEXT PRIMARY KEY,
    grp TEXT NOT NULL,
    part INTEGER NOT NULL,
    position INTEGER NOT NULL,
    state TEXT NOT NULL,
    due REAL,
    key TEXT,
    error TEXT,
    last REAL,                          -- Unix time of the last failure
    data BLOB NOT NULL                  -- msgpack of the record; state and due are columns
);

CREATE INDEX onward_aside_place ON onward_aside (grp, part, position, id);

-- Notices about records that an operator moved, until the owner has read them.
CREATE TABLE onward_moved (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    grp TEXT NOT NULL,
    part INTEGER NOT NULL,
    id TEXT NOT NULL,
    state TEXT,
    due REAL
);

CREATE INDEX onward_moved_place ON onward_moved (grp, part);
