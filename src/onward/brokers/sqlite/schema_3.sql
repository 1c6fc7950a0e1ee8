-- The last fences of dropped groups. Inboxes compare fences, so a new group of the same name continues from here.
CREATE TABLE onward_fence (
    part INTEGER NOT NULL,
    grp TEXT NOT NULL,
    fence INTEGER NOT NULL,
    PRIMARY KEY (part, grp)
) WITHOUT ROWID;
