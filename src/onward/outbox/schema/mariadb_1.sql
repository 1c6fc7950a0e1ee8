-- Every statement may run twice: MariaDB commits after each CREATE, so an interrupted script is run again from its
-- start. The version is written last.
CREATE TABLE IF NOT EXISTS {table}_meta (
    name VARCHAR(50) CHARACTER SET ascii PRIMARY KEY,
    value VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL
) ENGINE=InnoDB;

INSERT IGNORE INTO {table}_meta VALUES
    ('outbox_id', REPLACE(UUID(), '-', '')),
    ('identity', ''),
    ('shards', '{shards}'),
    ('mode', '{mode}');

-- Rows are deleted when they are published. Texts are compared byte by byte.
CREATE TABLE IF NOT EXISTS {table} (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    event_id VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    event_key LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    event_type VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '',
    event_time DOUBLE NOT NULL,
    headers LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    payload LONGBLOB,
    shard SMALLINT AS (CRC32(COALESCE(event_key, event_id)) % {shards}) STORED,
    INDEX {name}_shard (shard, id)
) ENGINE=InnoDB;

CREATE TABLE IF NOT EXISTS {table}_relay (
    name VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY,
    beat BIGINT NOT NULL,
    lease_s DOUBLE NOT NULL
) ENGINE=InnoDB;

CREATE TABLE IF NOT EXISTS {table}_shard (
    shard SMALLINT PRIMARY KEY,
    owner VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    fence BIGINT NOT NULL DEFAULT 0
) ENGINE=InnoDB;

CREATE TABLE IF NOT EXISTS {table}_parked (
    id BIGINT PRIMARY KEY,
    shard SMALLINT NOT NULL,
    event_id VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    event_key LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    event_type VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    event_time DOUBLE NOT NULL,
    headers LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    payload LONGBLOB,
    refused BOOLEAN NOT NULL,
    why TEXT CHARACTER SET utf8mb4 NOT NULL,
    since DOUBLE NOT NULL,
    INDEX {name}_parked_lane (shard, id)
) ENGINE=InnoDB;

-- One of these rows is locked for each key that has no row of its own to lock.
CREATE TABLE IF NOT EXISTS {table}_lock (slot SMALLINT PRIMARY KEY) ENGINE=InnoDB;

INSERT IGNORE INTO {table}_shard (shard)
    WITH RECURSIVE numbers AS (SELECT 0 AS number UNION ALL SELECT number + 1 FROM numbers WHERE number + 1 < {shards})
    SELECT number FROM numbers;

INSERT IGNORE INTO {table}_lock (slot)
    WITH RECURSIVE numbers AS (SELECT 0 AS number UNION ALL SELECT number + 1 FROM numbers WHERE number + 1 < 256)
    SELECT number FROM numbers;

INSERT IGNORE INTO {table}_meta VALUES ('version', '1'), ('works_from', '1');
