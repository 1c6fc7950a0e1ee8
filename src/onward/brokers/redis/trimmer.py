"""Trimming: what every group has finished goes, by age, size or number. What some group needs stays, and also what no
group has read."""

import logging
from collections.abc import Mapping, Sequence

from redis.exceptions import ResponseError

from onward import clock
from onward.brokers.redis.foreign.scripts import TRIM_STREAM
from onward.brokers.redis.link import Link
from onward.brokers.redis.log_scripts import TRIM
from onward.brokers.redis.member import RedisMember
from onward.brokers.redis.scripts import Command
from onward.brokers.redis.topics import RedisTopics
from onward.event import Partition
from onward.settings import Settings

log = logging.getLogger("onward")

_INTERVAL_S = 5.0
_ROUNDS = 20  # of some 1,000 events each, so that no other call waits long


def retention(settings: Settings, partitions: int) -> tuple[int, int, int | str]:
    """As TRIM and RETAINED take it. The bytes are the topic's: each partition has its share."""
    events = "" if settings.retention_events is None else settings.retention_events
    return int(settings.retention_s * 1000), settings.retention_bytes // partitions, events


class Trimmer:
    """The owner of a partition trims it. Several groups may do so: the second finds nothing to do."""

    def __init__(self, topics: RedisTopics, settings: Settings, member: RedisMember) -> None:
        self._topics = topics
        self._settings = settings
        self._member = member
        self._unlisted: set[Partition] = set()  # reported as having a list of groups that is not complete
        self._kept: set[Partition] = set()  # reported as kept longer than the retention
        self._due = clock.now() + _INTERVAL_S

    def work(self, link: Link, owned: Sequence[Partition]) -> None:
        for partition in self._kept.difference(owned):
            self._report_kept(partition, 0)
        if clock.now() < self._due:
            return
        self._due = clock.now() + _INTERVAL_S
        owned = [each for each in owned if self._may_trim(each)]
        if not owned:
            return
        groups = link.ask(*[("SMEMBERS", self._topics.keyspace.of(partition).groups) for partition in owned])
        names = dict(zip(owned, groups, strict=True))
        left = self._listed(link, names)
        for _ in range(_ROUNDS):
            replies = link.call(*[self._command(partition, names[partition]) for partition in left])
            answers = dict(zip(left, replies, strict=True))
            left = [partition for partition, reply in answers.items() if self._trimmed(partition, reply)]
            if not left:
                return

    def _listed(self, link: Link, groups: Mapping[Partition, Sequence[bytes]]) -> list[Partition]:
        """Where our group is on the list. If another program has deleted the list, we are on it the next time."""
        name = self._member.group.encode()
        lost = [] if self._member.is_passing else [each for each, names in groups.items() if name not in names]
        if lost:
            link.ask(*[("SADD", self._topics.keyspace.of(each).groups, name) for each in lost])
        return [each for each in groups if each not in lost]

    def _may_trim(self, partition: Partition) -> bool:
        """Streams of other programs are trimmed only if the settings say so."""
        streams = self._topics.keyspace.mapped(partition.topic)
        return streams is None or streams.trim

    def _command(self, partition: Partition, groups: Sequence[bytes]) -> Command:
        keyspace, topic = self._topics.keyspace, self._topics.known(partition.topic)
        keys = keyspace.of(partition)
        members = [keys.group(group.decode()) for group in groups]
        limits = retention(self._settings, topic.partitions if topic else 1)
        if keyspace.mapped(partition.topic) is not None:
            return TRIM_STREAM([keys.stream, keys.groups, *members], *limits)
        return TRIM([*keys.log, *members], *limits)

    def _trimmed(self, partition: Partition, reply: Sequence[int] | ResponseError) -> bool:
        """Whether there may be more to trim."""
        if isinstance(reply, ResponseError):
            return False
        removed, kept = reply
        self._report_list(partition, is_complete=removed >= 0)
        if removed > 0:
            self._member.figures.trimmed(partition, removed)
        if kept or partition in self._kept:
            self._report_kept(partition, kept)
        return removed > 0

    def _report_list(self, partition: Partition, *, is_complete: bool) -> None:
        if is_complete:
            self._unlisted.discard(partition)
        elif partition not in self._unlisted:
            self._unlisted.add(partition)
            log.error(
                "%s is not trimmed: its list of groups, key %s, lacks a group; another program has deleted or changed "
                "it. Start each group of the topic once, or drop those that you do not need with `onward groups drop`",
                *(partition, self._topics.keyspace.of(partition).groups),
            )

    def _report_kept(self, partition: Partition, events: int) -> None:
        self._member.figures.kept(partition, events)
        self._kept = self._kept | {partition} if events else self._kept - {partition}
