"""What the owner of partitions does at their asides: it marks them as its own, writes records, hears requests."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from onward.brokers.base import AsideRecord, Failure, Moved, State
from onward.brokers.kafka.holdings import Hold, Holdings
from onward.brokers.kafka.letters import Letters, Placed
from onward.brokers.kafka.table import FENCE, Entry, Row, Table, log_of
from onward.errors import AsideError, BrokerError, OnwardError
from onward.event import Partition

log = logging.getLogger("onward")

_LOOK_S = 0.1
_STEP = 50  # records whose bodies are in memory together
_MADE_ANEW = "the topic was deleted and made anew while they waited; `onward dead send` puts them into a topic again"


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

    def bury(self, owners: Mapping[Partition, tuple[str, int]]) -> None:
        """What waits in the aside of a former log has no turn any more, since its place is another event's: it becomes
        a dead letter. Owners are given as the log's id and the fence. BrokerError: it was not stored."""
        buried = 0
        with self._letters.reading(list(owners)) as tables:
            for partition, (log_id, fence) in owners.items():
                stale = [row for row in tables[partition].rows.values() if _is_stale(row, log_id)]
                buried += sum(
                    self._bury(partition, stale[at : at + _STEP], fence) for at in range(0, len(stale), _STEP)
                )
        if buried:
            topics = ", ".join(dict.fromkeys(partition.topic for partition in owners))
            log.warning("Kafka: %d records of %s are dead letters now: %s", buried, topics, _MADE_ANEW)

    def _bury(self, partition: Partition, rows: Sequence[Row], fence: int) -> int:
        entries = [_entry(_buried(record), fence) for record in self._letters.records(partition, rows)]
        for answer in self._letters.write(partition.topic, entries):
            if isinstance(answer, str):
                raise BrokerError(f"Kafka: records of a former {partition} could not be made dead letters: {answer}")
        return len(entries)

    def store(self, records: Sequence[AsideRecord], fences: dict[Partition, int]) -> None:
        """AsideError: none of these is there."""
        for topic, mine in _by_topic(records):
            try:
                entries = [_entry(record, fences[record.partition]) for record in mine]
                before = self._letters.standing(topic, entries)
                answers = self._letters.write(topic, entries)
            except (OnwardError, msgspec.MsgspecError, TypeError, ValueError) as error:
                raise AsideError(
                    f"records of {topic} could not be set aside: {error}", partitions=[r.partition for r in records]
                ) from error
            failures = [answer for answer in answers if isinstance(answer, str)]
            if failures:
                stored = [at for at, answer in enumerate(answers) if not isinstance(answer, str)]
                undo = [entries[at] for at in stored]
                self._letters.write(topic, self._letters.restored(topic, undo, [before[at] for at in stored]))
                raise AsideError(
                    f"records of {topic} could not be set aside: {failures[0]}",
                    partitions=[r.partition for r in records],
                )

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
            ids = [name for name in moves.ids if log_of(name) == hold.log_id]
            if ids and moves.offset > hold.marked_at:  # what is older was there to be loaded
                self._holdings.tell(Moved(hold.partition, hold.epoch, ids, moves.to, moves.due))

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


def _is_stale(row: Row, log_id: str) -> bool:
    return row.state is not State.DEAD and log_of(row.id) != log_id


def _buried(record: AsideRecord) -> AsideRecord:
    """As a dead letter, with as much of its story as is known."""
    now = time.time()
    story = record.failure or Failure("", "", "", "", "", record.tries.failed, now, now)
    failure = msgspec.structs.replace(story, reason="refused", error="TopicMadeAnew", message=_MADE_ANEW, last=now)
    return msgspec.structs.replace(record, state=State.DEAD, due=None, wait_s=None, failure=failure)


def _entry(record: AsideRecord, fence: int) -> Placed:
    whole = msgspec.structs.replace(record, event=record.event.whole())
    return record.partition.index, Entry(record.id, msgspec.msgpack.encode(whole), fence)
