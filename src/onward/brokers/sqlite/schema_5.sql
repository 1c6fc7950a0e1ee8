-- Whose file this is: no other database has the same, but a copy of this one has.
INSERT OR IGNORE INTO onward_meta VALUES ('identity', lower(hex(randomblob(16))));
