"""The topics that this process uses, and how many partitions their keys use."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onward import clock
from onward.brokers.base import Change, TopicSpec, Topology
from onward.brokers.core.topic_rules import TopicRules
from onward.brokers.kafka.key_counts import KeyCounts
from onward.brokers.kafka.topics import Cluster, KafkaTopic
from onward.errors import BrokerError

log = logging.getLogger("onward")

_FRESH_S = 30.0  # after this time a topic is looked up again, because it may have been deleted and created again


class _Known(NamedTuple):
    topic: KafkaTopic
    key_partitions: int  # how many partitions keys use
    since: float


class KeyPlacement:
    """Publishers use the stored count of a topic, even if the topic has grown; see key_counts.py."""

    def __init__(self, cluster: Cluster) -> None:
        self._topics = cluster.topics
        self._may_create = cluster.settings.auto_declare
        self._rules = TopicRules(cluster.settings)
        self._counts = KeyCounts(cluster.factory, cluster.topics)
        self._known: dict[str, _Known] = {}

    def remembered(self, names: Iterable[str]) -> dict[str, int] | None:
        """The counts of these topics; None: one of them must be looked up."""
        counts, oldest = {}, clock.now() - _FRESH_S
        for name in names:
            known = self._known.get(name)
            if known is None or known.since <= oldest:
                return None
            counts[name] = known.key_partitions
        return counts

    async def counts(self, names: Iterable[str]) -> dict[str, int]:
        """The counts of these topics. Missing topics are created if that is allowed. PartitionsDiffer: this process
        expects another count. BrokerError: no answer, or a permission is missing."""
        names = set(names)
        found = self.remembered(names)
        return found if found is not None else await asyncio.to_thread(self._looked_up, names)

    async def check(self, name: str) -> None:
        """Check a topic that is to be read. It is created if that is allowed. Raises the same errors as `counts`."""
        await asyncio.to_thread(self._checked, name)

    def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        def count(name: str) -> int | None:
            topic = self._topics.described(name)
            if topic is None:
                return None
            return self._counts.settled(topic, create=True) if apply else self._stored(topic)

        def create(spec: TopicSpec) -> None:
            self._counts.settled(self._topics.create(spec.name, spec.partitions), create=True)

        return self._rules.plan(topology, count, create if apply else None)

    def forget(self, name: str) -> None:
        """The topic was deleted."""
        self._known.pop(name, None)

    def _looked_up(self, names: Iterable[str]) -> dict[str, int]:
        return {name: self._count(name) for name in names}

    def _count(self, name: str) -> int:
        known = self._known.get(name)
        try:
            topic = self._topics.described(name)
        except BrokerError:
            if known is None:
                raise
            topic = known.topic  # no answer: use the topic as it was at the last answer
        topic = topic or self._topics.create(name, self._rules.for_new(name))
        count = self._counts.settled(topic, create=self._may_create)
        self._rules.check(name, count, added=topic.partitions - count)
        if topic.partitions > count and (known is None or known.topic.partitions < topic.partitions):
            log.warning("Kafka: %s", unused(name, topic.partitions, count))
        self._known[name] = _Known(topic, count, clock.now())
        return count

    def _checked(self, name: str) -> None:
        topic = self._topics.described(name) or self._topics.create(name, self._rules.for_new(name))
        if self._rules.insisted(name) not in (None, topic.partitions):  # else a reader needs no access to the counts
            count = self._stored(topic)
            self._rules.check(name, count, added=topic.partitions - count)

    def _stored(self, topic: KafkaTopic) -> int:
        return self._counts.stored(topic) or topic.partitions


def unused(topic: str, partitions: int, count: int) -> str:
    """The warning about a topic that got partitions after the first publish."""
    return (
        f"topic {topic}: it has {partitions} partitions, and had {count} when its first event was published. Onward "
        f"publishes to the first {count} only, so that keys keep their partitions and their order"
    )
