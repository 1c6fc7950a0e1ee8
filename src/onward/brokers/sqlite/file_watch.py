"""Notices that the database file was deleted, replaced or overwritten while it is open.

SQLite notices none of this. It goes on with the files that it has open, and with pages that it read before, so a commit
succeeds and its events are gone for the next process. The watch compares what the paths name now with what was opened.
When the file itself was written, it reads what is in the file without SQLite's log: while the file is open, only a
checkpoint may write to it, and that brings newer pages, never older ones.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, NoReturn

from onward import clock
from onward.brokers.base import PASSING
from onward.errors import StoreLost

_SUFFIXES = ("", "-wal", "-shm")
_LOOKS = 3  # a file that another program is just writing to may look damaged for a moment
_PAUSE_S = 0.05
_AGAIN_S = 1.0  # until the next look into a file that could not be read
_CURE = "nothing more is read from it or written to it; stop all processes that use it, put the right file in place"
_IDENTITY = "SELECT value FROM onward_meta WHERE name = 'identity'"
# Numbers that only grow. The schema's version is one of them: a copy made with .backup begins at 1.
_COUNTERS = f"""
SELECT 'the bytes of topic ' || name || ' ' || log_id, bytes FROM onward_topic
UNION ALL SELECT 'the version of group ' || grp, version FROM onward_roster WHERE grp NOT LIKE '{PASSING}%'
UNION ALL SELECT 'the last id in ' || name, seq FROM sqlite_sequence WHERE name LIKE 'onward%'
UNION ALL SELECT 'the version of the schema', schema_version FROM pragma_schema_version
"""


class FileContent(NamedTuple):
    """What is in the file without the log: whose it is, and how far its counters are."""

    identity: str | None
    counters: Mapping[str, int]


class FileWatch:
    """The watch of one broker object, for its writer and its readers. What was lost once stays lost."""

    def __init__(self, path: Path) -> None:
        self._paths = [f"{path}{suffix}" for suffix in _SUFFIXES]
        self._lock = threading.Lock()
        self._files: list[tuple[int, int]] = []  # device and inode of each
        self._stamp: tuple[int, ...] = ()  # of the database file, when it was last looked into
        self._identity = ""
        self._next_look = 0.0
        self._content = FileContent(None, {})
        self._committed: Mapping[str, int] = {}
        self._lost = ""

    def start(self, db: sqlite3.Connection) -> None:
        """While this connection is open, SQLite itself replaces none of the files."""
        (self._identity,) = db.execute(_IDENTITY).fetchone()
        self._committed = _counters(db)
        found = [os.stat(path) for path in self._paths]
        self._files = [(each.st_dev, each.st_ino) for each in found]
        self._stamp = _stamp(found[0])
        self._content = _content(self._paths[0]) or self._content

    def check(self) -> None:
        """StoreLost: these are no longer the files that were opened. It costs a few microseconds."""
        if self._lost:
            raise StoreLost(self._lost)
        found, *_ = [self._still(path, file) for path, file in zip(self._paths, self._files, strict=True)]
        if _stamp(found) != self._stamp:
            self._look(_stamp(found))

    def _still(self, path: str, file: tuple[int, int]) -> os.stat_result:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            self._lose(f"{path} was deleted or moved while it was in use")
        except OSError as error:
            self._lose(f"{path} cannot be looked at any more ({error})")
        if (found.st_dev, found.st_ino) != file:
            self._lose(f"{path} was replaced by another file while it was in use")
        return found

    def compare(self, db: sqlite3.Connection) -> None:
        """StoreLost: what is committed has gone back, as after a restore into the open file. Call it before anything
        is written in the transaction."""
        counters = _counters(db)
        if back := _gone_back(self._committed, counters):
            self._lose(f"{self._paths[0]} was overwritten with an older copy of itself while it was in use ({back})")
        self._committed = counters

    def _look(self, stamp: tuple[int, ...]) -> None:
        with self._lock:
            if stamp == self._stamp or clock.now() < self._next_look:
                return  # another thread has looked
            for look in range(_LOOKS):
                time.sleep(_PAUSE_S if look else 0.0)
                try:
                    content = _content(self._paths[0])
                    why = "" if content is None else self._difference(content)
                except sqlite3.DatabaseError as error:
                    why = f"overwritten with something else ({error})"
                if not why:
                    break
            else:
                self._lose(f"{self._paths[0]} was {why} while it was in use")
            if content is None:
                self._next_look = clock.now() + _AGAIN_S
            else:
                self._stamp, self._content = stamp, content

    def _difference(self, content: FileContent) -> str:
        """What happened to the file, if it is not a newer state of what was in it before."""
        if content.identity != self._identity and (content.identity or self._content.identity):
            return "overwritten with another database"
        back = _gone_back(self._content.counters, content.counters)
        return f"overwritten with an older copy of itself ({back})" if back else ""

    def _lose(self, what: str) -> NoReturn:
        self._lost = self._lost or f"{what}; {_CURE} without its old -wal and -shm, and start again"
        raise StoreLost(self._lost)


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _counters(db: sqlite3.Connection) -> dict[str, int]:
    return dict(db.execute(_COUNTERS).fetchall())


def _gone_back(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """The first counter that is lower than it was. One that is missing was dropped."""
    for name, count in before.items():
        if after.get(name, count) < count:
            return f"{name} went from {count} back to {after[name]}"
    return ""


def _content(path: str) -> FileContent | None:
    """Read the file without its log. DatabaseError: it is no database.

    None: it cannot be read now. A checkpoint that is being written, or was killed, leaves pages of two states in the
    file until the next one; with its log it is whole.

    Through SQLite, because closing a descriptor of our own would drop the locks of the whole process."""
    uri = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'onward_meta'").fetchone():
                return FileContent(None, {})
            identity = db.execute(_IDENTITY).fetchone()
            return FileContent(identity and identity[0], _counters(db))
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_NOTADB:
            raise
        return None
