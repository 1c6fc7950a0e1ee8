"""Whether a client has stopped reading although the log has more events.

A client may keep asking a broker that no longer leads a partition, without an error (librdkafka #5430, #5593). Then
only a new client helps.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from onward.brokers.kafka.hold import KafkaHold

STALL_S = 15.0

PartitionId = tuple[str, int]


class StallCheck:
    """Compares, again and again, how far the client has read with the end that the log had at the previous look."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self._since: float | None = None
        self._stood: dict[PartitionId, tuple[KafkaHold, int]] = {}
        self._ends: dict[PartitionId, Future[Any]] = {}

    def rest(self) -> None:
        """Nothing needs to be read now, so earlier looks prove nothing."""
        self._since = None

    def look(self, reading: Mapping[PartitionId, KafkaHold], now: float) -> list[PartitionId]:
        """The partitions that were not read for STALL_S although their logs had more events all that time."""
        if self._since is None:
            self._begin(reading, now)
        elif now >= self._since + STALL_S:
            stuck = [place for place in self._stood if self._is_stuck(place, reading.get(place))]
            self._begin(reading, now)
            return stuck
        return []

    def _begin(self, reading: Mapping[PartitionId, KafkaHold], now: float) -> None:
        self._since = now
        self._stood = {place: (hold, hold.ahead.position) for place, hold in reading.items() if _is_starved(hold)}
        asked = {TopicPartition(*place): OffsetSpec.latest() for place in self._stood}
        futures = self._admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED) if asked else {}
        self._ends = {(place.topic, place.partition): future for place, future in futures.items()}

    def _is_stuck(self, place: PartitionId, hold: KafkaHold | None) -> bool:
        before, position = self._stood[place]
        if hold is not before or not _is_starved(hold) or hold.ahead.position != position:
            return False
        return _end(self._ends[place]) > position


def _is_starved(hold: KafkaHold) -> bool:
    return hold.flows and not hold.ahead.events


def _end(future: "Future[Any]") -> int:
    """-1: unknown."""
    try:
        return int(future.result(0).offset) if future.done() else -1
    except KafkaException:
        return -1
