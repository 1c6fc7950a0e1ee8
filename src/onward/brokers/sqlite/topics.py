"""The topics of a store: declared once, counted once, and refused where a process disagrees about the count."""

import sqlite3
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from onward.brokers.base import Change, TopicSpec
from onward.errors import BrokerError, PartitionsDiffer
from onward.settings import Settings, check_name

DEFAULT_PARTITIONS = 8


class Topic(NamedTuple):
    id: int
    name: str
    log_id: str
    parts: tuple[int, ...]  # the ids of its partitions, by index


class Catalogue:
    """Topics by name. The store is the truth; what is remembered is compared with it in every transaction."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._declared: dict[str, int] = {}  # counts that this process declared itself
        self._known: dict[str, Topic] = {}

    def expected(self, name: str) -> int:
        """How many partitions the topic should have, as far as this process knows."""
        known = self._known.get(name)
        return len(known.parts) if known else self._insisted(name) or DEFAULT_PARTITIONS

    def resolve(self, db: sqlite3.Connection, name: str) -> tuple[Topic, int]:
        """The topic and the bytes ever appended to it; created where that is allowed."""
        row = db.execute("SELECT id, partitions, log_id, bytes FROM onward_topic WHERE name = ?", (name,)).fetchone()
        if row is None:
            return self._first_use(db, name), 0
        number, partitions, log_id, size = row
        known = self._known.get(name)
        if known is None or known.id != number or len(known.parts) != partitions:
            self._check_count(name, partitions, known)
            known = self._known[name] = Topic(number, name, log_id, _parts(db, number))
        return known, size

    def declare(self, db: sqlite3.Connection, specs: Sequence[TopicSpec], *, apply: bool) -> list[Change]:
        changes = []
        for spec in specs:
            check_name("topic", spec.name)
            row = db.execute("SELECT partitions FROM onward_topic WHERE name = ?", (spec.name,)).fetchone()
            if row is None:
                changes.append(Change(spec.name, "create", f"create {spec.name} with {spec.partitions} partitions"))
                if apply:
                    _create(db, spec.name, spec.partitions)
            elif row[0] != spec.partitions:
                changes.append(Change(spec.name, "refuse", _differ(spec.name, row[0], spec.partitions)))
                continue
            if apply or row is not None:
                self._declared[spec.name] = spec.partitions
        return changes

    def forget(self) -> None:
        """A transaction was rolled back: what it created does not exist."""
        self._known.clear()

    def _first_use(self, db: sqlite3.Connection, name: str) -> Topic:
        check_name("topic", name)
        if not self._settings.auto_declare:
            raise BrokerError(
                f"topic {name} does not exist and auto_declare is off; declare it first, or turn auto_declare on"
            )
        _create(db, name, self._insisted(name) or DEFAULT_PARTITIONS)
        return self.resolve(db, name)[0]

    def _insisted(self, name: str) -> int | None:
        """The count that this process was told; None: whatever is stored will do."""
        return self._declared.get(name, self._settings.partitions)

    def _check_count(self, name: str, stored: int, known: Topic | None) -> None:
        wanted = self._insisted(name) or (len(known.parts) if known else stored)
        grown = stored > wanted and self._settings.on_partition_growth == "accept"
        if stored != wanted and not grown:
            raise PartitionsDiffer(_differ(name, stored, wanted))


def _create(db: sqlite3.Connection, name: str, partitions: int) -> None:
    db.execute(
        "INSERT INTO onward_topic (name, partitions, log_id) VALUES (?, ?, ?)", (name, partitions, uuid.uuid4().hex)
    )
    (number,) = db.execute("SELECT id FROM onward_topic WHERE name = ?", (name,)).fetchone()
    db.executemany(
        "INSERT INTO onward_partition (topic, idx) VALUES (?, ?)", [(number, index) for index in range(partitions)]
    )


def _parts(db: sqlite3.Connection, topic: int) -> tuple[int, ...]:
    return tuple(
        part for (part,) in db.execute("SELECT id FROM onward_partition WHERE topic = ? ORDER BY idx", (topic,))
    )


def _differ(name: str, stored: int, wanted: int) -> str:
    return (
        f"topic {name} is stored with {stored} partitions, this process says {wanted}; a key would change its "
        f"partition and lose its order. Set partitions={stored} here, or use a new topic"
    )
