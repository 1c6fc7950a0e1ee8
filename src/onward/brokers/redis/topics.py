"""The topics of a server: declared once, counted once, and refused where a process expects another count."""

import uuid
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from onward.brokers.base import Change, TopicSpec, Topology
from onward.brokers.core.topic_rules import TopicRules
from onward.brokers.redis.foreign.scripts import DECLARE_STREAM
from onward.brokers.redis.foreign.streams import Streams
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
    streams: Streams | None = None  # of others, to which our settings map the topic

    @property
    def partitions(self) -> int:
        return len(self.log_ids)

    @property
    def version(self) -> str:
        return version_of(self.name, self.partitions, self.streams)


def version_of(name: str, partitions: int, streams: Streams | None) -> str:
    """What a publisher and the server must agree on. A stream of others belongs to one topic only."""
    return f"{partitions}/{HASH}" if streams is None else f"{partitions}/{name}={streams.name}"


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
        stored = self._stored(link, name)
        if stored is None:
            self._create(link, TopicSpec(name, self._count_for_new(name)))
            stored = self._stored(link, name)
            assert stored is not None, "created"
        known, mapped = self._known.get(name), self.keyspace.mapped(name)
        check_mapping(name, mapped, self.keyspace.streams(name))
        if mapped is None:
            self._rules.check(name, stored.partitions, known.partitions if known else None)
        elif mapped.hash is not None:
            _agree_on_hash(link, name, mapped)
        topic = self._known[name] = self._declared(link, stored)
        return topic

    def _count_for_new(self, name: str) -> int:
        mapped = self.keyspace.mapped(name)
        count = self._rules.for_new(name)
        return count if mapped is None else mapped.partitions

    def forget(self, name: str) -> None:
        self._known.pop(name, None)
        self.keyspace.forget(name)

    def declare(self, link: Link, topology: Topology, *, apply: bool) -> list[Change]:
        def count(name: str) -> int | None:
            stored = self._stored(link, name)
            return None if stored is None else stored.partitions

        topology = msgspec.structs.replace(topology, topics=[self._sized(spec) for spec in topology.topics])
        return self._rules.plan(topology, count, (lambda spec: self._create(link, spec)) if apply else None)

    def _sized(self, spec: TopicSpec) -> TopicSpec:
        """The number of shards counts, where the topic is mapped to streams of others."""
        mapped = self.keyspace.mapped(spec.name)
        return spec if mapped is None else TopicSpec(spec.name, mapped.partitions)

    def keys(self, spec: TopicSpec) -> tuple[PartitionKeys, ...]:
        return tuple(self.keyspace.of(Partition(spec.name, index)) for index in range(spec.partitions))

    def _create(self, link: Link, spec: TopicSpec) -> None:
        """If two create it at once, the first one's count is stored."""
        key = TopicKeys(spec.name).topic
        mapped = self.keyspace.mapped(spec.name)
        link.ask(
            *([("HSETNX", key, "hash", HASH)] if mapped is None else _mapping(key, mapped)),
            ("HSETNX", key, "partitions", spec.partitions),
            ("SADD", TOPICS, spec.name),
        )
        stored = self._stored(link, spec.name)
        if stored is not None:
            self._declared(link, stored)

    def _stored(self, link: Link, name: str) -> TopicSpec | None:
        """PartitionsDiffer: its keys are spread in another way than ours."""
        (row,) = link.ask(_look(name))
        _check_hash(name, row)
        return _spec(self.keyspace, name, row)

    def _declared(self, link: Link, spec: TopicSpec) -> RedisTopic:
        """Make what a partition lacks: a creation may have been interrupted, and keys may have been deleted."""
        link.connect()
        mapped = self.keyspace.mapped(spec.name)
        version, keys = version_of(spec.name, spec.partitions, mapped), self.keys(spec)
        if mapped is None:
            calls = [DECLARE([each.stream, each.meta, each.marks], *_life(link, each), version) for each in keys]
        else:
            calls = [DECLARE_STREAM([each.stream, each.meta], *_life(link, each), version) for each in keys]
        replies = link.ask(*calls)
        for found, _ in replies:
            if found.decode() != version:
                raise PartitionsDiffer(_other_version(spec.name, found.decode(), version, mapped))
        return RedisTopic(spec.name, tuple(log.decode() for _, log in replies), keys, mapped)


def _life(link: Link, keys: PartitionKeys) -> tuple[str, str]:
    """For a new log: the incarnation of its server, and its id."""
    return link.incarnation(keys.meta), uuid.uuid4().hex


def _other_version(name: str, found: str, version: str, mapped: Streams | None) -> str:
    if mapped is not None and "=" in found:
        taken, _, stream = found.partition("/")[2].partition("=")
        return f"stream {mapped.name} belongs to topic {taken} (streams {stream}), not to {name}; use that topic"
    return (
        f"topic {name} has partitions of version {found}, but its own entry says {version}; restore it from a backup, "
        "or drop the topic"
    )


def check_mapping(name: str, mapped: Streams | None, stored: Streams | None) -> None:
    """PartitionsDiffer: our settings map the topic to other streams than those that the server has stored."""
    if (mapped and mapped.place) == (stored and stored.place):
        return
    ours = f"this process has it on {mapped.place_text}" if mapped else "this process has no mapping for it"
    theirs = f"is on {stored.place_text}" if stored else "has streams of its own"
    cure = "use another name for the topic"
    if stored:
        write = f"write streams={{{name!r}: Streams({stored.place_text})}}"
        cure = f"{write}, or forget the topic first: await app.broker.drop_topic({name!r})"
    raise PartitionsDiffer(f"topic {name} {theirs}, {ours}; {cure}")


def _mapping(key: str, mapped: Streams) -> list[Command]:
    shards = "" if mapped.shards is None else str(mapped.shards)
    return [("HSETNX", key, "stream", mapped.name), ("HSETNX", key, "shards", shards)]


def _agree_on_hash(link: Link, name: str, mapped: Streams) -> None:
    key = TopicKeys(name).topic
    _, found = link.ask(("HSETNX", key, "hash", mapped.hash), ("HGET", key, "hash"))
    if found.decode() != mapped.hash:
        raise PartitionsDiffer(
            f"topic {name} spreads its keys by {found.decode()}, this process by {mapped.hash}; keys would change "
            f"their streams and lose their order. Write hash={found.decode()!r}"
        )


def listed(link: Link, keyspace: Keyspace) -> Sequence[TopicSpec]:
    (found,) = link.ask(("SMEMBERS", TOPICS))
    names = sorted(name.decode() for name in found)
    rows = zip(names, link.ask(*map(_look, names)), strict=True) if names else ()
    return [spec for name, row in rows if (spec := _spec(keyspace, name, row)) is not None]


def find(link: Link, keyspace: Keyspace, name: str) -> TopicSpec | None:
    """For operators, who need no key's partition."""
    (row,) = link.ask(_look(name))
    return _spec(keyspace, name, row)


def _look(name: str) -> Command:
    return ("HMGET", TopicKeys(name).topic, "partitions", "hash", "stream", "shards")


def _spec(keyspace: Keyspace, name: str, row: Sequence[bytes | None]) -> TopicSpec | None:
    count, _, stream, shards = row
    if count is None:
        return None
    if stream is not None:
        keyspace.learn(name, Streams(stream.decode(), shards=int(shards) if shards else None))
        return TopicSpec(name, int(count))
    keyspace.learn(name, None)
    return TopicSpec(name, int(count))


def _check_hash(name: str, row: Sequence[bytes | None]) -> None:
    count, hash_, stream, _ = row
    if count is not None and stream is None and (hash_ is None or hash_.decode() != HASH):
        raise PartitionsDiffer(
            f"topic {name} spreads its keys by {(hash_ or b'nothing').decode()}, this version of Onward by {HASH}; use "
            "the version that created it, or a new topic"
        )
