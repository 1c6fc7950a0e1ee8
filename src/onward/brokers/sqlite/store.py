"""The database file: where it may be, which tables it must have, how it is opened, and what its errors mean."""

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from importlib import resources
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

from onward.brokers.sqlite import mounts
from onward.brokers.sqlite.database import Database
from onward.brokers.sqlite.file_watch import FileWatch
from onward.brokers.sqlite.gate import BY_UMASK, PRIVATE, Gate
from onward.errors import BadSetting, BadStore, BrokerError, StoreLost
from onward.settings import Settings, redacted

_SCRIPTS = (
    "schema.sql",
    "schema_2.sql",
    "schema_3.sql",
    "schema_4.sql",
    "schema_5.sql",
)  # each script upgrades the tables from one version to the next
SCHEMA_VERSION = len(_SCRIPTS)
_SQLITE_NEEDED = (3, 35, 0)  # RETURNING
_BUSY_MS = 1_000
_SMALL_TABLES = ("onward_meta", "onward_topic", "onward_partition", "onward_group")
_LOOKS = 3  # while another process creates the file, it may look damaged for a moment


def locate(url: str) -> Path:
    """The file that a URL names: sqlite:///relative.db or sqlite:////absolute.db."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() != "sqlite" or not rest.startswith("/") or rest == "/":
        meant = re.fullmatch(r"(?i:sqlite):/{0,2}([^/:@?]+)", url)
        cure = f"did you mean sqlite:///{meant[1]}?" if meant else "use sqlite:///relative.db or sqlite:////absolute.db"
        raise BadSetting(f"url={redacted(url)!r} does not name a file; {cure}")
    if "&" in rest.partition("?")[0]:
        raise BadSetting(
            f"url={redacted(url)!r} has a & without a ? before it; write ? before the first setting, or %26 if the & "
            "is part of the file's name"
        )
    name = unquote(rest[1:])
    if name.startswith(":memory:"):
        raise BadSetting(
            f"url={redacted(url)!r}: a database in memory is lost when the process ends; name a file instead, in tests "
            "a temporary one"
        )
    return Path(name)


class Store:
    """A database that was checked and has our tables.

    Only sqlite3 may open the file. If we closed a descriptor of our own, the kernel would drop the file's POSIX locks
    for the whole process."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self._patience_s = settings.publish_timeout_s
        self._synchronous = "NORMAL" if settings.durability == "window" else "FULL"
        self._mode = PRIVATE if settings.file_mode == "private" else BY_UMASK
        self._watch = FileWatch(path)

    def prepare(self, gate: Gate) -> None:
        """Create the tables if they are missing, and upgrade older ones."""
        self._create_file()
        try:
            db = self.connect()
            try:
                if _version(db, self.path) < SCHEMA_VERSION:
                    with gate.held(self._patience_s):  # of two processes that start together, one creates them
                        _create(db, self.path)
                db.execute("PRAGMA journal_mode=WAL")
            finally:
                db.close()
        except sqlite3.Error as error:
            if error_code(error) == sqlite3.SQLITE_BUSY:
                raise BrokerError(
                    f"{self.path}: the tables of Onward cannot be created now, because a transaction is open on it "
                    f"({error}); end it, then try again. If it is a transaction of this application, open the "
                    "application before it begins, or create the tables with `onward topology apply`"
                ) from error
            raise explained(error, self.path) from error
        except TimeoutError as error:
            raise BrokerError(f"{self.path} cannot be set up: {error}") from error

    def _create_file(self) -> None:
        """Create the file with our mode. SQLite gives -wal and -shm the same mode. Closing the descriptor is safe here:
        a new file has no locks yet."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode))

    def connect(self) -> sqlite3.Connection:
        """A connection for one thread at a time. The caller begins and ends the transactions."""
        db = open_existing(self.path, _BUSY_MS / 1000)
        try:
            db.execute(f"PRAGMA synchronous={self._synchronous}")
            db.execute("PRAGMA wal_autocheckpoint=4000")
            db.execute(f"PRAGMA journal_size_limit={64 << 20}")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def connect_watched(self) -> sqlite3.Connection:
        """A connection that stays open while the store is used. From now on `check` compares the file with it."""
        try:
            db = self.connect()
            self._watch.start(db)
        except sqlite3.Error as error:
            raise explained(error, self.path) from error
        return db

    def check(self, db: Database) -> None:
        """Raise StoreLost if the file was deleted, replaced or overwritten since it was opened. `db` must be in a
        transaction."""
        self._watch.check(db)

    def compare(self, db: sqlite3.Connection) -> None:
        """Raise StoreLost if the store has gone back to an older state. Call it before the transaction writes."""
        self._watch.compare(db)

    def committed(self, bytes_by_log: Mapping[str, int]) -> None:
        """Remember how many bytes were ever published to these logs. A later, smaller number means an older state."""
        self._watch.committed(bytes_by_log)

    def gone_back(self, sign: str) -> NoReturn:
        """Raise StoreLost, because a member has seen that the store is in an older state."""
        self._watch.gone_back(sign)

    def explained(self, error: sqlite3.Error) -> BrokerError:
        """SQLite's error with its cause and cure. If the file was replaced, that is the cause of any error in it."""
        try:
            self._watch.check()
        except StoreLost as lost:
            return lost
        return explained(error, self.path)


def open_existing(path: Path, timeout_s: float) -> sqlite3.Connection:
    """Connect to an existing file. By default, SQLite would create a deleted file again."""
    uri = f"{path.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=timeout_s)


def check(path: Path) -> None:
    """Raise BadStore if the path cannot be a store of Onward. The file is only read, never changed."""
    if sqlite3.sqlite_version_info < _SQLITE_NEEDED:
        raise BadStore(f"SQLite {sqlite3.sqlite_version} is too old: 3.35 or newer is needed; use a newer Python build")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BadStore(f"{path}: the folder {folder} does not exist; create it, or correct the URL")
    if path.is_dir():
        raise BadStore(f"{path} is a folder; name a file in it, such as {path / 'onward.db'}")
    kind = mounts.mounted(path.absolute())
    if kind is not None:
        raise BadStore(
            f"{path} is on a network file system ({kind}), where SQLite's locks and shared memory are not reliable; "
            "put it on a local disk, or use a broker that is made for several machines"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadStore(
            f"{path}: no permission to write to the folder {folder}, where SQLite creates its log and locks; change "
            "the folder's owner or mode"
        )
    if not path.exists() and Path(f"{path}-wal").exists():
        raise BadStore(
            f"{path} is missing, but its log {path}-wal exists: the file was deleted or moved while processes used it; "
            f"put the file back. To start again without its events, stop all processes that use it, then "
            f"rm {path}-wal {path}-shm"
        )
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise BadStore(f"{path}: no permission to read and write it; change its owner or mode")
    _check_content(path)


def _check_content(path: Path) -> None:
    for look in range(_LOOKS):
        # SQLite refuses a read-only connection while a hot journal exists. The later, writing connection rolls the
        # journal back, and then the content is checked.
        if not path.exists() or path.stat().st_size == 0 or Path(f"{path}-journal").exists():
            return
        try:
            return _look(path)
        except sqlite3.Error as error:
            if look == _LOOKS - 1:
                raise explained(error, path) from error
            time.sleep(0.05)


def _look(path: Path) -> None:
    with closing(_looking(path)) as db:
        if not _version(db, path):
            return
        for table in _SMALL_TABLES:
            for (found,) in db.execute(f"PRAGMA quick_check('{table}')"):
                if found != "ok":
                    raise sqlite3.DatabaseError(f"{table}: {found}")


def is_ours(path: Path) -> bool:
    """Whether the file has our tables, as far as a read-only connection can see. True if the file cannot be read: then
    opening it raises the error that says why."""
    if path.is_file() and path.stat().st_size == 0:
        return False
    try:
        with closing(_looking(path)) as db:
            return _version(db, path) > 0
    except (sqlite3.Error, BadStore):
        return True


def _looking(path: Path) -> sqlite3.Connection:
    # Immutable mode creates no -wal and -shm. But it ignores a -wal that exists, and that one must be read.
    how = "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)


def _version(db: sqlite3.Connection, path: Path) -> int:
    """The version of our tables, or 0 if there are none."""
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE name LIKE 'onward\\_%' ESCAPE '\\'")}
    if not tables:
        return 0
    row = None
    if "onward_meta" in tables:
        row = db.execute("SELECT value FROM onward_meta WHERE name = 'schema'").fetchone()
    if row is None or not str(row[0]).isdigit():
        raise BadStore(
            f"{path} has tables named onward_* that are not Onward's: {', '.join(sorted(tables)[:3])}; rename them"
        )
    if int(row[0]) > SCHEMA_VERSION:
        raise BadStore(
            f"{path} was written by a newer Onward (schema {row[0]}; this version supports up to {SCHEMA_VERSION}); "
            "upgrade Onward"
        )
    return int(row[0])


def _create(db: sqlite3.Connection, path: Path) -> None:
    (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise BadStore(f"{path} cannot be switched to a write-ahead log (it stays in mode {mode}); use another folder")
    db.execute("BEGIN IMMEDIATE")
    try:
        for script in _SCRIPTS[_version(db, path) :]:
            for statement in (resources.files(__package__) / script).read_text(encoding="utf-8").split(";\n\n"):
                db.execute(statement)
        db.execute("INSERT OR REPLACE INTO onward_meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def error_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code, or 0 if the error is not from SQLite itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def explained(error: sqlite3.Error, path: Path) -> BrokerError:
    """SQLite's error as ours, with the file, the cause and the cure."""
    code = error_code(error)
    if code == sqlite3.SQLITE_FULL:
        return BrokerError(f"{path}: the disk is full ({error}); free some space, then try again")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return BrokerError(f"{path}: another program holds a transaction on it ({error}); end that, then try again")
    if code == sqlite3.SQLITE_NOTADB:
        return BadStore(f"{path} is not a SQLite database and was not changed; name another file")
    if code == sqlite3.SQLITE_CORRUPT or (code == 0 and type(error) is sqlite3.DatabaseError):
        return BadStore(f"{path} is damaged ({error}); restore it from a backup, or salvage it with sqlite3's .recover")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return BadStore(f"{path} cannot be opened for writing ({error}); check its folder and permissions")
    if code == sqlite3.SQLITE_IOERR:
        return BrokerError(
            f"{path}: SQLite failed ({error}); {path}-wal or -shm may have been deleted while processes use the file: "
            "stop all of them and start again. Otherwise check the disk"
        )
    return BrokerError(f"{path}: SQLite failed ({error}); check the disk, then try again")
