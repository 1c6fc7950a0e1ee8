"""The topics of a store. The first use of a topic sets its number of partitions; a process that expects another number
is refused."""

import sqlite3
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from onward.brokers.base import Change, TopicSpec, Topology
from onward.brokers.core.topic_rules import DEFAULT_PARTITIONS, TopicRules
from onward.brokers.sqlite import log
from onward.brokers.sqlite.database import Database
from onward.settings import Settings


class Topic(NamedTuple):
    id: int
    name: str
    log_id: str
    parts: tuple[int, ...]  # the ids of its partitions, by index


class Catalogue:
    """A cache of topics by name. Every transaction compares it with the store.

    It changes only inside a transaction that holds SQLite's write lock, so by one thread at a time. A topic is
    recognized by its log id, which is never used twice. So a topic that was created in a transaction of the application
    and rolled back is not mistaken for the next one."""

    def __init__(self, settings: Settings) -> None:
        self._rules = TopicRules(settings)
        self._known: dict[str, Topic] = {}

    def expected(self, name: str) -> int:
        """How many partitions the topic should have, as far as this process knows."""
        known = self._known.get(name)
        return len(known.parts) if known else self._rules.insisted(name) or DEFAULT_PARTITIONS

    def resolve(self, db: Database, name: str) -> tuple[Topic, int]:
        """The topic and the bytes ever appended to it. The topic is created if it is missing and that is allowed."""
        row = db.execute("SELECT id, partitions, log_id, bytes FROM onward_topic WHERE name = ?", (name,)).fetchone()
        if row is None:
            _create(db, TopicSpec(name, self._rules.for_new(name)))
            return self.resolve(db, name)
        number, partitions, log_id, size = row
        known = self._known.get(name)
        if known is None or known.log_id != log_id or len(known.parts) != partitions:
            same_log = known is not None and known.log_id == log_id
            self._rules.check(name, partitions, len(known.parts) if known and same_log else None)
            known = self._known[name] = Topic(number, name, log_id, _parts(db, number))
        return known, size

    def declare(self, db: sqlite3.Connection, topology: Topology, *, apply: bool) -> list[Change]:
        def count(name: str) -> int | None:
            row = db.execute("SELECT partitions FROM onward_topic WHERE name = ?", (name,)).fetchone()
            return None if row is None else int(row[0])

        return self._rules.plan(topology, count, (lambda spec: _create(db, spec)) if apply else None)

    def forget(self) -> None:
        """Forget all topics, because a transaction was rolled back and the topics that it created do not exist."""
        self._known.clear()


def listed(db: sqlite3.Connection) -> Sequence[TopicSpec]:
    return [TopicSpec(*row) for row in db.execute("SELECT name, partitions FROM onward_topic ORDER BY name")]


def delete(db: sqlite3.Connection, topic: int) -> None:
    """Delete the topic and everything that belongs to it. Its ids are never used again."""
    parts = "(SELECT id FROM onward_partition WHERE topic = ?)"
    for table in ("onward_aside", "onward_moved", "onward_group", "onward_fence"):
        db.execute(f"DELETE FROM {table} WHERE part IN {parts}", (topic,))
    for part in _parts(db, topic):
        db.execute("DELETE FROM onward_log WHERE at >= ? AND at < ?", (log.address(part), log.address(part + 1)))
    for table in ("onward_member", "onward_partition"):
        db.execute(f"DELETE FROM {table} WHERE topic = ?", (topic,))
    db.execute("DELETE FROM onward_topic WHERE id = ?", (topic,))


def _create(db: Database, spec: TopicSpec) -> None:
    db.execute(
        "INSERT INTO onward_topic (name, partitions, log_id) VALUES (?, ?, ?)",
        (spec.name, spec.partitions, uuid.uuid4().hex),
    )
    (number,) = db.execute("SELECT id FROM onward_topic WHERE name = ?", (spec.name,)).fetchone()
    db.executemany(
        "INSERT INTO onward_partition (topic, idx) VALUES (?, ?)", [(number, index) for index in range(spec.partitions)]
    )


def _parts(db: Database, topic: int) -> tuple[int, ...]:
    return tuple(
        part for (part,) in db.execute("SELECT id FROM onward_partition WHERE topic = ? ORDER BY idx", (topic,))
    )
