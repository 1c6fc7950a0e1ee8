"""The topics that asides are stored in: one compacted topic for each group and topic."""

import hashlib
from collections.abc import Collection, Iterable

from onward.brokers.kafka.topics import ASIDE_PREFIX, KafkaTopics
from onward.event import Partition
from onward.settings import Settings

FAILURE_BYTES = 262_144  # what a failure may add to an event
_LONGEST_NAME = 249  # of a Kafka topic
_COMPACTED = {"cleanup.policy": "compact", "min.compaction.lag.ms": "3600000", "segment.ms": "86400000"}


def topic_name(group: str, topic: str) -> str:
    """Two dots separate group and topic, which may contain single ones."""
    name = f"{ASIDE_PREFIX}{group}..{topic}"
    return name if len(name) <= _LONGEST_NAME else f"{ASIDE_PREFIX}{hashlib.sha256(name.encode()).hexdigest()}"


def topics_of(group: str, names: Collection[str]) -> list[str]:
    """The topics that have an aside for the group, out of all topics of the cluster."""
    known = set(names)
    return [name for name in names if topic_name(group, name) in known]


def groups_of(topic: str, names: Iterable[str]) -> list[str]:
    """The groups that have an aside for the topic, out of all topics of the cluster; without those whose names are too
    long to be part of a topic's name, and without an aside that could also belong to another topic."""
    names, end = list(names), f"..{topic}"
    others = tuple(f"..{name}" for name in names if name != topic and name.endswith(end))
    mine = [name for name in names if name.startswith(ASIDE_PREFIX) and name.endswith(end)]
    groups = [name[len(ASIDE_PREFIX) : -len(end)] for name in mine if not name.endswith(others)]
    return [group for group in groups if group]


def missing(group: str, topic: str) -> str:
    return (
        f"topic {topic_name(group, topic)} does not exist or has too few partitions, and auto_declare is off; without "
        f"it no event of {topic} can be set aside: create it with as many partitions as {topic} has, and "
        "cleanup.policy=compact"
    )


class AsideTopics:
    """The aside topics of one group. Calls block, except for `is_ready`."""

    def __init__(self, topics: KafkaTopics, settings: Settings, group: str) -> None:
        self._topics = topics
        self._settings = settings
        self._group = group
        self._ready: dict[str, int] = {}  # how many partitions each aside has

    def all(self) -> list[str]:
        """The topics that have an aside."""
        return topics_of(self._group, self._topics.counts())

    def is_ready(self, partition: Partition) -> bool:
        """Whether the aside of a partition is known to exist."""
        return partition.index < self._ready.get(topic_name(self._group, partition.topic), 0)

    def prepare(self, topic: str, index: int = 0) -> bool:
        """Create the aside of a partition if auto_declare allows it. False: there is none.

        BrokerError: neither the topic nor its aside exists."""
        name = topic_name(self._group, topic)
        if self.is_ready(Partition(topic, index)):
            return True
        origin, mine = self._topics.described(topic), self._topics.described(name)
        if mine is None and self._settings.auto_declare:
            size = {"max.message.bytes": str(self._settings.max_event_bytes + FAILURE_BYTES)}
            origin = origin or self._topics.appeared(topic)
            mine = self._topics.create(name, origin.partitions, _COMPACTED | size)
        elif mine is not None and index >= mine.partitions and self._settings.auto_declare:
            mine = self._topics.grow(name, index + 1 if origin is None else origin.partitions)
        self._ready[name] = 0 if mine is None else mine.partitions
        return index < self._ready[name]

    def delete(self, topic: str) -> None:
        name = topic_name(self._group, topic)
        self._ready.pop(name, None)
        self._topics.delete(name)
