"""The names of our keys. Pure.

All keys of a partition share the hash tag of its stream, so that a script may use them together on a cluster. Topic
names have no colon, so `{orders}` and `{orders:3}` are never the same tag.
"""

from functools import lru_cache
from typing import NamedTuple

from onward.event import Partition

TOPICS = "onward:topics"  # a set of names
RELAYS = "onward:relays"  # a hash: the highest fence seen of each outbox shard


class PartitionKeys(NamedTuple):
    tag: str

    @property
    def stream(self) -> str:
        return f"{{{self.tag}}}"

    @property
    def meta(self) -> str:
        """inc, log, version; bytes and count of all events ever appended; marked, done; fence."""
        return f"{{{self.tag}}}:meta"

    @property
    def marks(self) -> str:
        """Sorted by position: how many bytes and events lie before it."""
        return f"{{{self.tag}}}:marks"

    @property
    def groups(self) -> str:
        """The groups that count for trimming."""
        return f"{{{self.tag}}}:groups"

    @property
    def passing(self) -> str:
        """The groups that are forgotten without a member, and do not count."""
        return f"{{{self.tag}}}:passing"

    @property
    def relays(self) -> str:
        return f"{{{self.tag}}}:relays"

    def producer(self, name: str) -> str:
        return f"{{{self.tag}}}:p:{name}"

    def group(self, group: str) -> str:
        """The ownership and the progress of a group."""
        return f"{{{self.tag}}}:g:{group}"

    def rows(self, group: str) -> str:
        return f"{{{self.tag}}}:r:{group}"

    def bodies(self, group: str) -> str:
        return f"{{{self.tag}}}:b:{group}"

    def places(self, group: str) -> str:
        return f"{{{self.tag}}}:i:{group}"

    def moves(self, group: str) -> str:
        """Notices of moved records, for the owner."""
        return f"{{{self.tag}}}:m:{group}"

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


@lru_cache(maxsize=65_536)
def keys_of(partition: Partition) -> PartitionKeys:
    return PartitionKeys(f"{partition.topic}:{partition.index}")


_TYPES = {
    "meta": "hash",
    "marks": "zset",
    "groups": "set",
    "passing": "set",
    "relays": "hash",
    "p": "string",
    "g": "hash",
    "r": "hash",
}
_TYPES |= {"b": "hash", "i": "zset", "m": "list", "members": "hash", "news": "stream"}


def type_of(key: str) -> str:
    """The type that a key of ours has."""
    if key in (TOPICS, RELAYS):
        return "set" if key == TOPICS else "hash"
    tag, _, rest = key.partition("}")
    if not rest:
        return "stream" if ":" in tag else "hash"
    return _TYPES[rest.split(":")[1]]
