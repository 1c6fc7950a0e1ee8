"""What an operator should know about the file: is it sound, durable, and not held up by a process or a group?"""

import shlex
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from onward import clock
from onward.brokers.base import PASSING, Features, Finding
from onward.brokers.sqlite import figures, lock_holders, topics
from onward.brokers.sqlite.backlog import drop_command, slowest
from onward.brokers.sqlite.gate import lock_path
from onward.brokers.sqlite.store import open_existing

_LONG_S = 5.0  # a healthy writer holds the lock for milliseconds
_BUSY_S = 2.0
_LEAST_FREE_BYTES = 256 << 20


def findings(db: sqlite3.Connection, path: Path, features: Features) -> list[Finding]:
    return [*_file(db, path, features), *_lock(path), *_disk(path), *_groups(db)]


def _file(db: sqlite3.Connection, path: Path, features: Features) -> Iterator[Finding]:
    damage = [text for (text,) in db.execute("PRAGMA quick_check(10)") if text != "ok"]
    if damage:
        cure = "restore the file from a backup, or salvage it with sqlite3's .recover"
        yield Finding("error", f"{path} is damaged: {'; '.join(damage)}", cure)
    else:
        size = path.stat().st_size
        yield Finding("ok", f"{path} is sound: {size:,} bytes, SQLite {sqlite3.sqlite_version}")
    if features.durability == "fsync":
        yield Finding("ok", "durability fsync: what publish accepted survives a power cut")
    else:
        cure = "leave durability out, or set it to fsync, where no event may be lost"
        yield Finding("warning", "durability window: a power cut may lose the last moments", cure)


def access(path: Path) -> list[Finding]:
    """Files that should be private, and can be used by others."""
    files = [Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm", "-lock")]
    shared = [str(file) for file in files if file.exists() and file.stat().st_mode & 0o077]
    if not shared:
        return []
    what = f"other users may read or write {', '.join(shared)}; with a lock on them they could stop every publish"
    cure = f"{shlex.join(['chmod', '600', *shared])}, or set file_mode=umask for every process if that is meant"
    return [Finding("warning", what, cure)]


def _lock(path: Path) -> Iterator[Finding]:
    holder = lock_holders.find(lock_path(path))
    if holder is None:
        yield from _foreign_lock(path)
    elif holder.named is None:
        yield Finding("error", f"the write lock {lock_path(path)} is held by {holder}", "end it")
    elif clock.now() - holder.named.since > _LONG_S:
        yield Finding("error", f"the write lock is held by {holder}", "continue that process (SIGCONT) or end it")


def _foreign_lock(path: Path) -> Iterator[Finding]:
    """A program that does not use our lock file may hold a transaction."""
    with closing(open_existing(path, _BUSY_S)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
            db.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            what = f"another program holds a transaction on {path} ({error}), so nothing can be written"
            yield Finding("error", what, "end that transaction or that program")


def _disk(path: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(path.parent).free
    if free < _LEAST_FREE_BYTES:
        yield Finding("warning", f"only {free:,} bytes are free on the disk of {path}", "free some space")
    else:
        yield Finding("ok", f"{free:,} bytes are free on its disk")


def _groups(db: sqlite3.Connection) -> Iterator[Finding]:
    """Groups without a member hold back retention and count as backlog."""
    for topic in topics.listed(db):
        number = figures.topic_id(db, topic.name)
        behind = slowest(db, number) if number is not None else None
        if behind is None:
            what = f"no group reads topic {topic.name}, so all of its events are kept"
            yield Finding(
                "warning", what, "start its handlers; otherwise publishing to it is refused at max_backlog_bytes"
            )
        for info in figures.groups(db, topic.name, clock.now(), clock.boot_id()):
            behind_end = any(each.end is not None and each.watermark < each.end for each in info.partitions.values())
            if info.members or not behind_end or info.group.startswith(PASSING):
                continue
            most = f", {behind.bytes:,} bytes behind" if behind and behind.group == info.group else ""
            yield Finding(
                "warning",
                f"group {info.group} of topic {topic.name} has unfinished events and no live member{most}",
                f"start its handlers, or drop it with `{drop_command(db, info.group, topic.name)}`",
            )
