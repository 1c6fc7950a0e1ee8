"""What the owner of partitions does at their asides: it marks them as its own, writes records, hears requests."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from onward.brokers.base import AsideRecord, Moved
from onward.brokers.kafka.holdings import Hold, Holdings
from onward.brokers.kafka.letters import Letters, Placed
from onward.brokers.kafka.table import FENCE, Entry, Table
from onward.errors import AsideError, BrokerError, OnwardError
from onward.event import Partition

log = logging.getLogger("onward")

_LOOK_S = 0.1


class Warden:
    def __init__(self, letters: Letters, holdings: Holdings, group: str) -> None:
        self._letters = letters
        self._holdings = holdings
        self._watched: dict[Partition, Hold] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"onward-kafka-aside-{group}", daemon=True)
        self._thread.start()

    def claims(self, fences: Mapping[Partition, int]) -> dict[Partition, int]:
        """These fences, or higher ones where higher ones stand in the asides already.

        BrokerError: an aside could not be read."""
        with self._letters.reading(list(fences)) as tables:
            return {each: max(fence, tables[each].fence + 1) for each, fence in fences.items()}

    def mark(self, fences: dict[Partition, int]) -> dict[Partition, int]:
        """From here on what an owner before us writes is void; answers from where on requests are news to us.

        BrokerError: it was not stored."""
        marked = {}
        for topic in dict.fromkeys(partition.topic for partition in fences):
            mine = {each: fence for each, fence in fences.items() if each.topic == topic}
            if not self._letters.prepare(topic, max(each.index for each in mine)):
                continue
            answers = self._letters.write(
                topic, [(each.index, Entry(FENCE, b"", fence)) for each, fence in mine.items()]
            )
            for partition, answer in zip(mine, answers, strict=True):
                if isinstance(answer, str):
                    raise BrokerError(f"Kafka: the aside of {partition} could not be marked: {answer}")
                marked[partition] = answer
        return marked

    def store(self, records: Sequence[AsideRecord], fences: dict[Partition, int]) -> None:
        """AsideError: none of these is there."""
        for topic, mine in _by_topic(records):
            try:
                entries = [_entry(record, fences[record.partition]) for record in mine]
                before = self._letters.standing(topic, entries)
                answers = self._letters.write(topic, entries)
            except (OnwardError, msgspec.MsgspecError, TypeError, ValueError) as error:
                raise AsideError(f"records of {topic} could not be set aside: {error}") from error
            failures = [answer for answer in answers if isinstance(answer, str)]
            if failures:
                stored = [at for at, answer in enumerate(answers) if not isinstance(answer, str)]
                undo = [entries[at] for at in stored]
                self._letters.write(topic, self._letters.restored(topic, undo, [before[at] for at in stored]))
                raise AsideError(f"records of {topic} could not be set aside: {failures[0]}")

    def remove(self, ids: Sequence[str], holds: Sequence[Hold]) -> None:
        """These are done with. What is not stored now is said again by the caller."""
        by_log = {(hold.log_id, hold.partition.index): hold for hold in holds}
        entries: dict[str, list[Placed]] = {}
        for name in ids:
            parts = name.rsplit(":", 3)
            hold = by_log.get((parts[-3], int(parts[-2]))) if len(parts) == 4 and parts[-2].isdigit() else None
            if hold is not None:
                entry = Entry(name, None, hold.source.fence)
                entries.setdefault(hold.partition.topic, []).append((hold.partition.index, entry))
        for topic, mine in entries.items():
            if failures := [answer for answer in self._letters.write(topic, mine) if isinstance(answer, str)]:
                raise BrokerError(f"Kafka: records of {topic} could not be removed: {failures[0]}")

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                self._look()
            except Exception:
                log.exception("Kafka: the aside cannot be followed, trying again")

    def _look(self) -> None:
        holds = {hold.partition: hold for hold in self._holdings.all() if hold.announced}
        for partition in self._watched.keys() - holds.keys():
            self._letters.forget(partition)
        for partition, table in self._letters.pump(list(holds)).items():
            self._tell(holds[partition], table)
            self._tidy(holds[partition], table)
        self._watched = holds

    def _tell(self, hold: Hold, table: Table) -> None:
        while table.news:
            moves = table.news.popleft()
            if moves.offset > hold.marked_at:  # what is older was there to be loaded
                self._holdings.tell(Moved(hold.partition, hold.epoch, list(moves.ids), moves.to, moves.due))

    def _tidy(self, hold: Hold, table: Table) -> None:
        """Write over what is void before compaction takes it for true; remove requests that are spent."""
        fence = hold.source.fence
        if fence < table.fence or not (table.spoilt or table.spent()):
            return
        topic, index = hold.partition
        void = [(index, Entry(key, None, fence)) for key in list(table.spoilt)]
        entries = self._letters.restored(topic, void, [table.rows.get(entry.key) for _, entry in void])
        self._letters.write(topic, entries + [(index, Entry(key, None, fence)) for key in table.spent()])


def _by_topic(records: Sequence[AsideRecord]) -> Iterable[tuple[str, list[AsideRecord]]]:
    found: dict[str, list[AsideRecord]] = {}
    for record in records:
        found.setdefault(record.partition.topic, []).append(record)
    return found.items()


def _entry(record: AsideRecord, fence: int) -> Placed:
    whole = msgspec.structs.replace(record, event=record.event.whole())
    return record.partition.index, Entry(record.id, msgspec.msgpack.encode(whole), fence)
