"""The topics of a server: declared once, counted once, and refused where a process expects another count."""

import uuid
from collections.abc import Sequence
from typing import NamedTuple

from onward.brokers.base import Change, TopicSpec, Topology
from onward.brokers.core.topic_rules import TopicRules
from onward.brokers.redis.keys import TOPICS, Keyspace, PartitionKeys, TopicKeys
from onward.brokers.redis.lease_scripts import DECLARE
from onward.brokers.redis.link import Link
from onward.brokers.redis.scripts import Command
from onward.errors import PartitionsDiffer
from onward.event import Partition
from onward.settings import Settings

HASH = "murmur2"  # how keys are spread over partitions


class RedisTopic(NamedTuple):
    name: str
    log_ids: tuple[str, ...]  # by partition
    keys: tuple[PartitionKeys, ...]

    @property
    def partitions(self) -> int:
        return len(self.log_ids)

    @property
    def version(self) -> str:
        return version_of(self.partitions)


def version_of(partitions: int) -> str:
    """What a publisher and the server must agree on."""
    return f"{partitions}/{HASH}"


class RedisTopics:
    """Topics by name, as this process knows them. Any thread may ask."""

    def __init__(self, settings: Settings, keyspace: Keyspace) -> None:
        self.keyspace = keyspace
        self._rules = TopicRules(settings)
        self._known: dict[str, RedisTopic] = {}

    def known(self, name: str) -> RedisTopic | None:
        return self._known.get(name)

    def resolve(self, link: Link, name: str) -> RedisTopic:
        """The topic as the server has it, created where that is allowed. PartitionsDiffer: it is not as we expect."""
        stored = _stored(link, name)
        if stored is None:
            self._create(link, TopicSpec(name, self._rules.for_new(name)))
            stored = _stored(link, name)
            assert stored is not None, "created"
        known = self._known.get(name)
        self._rules.check(name, stored.partitions, known.partitions if known else None)
        topic = self._known[name] = self._declared(link, stored)
        return topic

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    def declare(self, link: Link, topology: Topology, *, apply: bool) -> list[Change]:
        def count(name: str) -> int | None:
            stored = _stored(link, name)
            return None if stored is None else stored.partitions

        return self._rules.plan(topology, count, (lambda spec: self._create(link, spec)) if apply else None)

    def keys(self, spec: TopicSpec) -> tuple[PartitionKeys, ...]:
        return tuple(self.keyspace.of(Partition(spec.name, index)) for index in range(spec.partitions))

    def _create(self, link: Link, spec: TopicSpec) -> None:
        """If two create it at once, the first one's count is stored."""
        key = TopicKeys(spec.name).topic
        link.ask(
            ("HSETNX", key, "hash", HASH),
            ("HSETNX", key, "partitions", spec.partitions),
            ("SADD", TOPICS, spec.name),
        )
        stored = _stored(link, spec.name)
        if stored is not None:
            self._declared(link, stored)

    def _declared(self, link: Link, spec: TopicSpec) -> RedisTopic:
        """Make what a partition lacks: a creation may have been interrupted, and keys may have been deleted."""
        link.connect()
        version = version_of(spec.partitions)
        keys = self.keys(spec)
        commands = [
            DECLARE([key.stream, key.meta, key.marks], link.incarnation(key.meta), uuid.uuid4().hex, version)
            for key in keys
        ]
        replies = link.ask(*commands)
        for found, _ in replies:
            if found.decode() != version:
                raise PartitionsDiffer(
                    f"topic {spec.name} has partitions of version {found.decode()}, but its own entry says {version}; "
                    "restore it from a backup, or drop the topic"
                )
        return RedisTopic(spec.name, tuple(log.decode() for _, log in replies), keys)


def listed(link: Link) -> Sequence[TopicSpec]:
    (found,) = link.ask(("SMEMBERS", TOPICS))
    names = sorted(name.decode() for name in found)
    specs = zip(names, link.ask(*map(_look, names)), strict=True) if names else ()
    return [spec for name, row in specs if (spec := _spec(name, row)) is not None]


def find(link: Link, name: str) -> TopicSpec | None:
    return _stored(link, name)


def _stored(link: Link, name: str) -> TopicSpec | None:
    (row,) = link.ask(_look(name))
    return _spec(name, row)


def _look(name: str) -> Command:
    return ("HMGET", TopicKeys(name).topic, "partitions", "hash")


def _spec(name: str, row: Sequence[bytes | None]) -> TopicSpec | None:
    count, hash_ = row
    if count is None:
        return None
    if hash_ is None or hash_.decode() != HASH:
        raise PartitionsDiffer(
            f"topic {name} spreads its keys by {(hash_ or b'nothing').decode()}, this version of Onward by {HASH}; use "
            "the version that created it, or a new topic"
        )
    return TopicSpec(name, int(count))
