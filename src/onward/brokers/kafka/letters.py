"""The log of the aside: a compacted topic for each group and topic, written and followed here. Calls block."""

import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as KafkaMessage
from confluent_kafka.admin import OffsetSpec

from onward import clock
from onward.brokers.base import AsideRecord
from onward.brokers.kafka.bodies import Bodies
from onward.brokers.kafka.client import REQUEST_S, Client, explained
from onward.brokers.kafka.origins import offsets
from onward.brokers.kafka.parting import dismiss
from onward.brokers.kafka.table import Entry, Room, Row, Table
from onward.brokers.kafka.topics import Catalogue
from onward.errors import BrokerError
from onward.event import Partition
from onward.settings import Settings

log = logging.getLogger("onward")

_LONGEST_NAME = 249  # of a Kafka topic
_CATCH_UP_S = 30.0
_STORY_BYTES = 262_144  # what a failure adds to an event
_PREFIX = "onward.aside."
_COMPACTED = {"cleanup.policy": "compact", "min.compaction.lag.ms": "3600000", "segment.ms": "86400000"}

# An entry written twice is one entry, so this one need not wait for a number from the cluster.
_PLAIN = {
    "enable.gapless.guarantee": False,
    "enable.idempotence": False,
    "max.in.flight.requests.per.connection": 1,
    "acks": "all",
}

Placed = tuple[int, Entry]  # with the index of its partition


def topic_name(group: str, topic: str) -> str:
    """Two dots part what may hold single ones."""
    name = f"{_PREFIX}{group}..{topic}"
    return name if len(name) <= _LONGEST_NAME else f"{_PREFIX}{hashlib.sha256(name.encode()).hexdigest()}"


def missing(group: str, topic: str) -> str:
    return (
        f"topic {topic_name(group, topic)} is not there, or too small, and auto_declare is off; without it no event of "
        f"{topic} can be set aside: create it with as many partitions as {topic} has, and cleanup.policy=compact"
    )


def topics_of(group: str, names: Sequence[str]) -> list[str]:
    """The topics that have an aside for the group, of all topics of the cluster."""
    known = set(names)
    return [name for name in names if topic_name(group, name) in known]


class Letters:
    """One group's asides. Safe to call from any thread; one call at a time.

    In memory are the rows of the records, and at most `max_in_flight_bytes` of their bodies."""

    def __init__(self, client: Client, catalogue: Catalogue, settings: Settings, group: str) -> None:
        self._client = client
        self._catalogue = catalogue
        self._settings = settings
        self._group = group
        self._lock = threading.RLock()
        self._tables: dict[Partition, Table] = {}
        self._room = Room(settings.max_in_flight_bytes)
        self._bodies = Bodies(client, group)
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._ready: dict[str, int] = {}  # how many partitions each aside has

    def topics(self) -> list[str]:
        return topics_of(self._group, self._catalogue.names())

    def prepare(self, topic: str, index: int = 0) -> bool:
        """See that the aside of a topic has this partition, where that is allowed; False where it has not.

        BrokerError: nobody knows the topic, nor its aside."""
        name = topic_name(self._group, topic)
        if index < self._ready.get(name, 0):
            return True
        origin, mine = self._catalogue.described(topic), self._catalogue.described(name)
        if mine is None and self._settings.auto_declare:
            size = {"max.message.bytes": str(self._settings.max_event_bytes + _STORY_BYTES)}
            origin = origin or self._catalogue.appeared(topic)
            mine = self._catalogue.create(name, origin.partitions, _COMPACTED | size)
        elif mine is not None and index >= mine.partitions and self._settings.auto_declare:
            mine = self._catalogue.grow(name, index + 1 if origin is None else origin.partitions)
            with self._lock:
                self._producer = None  # it would not see the new partitions for a while
        self._ready[name] = 0 if mine is None else mine.partitions
        return index < self._ready[name]

    def write(self, topic: str, entries: Sequence[Placed]) -> list[int | str]:
        """Where each was stored, or why it was not."""
        if not entries:
            return []
        with self._lock:
            if not self.prepare(topic, max(index for index, _ in entries)):
                return [missing(self._group, topic)] * len(entries)
            return self._send(topic_name(self._group, topic), entries)

    def _send(self, name: str, entries: Sequence[Placed]) -> list[int | str]:
        if self._producer is None:
            size = self._settings.max_event_bytes + 2 * _STORY_BYTES
            self._producer = self._client.producer(**_PLAIN, **{"message.max.bytes": size})
        producer, answers = self._producer, dict[int, int | str]()

        def report(at: int, error: KafkaError | None, message: KafkaMessage) -> None:
            answers[at] = error.str() if error is not None else message.offset()

        for at, (index, entry) in enumerate(entries):
            try:
                producer.produce(
                    name,
                    entry.value,
                    entry.key,
                    index,
                    partial(report, at),
                    headers=[("onward-fence", str(entry.fence).encode())],
                )
            except (KafkaException, BufferError) as error:
                answers[at] = str(error)
        if producer.flush(self._settings.publish_timeout_s):
            producer.purge()
            producer.flush(1.0)
            self._producer = None
        return [answers.get(at, "no answer in time") for at in range(len(entries))]

    @contextmanager
    def reading(self, partitions: Sequence[Partition]) -> Iterator[dict[Partition, Table]]:
        """The tables as the log has them now; within it nobody else changes them.

        BrokerError: they could not be read to their ends."""
        with self._lock:
            existing = [each for each in partitions if self.prepare(each.topic, each.index)]
            self._follow(existing)
            self._catch_up(existing)
            yield {each: self._tables.get(each) or Table(self._room) for each in partitions}

    def records(self, partition: Partition, rows: Sequence[Row]) -> list[AsideRecord]:
        """The records of these rows, but for those that are gone meanwhile."""
        kept = [row.body for row in rows if row.body is not None]
        if len(kept) == len(rows):
            return [row.record(body) for row, body in zip(rows, kept, strict=True)]
        found = self._read(partition, rows)
        return [found[row.id] for row in rows if row.id in found]

    def standing(self, topic: str, entries: Sequence[Placed]) -> list[Row | None]:
        """What stands under the keys of these entries."""
        with self.reading(list(dict.fromkeys(Partition(topic, index) for index, _ in entries))) as tables:
            return [tables[Partition(topic, index)].rows.get(entry.key) for index, entry in entries]

    def restored(self, topic: str, entries: Sequence[Placed], rows: Sequence[Row | None]) -> list[Placed]:
        """What is written over these entries to have again what stood there."""
        again = []
        for (index, entry), row in zip(entries, rows, strict=True):
            records = [] if row is None else self.records(Partition(topic, index), [row])
            again.append(
                (index, Entry(entry.key, msgspec.msgpack.encode(records[0]) if records else None, entry.fence))
            )
        return again

    def _read(self, partition: Partition, rows: Sequence[Row]) -> dict[str, AsideRecord]:
        absent = [row.offset for row in rows if row.body is None]
        read = self._bodies.read(topic_name(self._group, partition.topic), partition.index, absent) if absent else {}
        bodies = {row.id: read.get(row.offset) if row.body is None else row.body for row in rows}
        found = {row.id: row.record(body) for row in rows if (body := bodies[row.id]) is not None}
        missing = [row for row in rows if row.id not in found]
        return found | self._read(partition, self._anew(partition, missing)) if missing else found

    def _anew(self, partition: Partition, rows: Sequence[Row]) -> list[Row]:
        """Compaction has taken the bodies of these: there are newer ones, or the records are gone."""
        with self.reading([partition]) as tables:
            table = tables[partition]
            newer = [table.rows[row.id] for row in rows if row.id in table.rows]
            for row in rows:
                if row in newer:
                    table.remove(row.id)
                    name = topic_name(self._group, partition.topic)
                    log.error(
                        "Kafka: record %s is lost: somebody removed offset %d of %s/%d, where it stood",
                        *(row.id, row.offset, name, partition.index),
                    )
            return [row for row in newer if row not in rows]

    def pump(self, partitions: Sequence[Partition]) -> dict[Partition, Table]:
        """What has come of these since, without a question to the cluster."""
        with self._lock:
            self._follow(
                [each for each in partitions if each.index < self._ready.get(topic_name(self._group, each.topic), 0)]
            )
            self._take(0.0)
            return {each: self._tables[each] for each in partitions if each in self._tables}

    def forget(self, partition: Partition) -> None:
        with self._lock:
            table = self._tables.pop(partition, None)
            if table is not None and self._consumer is not None:
                table.clear()
                self._consumer.incremental_unassign([self._place(partition)])

    def delete(self, topic: str) -> None:
        """Forget all records of the topic."""
        name = topic_name(self._group, topic)
        with self._lock:
            for partition in [each for each in self._tables if each.topic == topic]:
                self.forget(partition)
            self._ready.pop(name, None)
            self._catalogue.delete(name)

    def close(self) -> None:
        self._bodies.close()
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None
            self._tables.clear()
            if self._producer is not None:
                self._producer.flush(1.0)

    def _place(self, partition: Partition, offset: int = 0) -> TopicPartition:
        return TopicPartition(topic_name(self._group, partition.topic), partition.index, offset)

    def _follow(self, partitions: Sequence[Partition]) -> None:
        new = [each for each in partitions if each not in self._tables]
        if not new:
            return
        if self._consumer is None:
            more = {"group.id": self._group, "auto.offset.reset": "earliest", "queued.max.messages.kbytes": 8_192}
            more["fetch.wait.max.ms"] = 100
            self._consumer = self._client.consumer(**more)
        self._consumer.incremental_assign([self._place(each) for each in new])
        self._tables |= {each: Table(self._room) for each in new}

    def _catch_up(self, partitions: Sequence[Partition]) -> None:
        if not partitions:
            return
        assert self._consumer is not None
        places = {Partition(topic_name(self._group, each.topic), each.index): each for each in partitions}
        try:
            ends = offsets(self._catalogue.admin, list(places), OffsetSpec.latest(), within_s=REQUEST_S)
            end_at = clock.now() + _CATCH_UP_S
            while behind := self._behind(ends):
                if clock.now() > end_at:
                    self._begin_anew()
                    raise BrokerError(f"Kafka: the aside of {behind} could not be read to its end")
                self._take(0.1)
        except (KafkaException, TimeoutError) as error:
            raise explained(error, f"reading the aside of group {self._group}") from error

    def _begin_anew(self) -> None:
        """With another client: this one may never read on, see stall.py."""
        if self._consumer is not None:
            dismiss(self._consumer.close)
            self._consumer = None
        for table in self._tables.values():
            table.clear()
        self._tables.clear()

    def _behind(self, ends: Mapping[Partition, int]) -> list[Partition]:
        assert self._consumer is not None
        found = self._consumer.position([TopicPartition(*each) for each in ends])
        read = {Partition(place.topic, place.partition): place.offset for place in found}
        return [each for each, end in ends.items() if end and read[each] < end]

    def _take(self, wait_s: float) -> None:
        if self._consumer is None:
            return
        first = self._consumer.poll(wait_s)
        messages = [] if first is None else [first, *self._consumer.consume(1_000, 0)]
        names = {(topic_name(self._group, each.topic), each.index): each for each in self._tables}
        for message in messages:
            place = names.get((message.topic() or "", message.partition()))
            if message.error() is None and place is not None:
                _apply(self._tables[place], message)


def _apply(table: Table, message: KafkaMessage) -> None:
    """What is none of ours is passed over: it must not keep the records behind it from their group."""
    try:
        table.apply(_entry(message))
    except (msgspec.MsgspecError, ValueError) as error:
        log.warning(
            "Kafka: %s/%d holds something at offset %d that is no record of ours, it is passed over: %s",
            *(message.topic(), message.partition(), message.offset(), error),
        )


def _entry(message: KafkaMessage) -> Entry:
    """ValueError: it is none of ours."""
    headers = dict(message.headers() or ())
    key, fence = message.key() or b"", headers.get("onward-fence") or b"0"
    return Entry(bytes(key).decode(), message.value(), int(fence), message.offset() or 0)
