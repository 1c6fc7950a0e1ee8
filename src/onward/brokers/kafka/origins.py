"""Where the partitions that come to us begin: asked of the group's commits and of the logs themselves."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from confluent_kafka import OFFSET_INVALID, Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from onward import clock
from onward.brokers.base import Start
from onward.brokers.kafka import marks
from onward.brokers.kafka.client import explained
from onward.brokers.kafka.marks import Committed, Log, Origin
from onward.brokers.kafka.topics import Catalogue, Topic
from onward.errors import BrokerError
from onward.event import Partition

_ASK_S = 2.0  # not much of a session: the member's thread waits for it
_LIST_S = 1.0
_AGAIN_S = 0.05
_SOON = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.FENCED_LEADER_EPOCH,  # a restarted leader, asked for by one that knows the former one
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._NOENT,  # the client knows no leader
        KafkaError._TIMED_OUT,  # or one that is dead
    }
)

Growth = Literal["stop", "accept"]
Found = tuple[Origin, str, str]  # with the log's id and the suffix of its marks


class Origins:
    """`growth`: what becomes of partitions that were added after the group began. "stop": they are not found, and
    `troubles` says so by topic."""

    def __init__(self, consumer: Consumer, catalogue: Catalogue, start: Start, growth: Growth) -> None:
        self._consumer = consumer
        self._catalogue = catalogue
        self._start = start
        self._growth = growth
        self.troubles: dict[str, str] = {}

    def find(self, partitions: Sequence[Partition]) -> dict[Partition, Found]:
        """KafkaException or BrokerError: somebody did not answer; ask again."""
        found: dict[Partition, Found] = {}
        for name in dict.fromkeys(partition.topic for partition in partitions):
            topic = self._catalogue.described(name)
            if topic is None:
                continue  # deleted meanwhile: the group will take it back
            found |= self._of_topic(topic, [each for each in partitions if each.topic == name])
        return found

    def _of_topic(self, topic: Topic, partitions: Sequence[Partition]) -> dict[Partition, Found]:
        committed = self._committed(topic)
        begun = marks.began_with(committed, topic.partitions)
        suffix = marks.suffixed(topic.log_id, begun or topic.partitions)
        self.troubles.pop(topic.name, None)
        if self._growth == "stop" and 0 < begun < topic.partitions:
            self.troubles[topic.name] = _grown(topic, begun)
            partitions = [each for each in partitions if each.index < begun]
        logs = self._logs(topic, partitions)
        return {
            each: (marks.origin(each, committed[each.index], logs[each], begun=begun), topic.log_id, suffix)
            for each in partitions
        }

    def _committed(self, topic: Topic) -> dict[int, Committed]:
        places = [TopicPartition(topic.name, index) for index in range(topic.partitions)]
        found = self._consumer.committed(places, _ASK_S)
        for place in found:
            if place.error is not None:
                raise BrokerError(f"commits of {topic.name}: {place.error.str()}")
        return {
            place.partition: Committed(None, "")
            if place.offset < 0 or place.metadata == marks.FORGOTTEN
            else Committed(place.offset, place.metadata or "")
            for place in found
        }

    def _logs(self, topic: Topic, partitions: Sequence[Partition]) -> dict[Partition, Log]:
        low = offsets(self._catalogue.admin, partitions, OffsetSpec.earliest())
        high = offsets(self._catalogue.admin, partitions, OffsetSpec.latest())
        ends = {"earliest": low, "latest": high}
        start = ends[str(self._start)] if str(self._start) in ends else self._at_time(partitions, high)
        return {each: Log(topic.log_id, low[each], high[each], start[each]) for each in partitions}

    def _at_time(self, partitions: Sequence[Partition], high: Mapping[Partition, int]) -> dict[Partition, int]:
        spec = OffsetSpec.for_timestamp(int(float(self._start) * 1000))
        found = offsets(self._catalogue.admin, partitions, spec)
        return {each: offset if offset >= 0 else high[each] for each, offset in found.items()}


def _grown(topic: Topic, begun: int) -> str:
    return (
        f"topic {topic.name} has {topic.partitions} partitions, and had {begun} when the group began: keys have moved, "
        f"so partitions {begun} to {topic.partitions - 1} are not read: a key's events could pass those before them. "
        "When the others are done, or if their order does not matter, set on_partition_growth='accept'"
    )


def offsets(
    admin: Any, partitions: Sequence[Partition], spec: Any, *, within_s: float = _ASK_S
) -> dict[Partition, int]:
    """Of each partition; a leader that has only just become one is asked again.

    KafkaException or BrokerError: somebody did not answer; ask again."""
    end = clock.now() + within_s
    while True:
        try:
            return _offsets(admin, partitions, spec)
        except (KafkaException, TimeoutError) as error:
            if isinstance(error, KafkaException) and error.args[0].code() not in _SOON:
                raise
            time.sleep(_AGAIN_S)
            with contextlib.suppress(KafkaException):
                # It keeps to what it knew of leaders until it is made to ask, and so would whoever asks next.
                admin.list_topics(timeout=_LIST_S)
            if clock.now() > end:
                raise explained(error, f"asking for the offsets of {partitions[0].topic}") from error


def _offsets(admin: Any, partitions: Sequence[Partition], spec: Any) -> dict[Partition, int]:
    asked = {TopicPartition(*each): spec for each in partitions}
    futures = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_ASK_S)
    found = {Partition(each.topic, each.partition): future.result(_ASK_S).offset for each, future in futures.items()}
    for partition, offset in found.items():
        if offset == OFFSET_INVALID:  # what librdkafka says, and no error, of a leader that did not answer
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"the leader of {partition} does not answer"))
    return found
