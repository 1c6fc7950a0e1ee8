"""Notices when the database file was deleted, replaced or overwritten while it is open.

SQLite does not notice this. It continues with its open files and with pages that it has read before. So a commit
succeeds, but the next process does not find its events.

The watch makes two comparisons. It compares the files that the paths name now with the files that were opened. And when
the database file was written, it reads that file without SQLite's log. While the file is open, only a checkpoint may
write to it. A checkpoint writes newer pages, never older ones, and none that is newer than what a transaction sees.

A checkpoint may stop halfway. Then the pages in the file are from different moments. So the watch relies on the first
page where it can: the schema version there grows with every change of a table, and copies made by SQLite have another
version. The content of the tables in the file counts only while the schema version is the same as at the start.
"""

import contextlib
import math
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
from onward.brokers.sqlite.database import Database
from onward.errors import StoreLost

_SUFFIXES = ("", "-wal", "-shm")
_MAIN, _LOG, _INDEX = range(3)
_LOOKS = 3  # a page that is being written may look damaged for a moment
_PAUSE_S = 0.05
# Every commit writes to the log, and a stat can make the next write to a file slower, because newer kernels then give
# it a finer timestamp. So the log is checked only now and then. The database file is written by checkpoints only, so it
# is checked with every commit.
_LOG_EVERY_S = 0.1
_CURE = (
    "Onward no longer reads it or writes to it; stop all processes that use it, put the right file in place, remove "
    "its old -wal and -shm, and start again"
)
_OTHER = "overwritten with another database"
_OLDER = "overwritten with an older copy of itself"
_IDENTITY = "SELECT value FROM onward_meta WHERE name = 'identity'"
_TOPIC_BYTES = "bytes of topic "
# Numbers that only grow. `max` and `GROUP BY`: while a split page is only half written, a row may appear twice.
_COUNTERS = f"""
SELECT '{_TOPIC_BYTES}' || log_id, max(bytes) FROM onward_topic GROUP BY log_id
UNION ALL
SELECT 'version of group ' || grp, max(version) FROM onward_roster WHERE grp NOT LIKE '{PASSING}%' GROUP BY grp
UNION ALL SELECT 'last id in ' || name, max(seq) FROM sqlite_sequence WHERE name LIKE 'onward%' GROUP BY name
"""


class Content(NamedTuple):
    """The content of the tables: the identity of the database, and the counters."""

    identity: str | None
    counters: Mapping[str, int]

    def difference(self, after: "Content") -> str:
        """What happened to the file if `after` cannot be a later state of this content. "" if it can."""
        if after.identity != self.identity:
            return _OTHER
        for name, count in self.counters.items():
            if after.counters.get(name, count) < count:  # a missing counter: its topic was dropped
                return f"{_OLDER} ({name} went from {count} back to {after.counters[name]})"
        return ""


class FileWatch:
    """The watch of one broker object, for its writer and its readers. After the first StoreLost, every check fails."""

    def __init__(self, path: Path) -> None:
        self._paths = [f"{path}{suffix}" for suffix in _SUFFIXES]
        self._lock = threading.Lock()
        self._files: list[tuple[int, int]] = []  # device and inode of each file
        self._stamp: tuple[int, ...] = ()  # the times and size of the database file when it was read last
        self._schema = 0  # the schema version in the file
        self._in_file: Content | None = None  # None: the content is not reliable
        self._committed = Content(None, {})
        self._next = 0.0  # when to check -wal and -shm again
        self._lost = ""

    def start(self, db: sqlite3.Connection) -> None:
        """Remember the files and their content. While `db` is open, SQLite itself does not replace any of the files."""
        self._committed = _content(db)
        found = [os.stat(path) for path in self._paths]
        self._files = [(each.st_dev, each.st_ino) for each in found]
        self._stamp = _stamp(found[_MAIN])
        with contextlib.suppress(sqlite3.Error), closing(_without_log(self._paths[_MAIN])) as file:
            self._schema = _schema(file)
            in_file = _content(file) if self._schema == _schema(db) else None
            self._in_file = in_file if in_file and in_file.identity == self._committed.identity else None

    def check(self, db: Database | None = None) -> None:
        """Raise StoreLost if these are no longer the files that were opened. This costs a few microseconds.

        `db` must be in a transaction. Without it, a newer schema in the file is not an error."""
        if self._lost:
            raise StoreLost(self._lost)
        found = self._still(_MAIN)
        if (now := clock.now()) >= self._next:
            self._next = now + _LOG_EVERY_S
            self._still(_LOG)
            self._still(_INDEX)
        if _stamp(found) != self._stamp:
            self._look(_stamp(found), db)

    def compare(self, db: sqlite3.Connection) -> None:
        """Raise StoreLost if the committed state is older than before, as after a restore into the open file. Call it
        before the transaction writes."""
        try:
            committed = _content(db)
        except sqlite3.Error:
            return  # damaged: the work that needs these tables will raise the error
        if why := self._committed.difference(committed):
            self._lose(_MAIN, f"was {why} while it was in use")
        self._committed = committed

    def committed(self, bytes_by_log: Mapping[str, int]) -> None:
        """Remember the total bytes of these logs, which we have just committed."""
        counters = {_TOPIC_BYTES + log_id: count for log_id, count in bytes_by_log.items()}
        self._committed = self._committed._replace(counters={**self._committed.counters, **counters})

    def gone_back(self, sign: str) -> NoReturn:
        """Raise StoreLost. `sign` is what a member has seen."""
        self._lose(_MAIN, f"was {_OLDER} ({sign}) while it was in use")

    def _still(self, which: int) -> os.stat_result:
        try:
            found = os.stat(self._paths[which])
        except FileNotFoundError:
            self._lose(which, "was deleted or moved while it was in use")
        except OSError as error:
            self._lose(which, f"can no longer be examined ({error})")
        if (found.st_dev, found.st_ino) != self._files[which]:
            self._lose(which, "was replaced by another file while it was in use")
        return found

    def _look(self, stamp: tuple[int, ...], db: Database | None) -> None:
        with self._lock:
            if stamp == self._stamp:
                return  # another thread has already compared it
            for look in range(_LOOKS):
                time.sleep(_PAUSE_S if look else 0.0)
                if not (why := self._difference(db)):
                    self._stamp = stamp
                    return
            self._lose(_MAIN, f"was {why} while it was in use")

    def _difference(self, db: Database | None) -> str:
        """What happened to the file if its content cannot be a later state of the content before. "" if it can."""
        newest = math.inf
        with contextlib.suppress(sqlite3.Error):
            newest = math.inf if db is None else _schema(db)
        try:
            with closing(_without_log(self._paths[_MAIN])) as file:
                schema = _schema(file)
                in_file = _readable(file)
        except sqlite3.OperationalError:
            return ""  # it cannot be opened at the moment
        except sqlite3.DatabaseError as error:
            return f"overwritten with something else ({error})"
        if not self._schema <= schema <= newest:
            return _OLDER if in_file and in_file.identity == self._committed.identity else _OTHER
        if schema > self._schema:
            self._schema, self._in_file = schema, None
        why = self._in_file.difference(in_file) if self._in_file and in_file else ""
        if self._in_file and in_file and not why:
            self._in_file = in_file
        return why

    def _lose(self, which: int, what: str) -> NoReturn:
        self._lost = self._lost or f"{self._paths[which]} {what}; {_CURE}"
        raise StoreLost(self._lost)


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _schema(db: Database) -> int:
    (version,) = db.execute("PRAGMA schema_version").fetchone()
    return int(version)


def _content(db: sqlite3.Connection) -> Content:
    row = db.execute(_IDENTITY).fetchone()
    return Content(row and row[0], dict(db.execute(_COUNTERS).fetchall()))


def _readable(file: sqlite3.Connection) -> Content | None:
    """The content of the tables in the file, or None if its pages are from different moments."""
    try:
        return _content(file)
    except sqlite3.OperationalError as error:
        return Content(None, {}) if error.sqlite_errorcode == sqlite3.SQLITE_ERROR else None  # the tables are missing
    except sqlite3.DatabaseError:
        return None


def _without_log(path: str) -> sqlite3.Connection:
    """Read the database file without its log. This uses SQLite, because closing a descriptor of our own would drop the
    file's locks for the whole process."""
    uri = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
    file = sqlite3.connect(uri, uri=True, isolation_level=None)
    file.execute("PRAGMA writable_schema=ON")  # the first page may name more pages than are written yet
    return file
