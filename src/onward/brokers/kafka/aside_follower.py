"""Follows the logs of asides, and folds their entries into tables."""

import logging
from collections.abc import Mapping, Sequence

import msgspec
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage
from confluent_kafka.admin import OffsetSpec

from onward import clock
from onward.brokers.core.folded_aside import AsideTable, BodyRoom, LogEntry
from onward.brokers.kafka.aside_topics import topic_name
from onward.brokers.kafka.aside_writer import FENCE_HEADER
from onward.brokers.kafka.client import REQUEST_S, explained, poll
from onward.brokers.kafka.closing import close_in_background
from onward.brokers.kafka.log_offsets import offsets
from onward.brokers.kafka.topics import Cluster
from onward.errors import BrokerError
from onward.event import Partition

log = logging.getLogger("onward")

_CATCH_UP_S = 30.0


class AsideFollower:
    """Follows the asides of one group; one call at a time. Bodies use at most `max_in_flight_bytes` over all tables."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._factory = cluster.factory
        self._admin = cluster.admin.client
        self._group = group
        self._room = BodyRoom(cluster.settings.max_in_flight_bytes)
        self._consumer: Consumer | None = None
        self.tables: dict[Partition, AsideTable] = {}

    def table(self, partition: Partition) -> AsideTable:
        """The table of a partition; an empty one if it is not followed."""
        return self.tables.get(partition) or AsideTable(self._room)

    def follow(self, partitions: Sequence[Partition]) -> None:
        """Follow these partitions too. Their asides must exist."""
        new = [each for each in partitions if each not in self.tables]
        if not new:
            return
        if self._consumer is None:
            more = {"group.id": self._group, "auto.offset.reset": "earliest", "queued.max.messages.kbytes": 8_192}
            more["fetch.wait.max.ms"] = 100
            self._consumer = self._factory.consumer(**more)
        self._consumer.incremental_assign([self._place(each) for each in new])
        self.tables |= {each: AsideTable(self._room) for each in new}

    def catch_up(self, partitions: Sequence[Partition]) -> None:
        """Read these to the current ends of their logs. BrokerError: it was not possible in time."""
        if not partitions:
            return
        names = [Partition(topic_name(self._group, each.topic), each.index) for each in partitions]
        try:
            ends = offsets(self._admin, names, OffsetSpec.latest(), within_s=REQUEST_S)
            end_at = clock.now() + _CATCH_UP_S
            while behind := self._behind(ends):
                if clock.now() > end_at:
                    self._start_over()
                    raise BrokerError(f"Kafka: the aside of {behind} could not be read to its end")
                self.take(0.1)
        except (KafkaException, TimeoutError) as error:
            raise explained(error, f"reading the aside of group {self._group}") from error

    def take(self, wait_s: float) -> None:
        """Fold the entries that have arrived, or that arrive within this time."""
        if self._consumer is None:
            return
        first = poll(self._consumer, wait_s)
        messages = [] if first is None else [first, *self._consumer.consume(1_000, 0)]
        names = {(topic_name(self._group, each.topic), each.index): each for each in self.tables}
        for message in messages:
            place = names.get((message.topic() or "", message.partition()))
            if message.error() is None and place is not None:
                _apply(self.tables[place], message)

    def forget(self, partition: Partition) -> None:
        table = self.tables.pop(partition, None)
        if table is not None and self._consumer is not None:
            table.clear()
            self._consumer.incremental_unassign([self._place(partition)])

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        self.tables.clear()

    def _place(self, partition: Partition) -> TopicPartition:
        return TopicPartition(topic_name(self._group, partition.topic), partition.index, 0)

    def _start_over(self) -> None:
        """Start over with a new client: this one may have stopped reading, see stall_check.py."""
        if self._consumer is not None:
            close_in_background(self._consumer.close)
            self._consumer = None
        for table in self.tables.values():
            table.clear()
        self.tables.clear()

    def _behind(self, ends: Mapping[Partition, int]) -> list[Partition]:
        assert self._consumer is not None, "partitions are followed before they are caught up with"
        found = self._consumer.position([TopicPartition(*each) for each in ends])
        read = {Partition(place.topic, place.partition): place.offset for place in found}
        return [each for each, end in ends.items() if end and read[each] < end]


def _apply(table: AsideTable, message: KafkaMessage) -> None:
    """Skip an entry that is not ours, so that the records after it are read."""
    try:
        table.apply(_entry(message))
    except (msgspec.MsgspecError, ValueError) as error:
        log.warning(
            "Kafka: %s/%d: the entry at offset %d is not a record of Onward and is skipped: %s",
            *(message.topic(), message.partition(), message.offset(), error),
        )


def _entry(message: KafkaMessage) -> LogEntry:
    """ValueError: it is not ours."""
    headers = dict(message.headers() or ())
    key, fence = message.key() or b"", headers.get(FENCE_HEADER) or b"0"
    return LogEntry(bytes(key).decode(), message.value(), int(fence), message.offset() or 0)
