"""Checks of the file for operators: is it intact and durable, and does a process or a group block it?"""

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
        yield Finding("ok", f"{path} is intact: {size:,} bytes, SQLite {sqlite3.sqlite_version}")
    if features.durability == "fsync":
        yield Finding("ok", "durability fsync: accepted events survive a power cut")
    else:
        cure = "if no event may be lost, remove the setting durability, or set it to fsync"
        yield Finding("warning", "durability window: a power cut may lose the events of the last moments", cure)


def access(path: Path) -> list[Finding]:
    """A warning if files that should be private can be used by other users."""
    files = [Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm", "-lock")]
    shared = [str(file) for file in files if file.exists() and file.stat().st_mode & 0o077]
    if not shared:
        return []
    what = f"other users can read or write {', '.join(shared)}; by locking these files they could stop every publish"
    cure = f"{shlex.join(['chmod', '600', *shared])}; or, if this is intended, set file_mode=umask for every process"
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
    """An error if a program that does not use our lock file holds a transaction."""
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
    """Topics without a group, and groups that are behind and have no live member: their events are not removed."""
    for topic in topics.listed(db):
        number = figures.topic_id(db, topic.name)
        behind = slowest(db, number) if number is not None else None
        if behind is None:
            what = f"no group reads topic {topic.name}, so none of its events is removed"
            yield Finding(
                "warning", what, "start its handlers; otherwise publish will refuse events at max_backlog_bytes"
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
