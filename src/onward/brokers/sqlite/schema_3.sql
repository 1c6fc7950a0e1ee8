-- The last fences of groups that were dropped: inboxes compare them, so a group of that name goes on from there.
CREATE TABLE onward_fence (
    part INTEGER NOT NULL,
    grp TEXT NOT NULL,
    fence INTEGER NOT NULL,
    PRIMARY KEY (part, grp)
) WITHOUT ROWID;
