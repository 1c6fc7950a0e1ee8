-- Whose file this is: no other database has the same, but a copy of this one has.
INSERT OR IGNORE INTO onward_meta VALUES ('identity', lower(hex(randomblob(16))));

-- 1 from the claim of an unclean partition until the grace for its last owner is over.
ALTER TABLE onward_group ADD COLUMN waits INTEGER NOT NULL DEFAULT 0;

-- The fence of an owner that has no process left, so the next owner needs no grace. It counts while it is the last one.
ALTER TABLE onward_group ADD COLUMN gone_fence INTEGER NOT NULL DEFAULT 0;
