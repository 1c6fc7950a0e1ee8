"""Partitions that the group has assigned to this member, until their fences are stored and the member owns them."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from confluent_kafka import KafkaError

from onward import clock
from onward.brokers.base import Assigned, Progress
from onward.brokers.core.holdings import Hold
from onward.brokers.kafka.aside_owner import AsideOwner
from onward.brokers.kafka.commits import Commits
from onward.brokers.kafka.hold import KafkaHold, KafkaHoldings, KafkaOwn
from onward.brokers.kafka.owner_marks import OwnerMarks, TakeoverWait
from onward.brokers.kafka.start_points import Located, StartPoints
from onward.event import Partition

log = logging.getLogger("onward")

_RETRY_S = 0.5
_NOTICE_S = 1.0  # a client that lost its connection checks once a second whether its session is over


class Claims:
    """Finds where partitions start, and marks their asides as ours."""

    def __init__(self, start_points: StartPoints, aside: AsideOwner, marks: OwnerMarks, epochs: Iterator[int]) -> None:
        self._start_points = start_points
        self._aside = aside
        self._marks = marks
        self._epochs = epochs

    @property
    def troubles(self) -> Mapping[str, str]:
        """By topic: why some partitions are not claimed."""
        return self._start_points.troubles

    def claim(self, partitions: Sequence[Partition]) -> list[KafkaHold]:
        """Return holds for those of the partitions that exist and may be read.

        KafkaException or BrokerError: try again later."""
        found = self._start_points.locate(partitions)
        fences = self._fences(found)
        marked = self._aside.mark(fences)
        blank = {each: (where.log_id, fences[each]) for each, where in found.items() if where.point.blank}
        self._aside.bury(blank)
        for where in found.values():
            if where.point.note:
                log.warning("Kafka: %s", where.point.note)
        return [self._hold(each, where, fences[each], marked.get(each, 0)) for each, where in found.items()]

    def _fences(self, found: Mapping[Partition, Located]) -> dict[Partition, int]:
        """A new fence for each partition, above all earlier ones. The last commit contains the last fence. The aside is
        read only if the commit has none, because reading a long aside takes time."""
        fences = {each: where.point.fence for each, where in found.items()}
        return fences | self._aside.raised({each: fences[each] for each, where in found.items() if where.point.blank})

    def _hold(self, partition: Partition, where: Located, fence: int, marked_at: int) -> KafkaHold:
        point = where.point
        assigned = Assigned(partition, next(self._epochs), fence, where.log_id, point.stored, point.unclean)
        latest = point.stored or Progress(partition, assigned.epoch, point.position)
        wait = self._marks.wait(point.owner) if point.unclean else TakeoverWait.NONE
        return Hold(
            assigned, KafkaOwn(where.suffix, latest, marked_at, self._marks.mine, wait), position=point.position
        )


class Arrivals:
    """Only the member's thread calls it, except for `troubles`."""

    def __init__(
        self, claims: Claims, commits: Commits, holdings: KafkaHoldings, *, takeover_grace_s: float, session_s: float
    ) -> None:
        self._claims = claims
        self._commits = commits
        self._holdings = holdings
        grace_s = takeover_grace_s + _NOTICE_S
        self._wait_s = {
            TakeoverWait.NONE: 0.0,
            TakeoverWait.GRACE: grace_s,
            TakeoverWait.SESSION: session_s + grace_s,
        }
        self._waiting: dict[Partition, None] = {}
        self._fencing: dict[Partition, KafkaHold] = {}  # their fences are being stored, or were when we began to leave
        self._retry_at = 0.0
        self._stopped = False
        self.troubles: list[str] = []  # why some of the group's events are not read

    def add(self, partitions: Iterable[Partition]) -> None:
        """The group has assigned these to us."""
        if not self._stopped:
            self._waiting.update(dict.fromkeys(partitions))
            self._retry_at = 0.0

    def retry(self, partition: Partition) -> None:
        """Claim this one again, but not at once: claims that fail must not follow each other without a pause."""
        if not self._stopped:
            self._waiting[partition] = None

    def take_back(self, partitions: Iterable[Partition]) -> list[KafkaHold]:
        """The group takes these back. Returns those whose fence may be stored already."""
        fenced = []
        for partition in partitions:
            self._waiting.pop(partition, None)
            if partition in self._fencing:
                fenced.append(self._fencing.pop(partition))
        self._commits.withdraw(fenced)
        return fenced

    def take_back_all(self) -> list[KafkaHold]:
        return self.take_back([*self._waiting, *self._fencing])

    def stop(self) -> None:
        """This member is about to leave, so it accepts no more partitions."""
        self._stopped = True
        self._waiting.clear()

    def work(self) -> None:
        """Claim the waiting partitions: find where each starts, store a new fence, and only then hold it."""
        if not self._waiting or clock.now() < self._retry_at:
            return
        self._retry_at = clock.now() + _RETRY_S
        try:
            holds = self._claims.claim(list(self._waiting))
        except Exception as error:
            topics = ", ".join(dict.fromkeys(partition.topic for partition in self._waiting))
            log.warning("Kafka: %s: progress cannot be read, trying again: %s", topics, error)
            self._retry_at = clock.now() + _RETRY_S
            return
        self._report_troubles()
        for hold in holds:
            self._waiting.pop(hold.partition, None)
            self._fencing[hold.partition] = hold
            self._commits.fence(hold, self._fenced)

    def _report_troubles(self) -> None:
        troubles = list(self._claims.troubles.values())
        for trouble in troubles:
            if trouble not in self.troubles:
                log.error("Kafka: %s", trouble)
        self.troubles = troubles

    def _fenced(self, hold: KafkaHold, error: KafkaError | None) -> None:
        """Called when the fence was stored, or could not be stored."""
        if self._fencing.get(hold.partition) is not hold or self._stopped:
            return  # it was taken back, or will be
        del self._fencing[hold.partition]
        if error is not None:
            self.retry(hold.partition)
            self._retry_at = clock.now() + _RETRY_S
            return
        hold.ready_at = clock.now() + self._wait_s[hold.own.wait]
        self._holdings.add(hold)
