"""Whether a client has ceased to read though there is more.

It may stay with a broker that leads a partition no more, for ever and without a word (librdkafka #5430, #5593): then
only another client helps.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

STALL_S = 15.0

Place = tuple[str, int]


class Read(Protocol):
    """How far a partition was read, and whether it is to be read on."""

    position: int
    buffered: int

    @property
    def flows(self) -> bool: ...


class Stall:
    """Asked again and again, it compares how far was read with how long the log was when it was asked first."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self._since: float | None = None
        self._stood: dict[Place, tuple[Read, int]] = {}
        self._ends: dict[Place, Future[Any]] = {}

    def rest(self) -> None:
        """Nothing is read, and nothing is to be: what was seen so far tells nothing."""
        self._since = None

    def look(self, reading: Mapping[Place, Read], now: float) -> list[Place]:
        """The partitions of which nothing was read for a while, though they had more all the time."""
        if self._since is None:
            self._begin(reading, now)
        elif now >= self._since + STALL_S:
            stuck = [place for place in self._stood if self._is_stuck(place, reading.get(place))]
            self._begin(reading, now)
            return stuck
        return []

    def _begin(self, reading: Mapping[Place, Read], now: float) -> None:
        self._since = now
        self._stood = {place: (read, read.position) for place, read in reading.items() if _is_starved(read)}
        asked = {TopicPartition(*place): OffsetSpec.latest() for place in self._stood}
        futures = self._admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED) if asked else {}
        self._ends = {(place.topic, place.partition): future for place, future in futures.items()}

    def _is_stuck(self, place: Place, read: Read | None) -> bool:
        before, position = self._stood[place]
        return read is before and _is_starved(read) and read.position == position and _end(self._ends[place]) > position


def _is_starved(read: Read) -> bool:
    return read.flows and not read.buffered


def _end(future: "Future[Any]") -> int:
    """Below every position where it is not known."""
    try:
        return int(future.result(0).offset) if future.done() else -1
    except KafkaException:
        return -1
