-- The identity of this database. Only a copy of it has the same.
INSERT OR IGNORE INTO onward_meta VALUES ('identity', lower(hex(randomblob(16))));

-- 1 from the claim of an unclean partition until the takeover grace has ended.
ALTER TABLE onward_group ADD COLUMN waits INTEGER NOT NULL DEFAULT 0;

-- The fence of an owner whose processes have ended, so the next owner need not wait. It counts while it equals `fence`.
ALTER TABLE onward_group ADD COLUMN gone_fence INTEGER NOT NULL DEFAULT 0;
