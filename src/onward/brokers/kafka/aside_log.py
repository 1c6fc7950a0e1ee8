"""Writes and reads the aside logs of one group. Calls block."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from onward.brokers.base import AsideRecord
from onward.brokers.core.folded_aside import AsideRow, AsideTable
from onward.brokers.kafka.aside_follower import AsideFollower
from onward.brokers.kafka.aside_topics import AsideTopics, missing, topic_name
from onward.brokers.kafka.aside_writer import AsideWriter, PlacedEntry
from onward.brokers.kafka.record_bodies import RecordBodies
from onward.brokers.kafka.topics import Cluster
from onward.event import Partition

log = logging.getLogger("onward")


class AsideLog:
    """Safe to call from any thread; one call at a time."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._group = group
        self._topics = AsideTopics(cluster.topics, cluster.settings, group)
        self._writer = AsideWriter(cluster.factory, cluster.settings)
        self._follower = AsideFollower(cluster, group)
        self._bodies = RecordBodies(cluster.factory, group)
        self._lock = threading.RLock()

    def topics(self) -> list[str]:
        """The topics that have an aside."""
        return self._topics.all()

    def prepare(self, topic: str, index: int = 0) -> bool:
        """Create the aside of a partition if auto_declare allows it. False: there is none.

        BrokerError: neither the topic nor its aside exists."""
        return self._topics.prepare(topic, index)

    def write(self, topic: str, entries: Sequence[PlacedEntry]) -> list[int | str]:
        """The offset of each entry, or why it was not stored."""
        if not entries:
            return []
        with self._lock:
            if not self.prepare(topic, max(index for index, _ in entries)):
                return [missing(self._group, topic)] * len(entries)
            return self._writer.write(topic_name(self._group, topic), entries)

    @contextmanager
    def reading(self, partitions: Sequence[Partition]) -> Iterator[dict[Partition, AsideTable]]:
        """The tables, read to the current ends of the logs. No other thread changes them within the block.

        BrokerError: the logs could not be read to their ends."""
        with self._lock:
            existing = [each for each in partitions if self.prepare(each.topic, each.index)]
            self._follower.follow(existing)
            self._follower.catch_up(existing)
            yield {each: self._follower.table(each) for each in partitions}

    def records(self, partition: Partition, rows: Sequence[AsideRow]) -> list[AsideRecord]:
        """The records of these rows, without those that were removed meanwhile."""
        kept = [row.body for row in rows if row.body is not None]
        if len(kept) == len(rows):
            return [row.record(body) for row, body in zip(rows, kept, strict=True)]
        found = self._read(partition, rows)
        return [found[row.id] for row in rows if row.id in found]

    def _read(self, partition: Partition, rows: Sequence[AsideRow]) -> dict[str, AsideRecord]:
        absent = [row.offset for row in rows if row.body is None]
        read = self._bodies.read(topic_name(self._group, partition.topic), partition.index, absent) if absent else {}
        bodies = {row.id: read.get(row.offset) if row.body is None else row.body for row in rows}
        found = {row.id: row.record(body) for row in rows if (body := bodies[row.id]) is not None}
        compacted = [row for row in rows if row.id not in found]
        return found | self._read(partition, self._newer(partition, compacted)) if compacted else found

    def _newer(self, partition: Partition, rows: Sequence[AsideRow]) -> list[AsideRow]:
        """The log no longer has the bodies of these: newer entries replaced them, or the records were removed."""
        with self.reading([partition]) as tables:
            table = tables[partition]
            now = [table.rows[row.id] for row in rows if row.id in table.rows]
            for row in rows:
                if row in now:
                    table.remove(row.id)
                    log.error(
                        "Kafka: record %s is lost: offset %d of %s/%d was removed, and not by compaction; does the "
                        "topic have another cleanup.policy than compact?",
                        *(row.id, row.offset, topic_name(self._group, partition.topic), partition.index),
                    )
            return [row for row in now if row not in rows]

    def pump(self, partitions: Sequence[Partition]) -> dict[Partition, AsideTable]:
        """Fold the entries that have arrived, and return the tables of these. Sends no request to the cluster."""
        with self._lock:
            self._follower.follow([each for each in partitions if self._topics.is_ready(each)])
            self._follower.take(0.0)
            tables = self._follower.tables
            return {each: tables[each] for each in partitions if each in tables}

    def forget(self, partition: Partition) -> None:
        """Stop following the partition."""
        with self._lock:
            self._follower.forget(partition)

    def delete(self, topic: str) -> None:
        """Remove all records of the topic."""
        with self._lock:
            for partition in [each for each in self._follower.tables if each.topic == topic]:
                self._follower.forget(partition)
            self._topics.delete(topic)

    def close(self) -> None:
        self._bodies.close()
        with self._lock:
            self._follower.close()
            self._writer.close()
