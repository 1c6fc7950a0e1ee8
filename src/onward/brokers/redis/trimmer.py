"""Trimming: what every group has finished goes, by age or by size; what some group needs, or none has read, stays."""

from collections.abc import Sequence

from redis.exceptions import ResponseError

from onward import clock
from onward.brokers.redis.link import Link
from onward.brokers.redis.log_scripts import TRIM
from onward.brokers.redis.topics import RedisTopics
from onward.event import Partition
from onward.settings import Settings

_INTERVAL_S = 5.0
_ROUNDS = 20  # of some 1,000 events each, so that no other call waits long


class Trimmer:
    """The owner of a partition trims it. Several groups may do so: the second finds nothing to do."""

    def __init__(self, topics: RedisTopics, settings: Settings) -> None:
        self._topics = topics
        self._retention_ms = int(settings.retention_s * 1000)
        self._retention_bytes = settings.retention_bytes
        self._due = clock.now() + _INTERVAL_S

    def work(self, link: Link, owned: Sequence[Partition]) -> None:
        if clock.now() < self._due:
            return
        self._due = clock.now() + _INTERVAL_S
        owned = [each for each in owned if self._topics.keyspace.mapped(each.topic) is None]
        if not owned:
            return
        groups = link.ask(*[("SMEMBERS", self._topics.keyspace.of(partition).groups) for partition in owned])
        names = dict(zip(owned, groups, strict=True))
        left = list(owned)
        for _ in range(_ROUNDS):
            replies = link.call(*[self._trim(partition, names[partition]) for partition in left])
            found = zip(left, replies, strict=True)
            left = [partition for partition, reply in found if not isinstance(reply, ResponseError) and reply > 0]
            if not left:
                return

    def _trim(self, partition: Partition, groups: Sequence[bytes]) -> tuple[object, ...]:
        keys, topic = self._topics.keyspace.of(partition), self._topics.known(partition.topic)
        share = self._retention_bytes // (topic.partitions if topic else 1)
        members = [keys.group(group.decode()) for group in groups]
        return TRIM([keys.stream, keys.meta, keys.marks, keys.groups, *members], self._retention_ms, share)
