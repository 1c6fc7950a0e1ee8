"""Finds where assigned partitions start, from the group's commits and from the logs themselves."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import OffsetSpec

from onward.brokers.base import Start
from onward.brokers.kafka import commit_metadata
from onward.brokers.kafka.commit_metadata import Committed, LogBounds, StartPoint
from onward.brokers.kafka.log_offsets import ASK_S, offsets
from onward.brokers.kafka.topics import Cluster, KafkaTopic
from onward.errors import BrokerError
from onward.event import Partition

ACCEPT_GROWTH = (
    "if only Onward publishes to it, or when the events of the old partitions are handled, set "
    "on_partition_growth='accept'"
)


class Located(NamedTuple):
    """A start point in its log, and the suffix of the commits' metadata there."""

    point: StartPoint
    log_id: str
    suffix: str


class StartPoints:
    """With on_partition_growth="stop", partitions that were added after the group began are not located, and `troubles`
    has an entry for the topic."""

    def __init__(self, consumer: Consumer, cluster: Cluster, start: Start) -> None:
        self._consumer = consumer
        self._topics = cluster.topics
        self._admin = cluster.admin.client
        self._start = start
        self._growth: Literal["stop", "accept"] = cluster.settings.on_partition_growth
        self.troubles: dict[str, str] = {}

    def locate(self, partitions: Sequence[Partition]) -> dict[Partition, Located]:
        """KafkaException or BrokerError: a node did not answer; ask again later."""
        found: dict[Partition, Located] = {}
        for name in dict.fromkeys(partition.topic for partition in partitions):
            topic = self._topics.described(name)
            if topic is not None:  # otherwise it was deleted, and the group will take the partitions back
                found |= self._in_topic(topic, [each for each in partitions if each.topic == name])
        return found

    def _in_topic(self, topic: KafkaTopic, partitions: Sequence[Partition]) -> dict[Partition, Located]:
        committed = self._committed(topic)
        began_with = commit_metadata.partitions_at_start(committed, topic.partitions)
        suffix = commit_metadata.suffix_of(topic.log_id, began_with or topic.partitions)
        self.troubles.pop(topic.name, None)
        if self._growth == "stop" and 0 < began_with < topic.partitions:
            self.troubles[topic.name] = f"{grown(topic.name, began_with, topic.partitions)}; {ACCEPT_GROWTH}"
            partitions = [each for each in partitions if each.index < began_with]
        bounds = self._bounds(topic, partitions)
        return {
            each: Located(
                commit_metadata.start_point(each, committed[each.index], bounds[each], began_with=began_with),
                topic.log_id,
                suffix,
            )
            for each in partitions
        }

    def _committed(self, topic: KafkaTopic) -> dict[int, Committed]:
        places = [TopicPartition(topic.name, index) for index in range(topic.partitions)]
        found = self._consumer.committed(places, ASK_S)
        for place in found:
            if place.error is not None:
                raise BrokerError(f"commits of {topic.name}: {place.error.str()}")
        return {
            place.partition: Committed(None, "")
            if place.offset < 0 or place.metadata == commit_metadata.FORGOTTEN
            else Committed(place.offset, place.metadata or "")
            for place in found
        }

    def _bounds(self, topic: KafkaTopic, partitions: Sequence[Partition]) -> dict[Partition, LogBounds]:
        low = offsets(self._admin, partitions, OffsetSpec.earliest())
        high = offsets(self._admin, partitions, OffsetSpec.latest())
        ends = {"earliest": low, "latest": high}
        start = ends[str(self._start)] if str(self._start) in ends else self._at_time(partitions, high)
        return {each: LogBounds(topic.log_id, low[each], high[each], start[each]) for each in partitions}

    def _at_time(self, partitions: Sequence[Partition], high: Mapping[Partition, int]) -> dict[Partition, int]:
        spec = OffsetSpec.for_timestamp(int(float(self._start) * 1000))
        found = offsets(self._admin, partitions, spec)
        return {each: offset if offset >= 0 else high[each] for each, offset in found.items()}


def grown(topic: str, began_with: int, now: int) -> str:
    """The warning about a topic that got partitions after a group began."""
    return (
        f"topic {topic} has {now} partitions, and had {began_with} when the group began. Other producers may have "
        f"moved keys to partitions {began_with} to {now - 1}, so these are not read: a key's events could overtake its "
        "earlier ones"
    )
