"""The names of our keys. Pure.

All keys of a partition share the hash tag of its stream, so that a script may use them together on a cluster. Topic
names have no colon, so `{orders}` and `{orders:3}` are never the same tag.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from onward.brokers.redis.foreign.streams import Streams, tag_of
from onward.event import Partition

TOPICS = "onward:topics"  # a set of names
RELAYS = "onward:relays"  # a hash: the highest fence seen of each outbox shard


class PartitionKeys(NamedTuple):
    stream: str
    prefix: str  # of all other keys; it has the hash tag of the stream

    @classmethod
    def own(cls, partition: Partition) -> "PartitionKeys":
        """Of a partition whose stream is ours."""
        stream = f"{{{partition.topic}:{partition.index}}}"
        return cls(stream, stream)

    @classmethod
    def foreign(cls, stream: str) -> "PartitionKeys":
        """Of a stream of others. Its whole name is in the prefix, because several streams may share a tag."""
        return cls(stream, f"{{{tag_of(stream)}}}:onward:{stream}")

    @property
    def meta(self) -> str:
        """inc, log, version; bytes and count of all events ever appended, and the size of the largest; marked, done;
        fence; groups that count."""
        return f"{self.prefix}:meta"

    @property
    def marks(self) -> str:
        """Sorted by position: how many bytes and events lie before it."""
        return f"{self.prefix}:marks"

    @property
    def groups(self) -> str:
        """The groups that count for trimming."""
        return f"{self.prefix}:groups"

    @property
    def passing(self) -> str:
        """The groups that are forgotten without a member, and do not count."""
        return f"{self.prefix}:passing"

    @property
    def relays(self) -> str:
        return f"{self.prefix}:relays"

    @property
    def log(self) -> list[str]:
        """What counts the events of the log, and the groups that hold them back."""
        return [self.stream, self.meta, self.marks, self.groups]

    def producer(self, name: str) -> str:
        return f"{self.prefix}:p:{name}"

    def group(self, group: str) -> str:
        """The ownership and the progress of a group."""
        return f"{self.prefix}:g:{group}"

    def rows(self, group: str) -> str:
        return f"{self.prefix}:r:{group}"

    def bodies(self, group: str) -> str:
        return f"{self.prefix}:b:{group}"

    def places(self, group: str) -> str:
        return f"{self.prefix}:i:{group}"

    def moves(self, group: str) -> str:
        """Notices of moved records, for the owner."""
        return f"{self.prefix}:m:{group}"

    def aside(self, group: str) -> list[str]:
        return [self.rows(group), self.bodies(group), self.places(group)]


class TopicKeys(NamedTuple):
    name: str

    @property
    def topic(self) -> str:
        """The partition count and the hash version."""
        return f"{{{self.name}}}"

    def members(self, group: str) -> str:
        return f"{{{self.name}}}:members:{group}"

    def news(self, group: str) -> str:
        """A stream of one entry: it grows when the group's members have something to look at."""
        return f"{{{self.name}}}:news:{group}"


class Keyspace:
    """The keys of each partition. A topic has streams of its own, unless it is mapped to streams of others: by our
    settings, or as the server has it stored. Any thread may ask."""

    def __init__(self, mapped: Mapping[str, Streams]) -> None:
        self._mapped = dict(mapped)
        self._stored: dict[str, Streams | None] = {}
        self._known: dict[Partition, PartitionKeys] = {}

    def of(self, partition: Partition) -> PartitionKeys:
        known = self._known.get(partition)
        if known is None:
            known = self._known[partition] = self._made(partition)
        return known

    def mapped(self, topic: str) -> Streams | None:
        """The streams of others that our settings map the topic to."""
        return self._mapped.get(topic)

    def learn(self, topic: str, stored: Streams | None) -> None:
        """The topic exists, on these streams of others, or, with None, on its own."""
        if self._stored.get(topic, self._mapped.get(topic)) != stored:
            self.forget(topic)
        self._stored[topic] = stored

    def forget(self, topic: str) -> None:
        """It was dropped: what our settings say counts again."""
        self._stored.pop(topic, None)
        for partition in [each for each in tuple(self._known) if each.topic == topic]:
            self._known.pop(partition, None)

    def streams(self, topic: str) -> Streams | None:
        """The streams of others that the topic is on, as far as we know."""
        return self._stored.get(topic, self._mapped.get(topic))

    def _made(self, partition: Partition) -> PartitionKeys:
        streams = self.streams(partition.topic)
        return (
            PartitionKeys.own(partition) if streams is None else PartitionKeys.foreign(streams.stream(partition.index))
        )


_TYPES = {
    "meta": "hash",
    "marks": "zset",
    "groups": "set",
    "passing": "set",
    "relays": "hash",
    "p": "string",
    "g": "hash",
    "r": "hash",
    "b": "hash",
    "i": "zset",
    "m": "list",
    "members": "hash",
    "news": "stream",
}
_ENDING = re.compile(r":(?:(meta|marks|groups|passing|relays)|(p|g|r|b|i|m|members|news):[^:]+)$")


def type_of(key: str) -> str:
    """The type that a key of ours has."""
    if key in (TOPICS, RELAYS):
        return "set" if key == TOPICS else "hash"
    if key.startswith("{") and (ending := _ENDING.search(key)):
        return _TYPES[ending[1] or ending[2]]
    return "hash" if re.fullmatch(r"\{[^:]+\}", key) else "stream"
