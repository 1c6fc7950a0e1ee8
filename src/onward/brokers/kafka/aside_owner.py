"""What the owner of partitions does in their asides: it marks them as its own, stores records, reports moves."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from onward.brokers.base import AsideRecord, Moved, State, record_log
from onward.brokers.core.asides import buried
from onward.brokers.core.folded_aside import FENCE, AsideRow, AsideTable, LogEntry
from onward.brokers.kafka.aside_log import AsideLog
from onward.brokers.kafka.aside_writer import PlacedEntry
from onward.brokers.kafka.hold import KafkaHold, KafkaHoldings
from onward.errors import BrokerError, OnwardError
from onward.event import Partition

log = logging.getLogger("onward")

_LOOK_S = 0.1
_STEP = 50  # how many records have their bodies in memory at once
_RECREATED = "the topic was deleted and created again while they waited; `onward dead send` publishes them again"


class AsideOwner:
    def __init__(self, aside: AsideLog, holdings: KafkaHoldings, group: str) -> None:
        self._log = aside
        self._holdings = holdings
        self._watched: set[Partition] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"onward-kafka-aside-{group}", daemon=True)
        self._thread.start()

    # -- becoming the owner ---------------------------------------------------------------------------------------

    def raised(self, fences: Mapping[Partition, int]) -> dict[Partition, int]:
        """These fences, raised where an aside has the same or a higher one already.

        BrokerError: an aside could not be read."""
        with self._log.reading(list(fences)) as tables:
            return {each: max(fence, tables[each].fence + 1) for each, fence in fences.items()}

    def mark(self, fences: Mapping[Partition, int]) -> dict[Partition, int]:
        """Mark the asides with these fences, so that later entries of an earlier owner are ignored. Returns the offsets
        of the marks: requests above them are new to this owner. BrokerError: a mark was not stored."""
        marked = {}
        for topic in dict.fromkeys(partition.topic for partition in fences):
            mine = {each: fence for each, fence in fences.items() if each.topic == topic}
            if not self._log.prepare(topic, max(each.index for each in mine)):
                continue
            answers = self._log.write(
                topic, [(each.index, LogEntry(FENCE, b"", fence)) for each, fence in mine.items()]
            )
            for partition, answer in zip(mine, answers, strict=True):
                if isinstance(answer, str):
                    raise BrokerError(f"Kafka: the aside of {partition} could not be marked: {answer}")
                marked[partition] = answer
        return marked

    def bury(self, owners: Mapping[Partition, tuple[str, int]]) -> None:
        """Turn the waiting and held records of a former log into dead letters: their positions belong to other events
        now. `owners`: the id of the current log, and the fence. BrokerError: they were not stored."""
        buried = 0
        with self._log.reading(list(owners)) as tables:
            for partition, (log_id, fence) in owners.items():
                stale = [row for row in tables[partition].rows.values() if _is_stale(row, log_id)]
                for at in range(0, len(stale), _STEP):
                    buried += self._bury(partition, stale[at : at + _STEP], fence)
        if buried:
            topics = ", ".join(dict.fromkeys(partition.topic for partition in owners))
            log.warning("Kafka: %d records of %s are dead letters now: %s", buried, topics, _RECREATED)

    def _bury(self, partition: Partition, rows: Sequence[AsideRow], fence: int) -> int:
        entries = [
            _entry(buried(record, _RECREATED, time.time()), fence) for record in self._log.records(partition, rows)
        ]
        for answer in self._log.write(partition.topic, entries):
            if isinstance(answer, str):
                raise BrokerError(f"Kafka: records of a former {partition} could not be made dead letters: {answer}")
        return len(entries)

    # -- settling -------------------------------------------------------------------------------------------------

    def store(self, records: Sequence[AsideRecord], fences: Mapping[Partition, int]) -> dict[Partition, str]:
        """Store these records. Returns the partitions whose records were not stored, and why. All others are stored."""
        refused: dict[Partition, str] = {}
        for topic, mine in _by_topic(records).items():
            refused |= self._store_topic(topic, mine, fences)
        return refused

    def _store_topic(
        self, topic: str, records: Sequence[AsideRecord], fences: Mapping[Partition, int]
    ) -> dict[Partition, str]:
        entries, refused = _encoded(records, fences)
        try:
            before = self._current(topic, entries)
            answers = self._log.write(topic, entries)
        except OnwardError as error:
            return refused | {Partition(topic, index): str(error) for index, _ in entries}
        for (index, _), answer in zip(entries, answers, strict=True):
            if isinstance(answer, str):
                refused.setdefault(Partition(topic, index), answer)
        undo = [
            (placed, row)
            for placed, row, answer in zip(entries, before, answers, strict=True)
            if Partition(topic, placed[0]) in refused and not isinstance(answer, str)
        ]
        self._log.write(topic, self._restored(topic, undo))
        return refused

    def remove(self, ids: Sequence[str], holds: Sequence[KafkaHold]) -> None:
        """Remove these records, as far as they belong to one of the holds. BrokerError: not all were removed."""
        by_log = {f"{hold.log_id}:{hold.partition.index}": hold for hold in holds}
        entries: dict[str, list[PlacedEntry]] = {}
        for name in ids:
            hold = by_log.get(":".join(name.rsplit(":", 3)[1:3]))
            if hold is not None:
                placed = (hold.partition.index, LogEntry(name, None, hold.fence))
                entries.setdefault(hold.partition.topic, []).append(placed)
        for topic, mine in entries.items():
            if failures := [answer for answer in self._log.write(topic, mine) if isinstance(answer, str)]:
                raise BrokerError(f"Kafka: records of {topic} could not be removed: {failures[0]}")

    def _current(self, topic: str, entries: Sequence[PlacedEntry]) -> list[AsideRow | None]:
        """The current row for the key of each entry."""
        with self._log.reading(list(dict.fromkeys(Partition(topic, index) for index, _ in entries))) as tables:
            return [tables[Partition(topic, index)].rows.get(entry.key) for index, entry in entries]

    def _restored(self, topic: str, replaced: Iterable[tuple[PlacedEntry, AsideRow | None]]) -> list[PlacedEntry]:
        """Entries that restore the rows which other entries replaced."""
        again = []
        for (index, entry), row in replaced:
            records = [] if row is None else self._log.records(Partition(topic, index), [row])
            body = msgspec.msgpack.encode(records[0]) if records else None
            again.append((index, LogEntry(entry.key, body, entry.fence)))
        return again

    # -- the thread -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                self._look()
            except Exception:
                log.exception("Kafka: the aside cannot be read, trying again")

    def _look(self) -> None:
        holds = {hold.partition: hold for hold in self._holdings.announced()}
        for partition in self._watched - holds.keys():
            self._log.forget(partition)
        for partition, table in self._log.pump(list(holds)).items():
            self._report(holds[partition], table)
            self._tidy(holds[partition], table)
        self._watched = set(holds)

    def _report(self, hold: KafkaHold, table: AsideTable) -> None:
        while table.news:
            move = table.news.popleft()
            ids = [name for name in move.ids if record_log(name) == hold.log_id]
            if ids and move.offset > hold.own.marked_at:  # the effect of an earlier move is loaded with the records
                self._holdings.report(Moved(hold.partition, hold.epoch, ids, move.to, move.due))

    def _tidy(self, hold: KafkaHold, table: AsideTable) -> None:
        """Overwrite the entries of former owners before compaction keeps them in place of valid ones. Remove spent
        requests."""
        if hold.fence < table.fence or not (table.spoilt or table.spent()):
            return
        topic, index = hold.partition
        void: list[tuple[PlacedEntry, AsideRow | None]] = [
            ((index, LogEntry(key, None, hold.fence)), table.rows.get(key)) for key in list(table.spoilt)
        ]
        spent = [(index, LogEntry(key, None, hold.fence)) for key in table.spent()]
        self._log.write(topic, self._restored(topic, void) + spent)


def _by_topic(records: Sequence[AsideRecord]) -> dict[str, list[AsideRecord]]:
    found: dict[str, list[AsideRecord]] = {}
    for record in records:
        found.setdefault(record.partition.topic, []).append(record)
    return found


def _encoded(
    records: Sequence[AsideRecord], fences: Mapping[Partition, int]
) -> tuple[list[PlacedEntry], dict[Partition, str]]:
    """The entries, and the partitions that have a record which cannot be encoded."""
    entries: dict[Partition, list[PlacedEntry]] = {}
    refused: dict[Partition, str] = {}
    for record in records:
        try:
            entries.setdefault(record.partition, []).append(_entry(record, fences[record.partition]))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            refused[record.partition] = f"record {record.id}: {error}"
    return [each for partition, mine in entries.items() if partition not in refused for each in mine], refused


def _is_stale(row: AsideRow, log_id: str) -> bool:
    return row.state is not State.DEAD and record_log(row.id) != log_id


def _entry(record: AsideRecord, fence: int) -> PlacedEntry:
    return record.partition.index, LogEntry(record.id, msgspec.msgpack.encode(record.whole()), fence)
