"""The version of a group. It grows when something has changed that its members must look at."""

import sqlite3

from onward.brokers.sqlite.transaction import Transaction

_BUMP = "INSERT INTO onward_roster (grp, version) VALUES (?, 1) ON CONFLICT (grp) DO UPDATE SET version = version + 1"


def bump(tx: Transaction, group: str) -> None:
    """Increase the version of the group, and wake its members."""
    tx.db.execute(_BUMP, (group,))
    tx.ring()


def bump_all(tx: Transaction) -> None:
    tx.db.execute("UPDATE onward_roster SET version = version + 1")
    tx.ring()


def read(db: sqlite3.Connection, group: str) -> int:
    row = db.execute("SELECT version FROM onward_roster WHERE grp = ?", (group,)).fetchone()
    return 0 if row is None else int(row[0])
