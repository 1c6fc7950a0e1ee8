-- There is no function to clean the table: rows are deleted when they are published.
DROP PROCEDURE IF EXISTS {prefix}_enqueue;

DROP PROCEDURE IF EXISTS {prefix}_lock;

-- CALL it to write an event, from a trigger or a program in another language. All but the topic may be NULL; a payload
-- of NULL is a tombstone. The headers are a JSON object of texts. A text as payload is stored in its own character set,
-- so it should be utf8mb4. The caller needs INSERT on the table.
CREATE PROCEDURE {prefix}_enqueue(
    IN new_topic TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    IN new_payload LONGBLOB,
    IN new_key LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    IN new_type TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    IN new_headers LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
)
COMMENT 'Onward outbox {table}'
MODIFIES SQL DATA
SQL SECURITY INVOKER
BEGIN
    DECLARE microseconds BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));
    DECLARE moment CHAR(12) CHARACTER SET ascii DEFAULT LPAD(LOWER(HEX(microseconds DIV 1000)), 12, '0');
    DECLARE dice CHAR(32) CHARACTER SET ascii DEFAULT MD5(CONCAT(UUID(), RAND()));
    DECLARE number INT DEFAULT 0;
    IF new_topic IS NULL OR CHAR_LENGTH(new_topic) NOT BETWEEN 1 AND 200 OR new_topic REGEXP '[^A-Za-z0-9._-]'
        OR new_topic IN ('.', '..') THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'topic: use 1 to 200 of the characters A-Z a-z 0-9 . _ -';
    END IF;
    IF CHAR_LENGTH(new_type) > 200 THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'type: use at most 200 characters';
    END IF;
    IF new_headers IS NOT NULL THEN
        IF NOT JSON_VALID(new_headers) OR JSON_TYPE(new_headers) <> 'OBJECT' THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'headers: use a JSON object of names and texts';
        END IF;
        WHILE number < COALESCE(JSON_LENGTH(JSON_EXTRACT(new_headers, '$.*')), 0) DO
            IF JSON_TYPE(JSON_EXTRACT(JSON_EXTRACT(new_headers, '$.*'), CONCAT('$[', number, ']'))) <> 'STRING' THEN
                SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'headers: each value must be a text';
            END IF;
            SET number = number + 1;
        END WHILE;
    END IF;
    INSERT INTO {table} (event_id, topic, event_key, event_type, event_time, headers, payload) VALUES (
        -- A UUID of version 7: the time in milliseconds, then random digits.
        CONCAT(LEFT(moment, 8), '-', RIGHT(moment, 4), '-7', SUBSTR(dice, 1, 3), '-',
            ELT(1 + FLOOR(RAND() * 4), '8', '9', 'a', 'b'), SUBSTR(dice, 4, 3), '-', SUBSTR(dice, 7, 12)),
        new_topic, new_key, COALESCE(new_type, ''), microseconds / 1000000, new_headers, new_payload
    );
END;

-- CALL it before {prefix}_enqueue for a key that has no row to lock: it waits for other transactions that have locked
-- the key. Keys share 256 locks, so a transaction that locks several keys may fail with a deadlock; run it again then.
CREATE PROCEDURE {prefix}_lock(IN new_key LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin)
COMMENT 'Onward outbox {table}'
MODIFIES SQL DATA
SQL SECURITY INVOKER
BEGIN
    DECLARE locked SMALLINT;
    SELECT slot INTO locked FROM {table}_lock WHERE slot = CRC32(new_key) % 256 FOR UPDATE;
    IF locked IS NULL THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the key is NULL, or {name}_lock has not all of its 256 rows';
    END IF;
END;

UPDATE {table}_meta SET value = '2' WHERE name = 'version';
