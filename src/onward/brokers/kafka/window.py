"""What one turn of the publisher's thread sends, and what became of each event of it. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError

from onward.brokers.kafka.message import Header
from onward.event import Event

Place = tuple[str, int]
Key = tuple[str, str | None]
Reports = Mapping[int, KafkaError | None]

# A batch is refused for one event of it: the others may be fine.
OF_ONE = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_RECORD,
    }
)
PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
_NEVER_SENT = frozenset(
    {KafkaError._QUEUE_FULL, KafkaError._FATAL, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)
# The broker has said no, and may have stored it all the same.
_DOUBTFUL = frozenset(
    {
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.UNKNOWN_PRODUCER_ID,
        KafkaError.KAFKA_STORAGE_ERROR,
    }
)


class Outgoing(NamedTuple):
    """An event as it is handed to the producer."""

    event: Event
    partition: int
    key: bytes | None
    headers: Sequence[Header]
    size: int

    @property
    def place(self) -> Place:
        return self.event.topic, self.partition

    @property
    def lane(self) -> Key:
        return self.event.topic, self.event.key


class Fate(NamedTuple):
    """Of an event that was not accepted."""

    cause: KafkaError | str
    unknown: bool = False  # it may have been stored
    spared: bool = False  # it was not stored, and not for a fault of its own that anybody knows of

    @property
    def code(self) -> int:
        return self.cause.code() if isinstance(self.cause, KafkaError) else 0

    @property
    def is_refusal(self) -> bool:
        """By the broker, for good."""
        return self.code > 0 and not self.unknown


UNANSWERED = Fate(KafkaError(KafkaError._PURGE_QUEUE))
LOST = Fate("its fate is not known", unknown=True)
BEHIND = Fate("refused, because an event published before it was refused; publish both again, in order")
LATE = Fate("not sent in publish_timeout_s: what was sent with it was refused, and to send it again took too long")


class Window:
    """`fates` has one for each event, None where it was accepted."""

    __slots__ = ("deadline", "fates", "items")

    def __init__(self, items: Sequence[Outgoing] = (), deadline: float = 0.0) -> None:
        self.items = items
        self.deadline = deadline
        self.fates: dict[int, Fate | None] = {}

    def going(self, order: Sequence[int]) -> list[int]:
        """Those of them that may be sent. What stands behind one of its key that was not accepted has its fate."""
        failed = {self.items[at].lane for at, fate in self.fates.items() if fate is not None}
        failed = {lane for lane in failed if lane[1] is not None}
        self.fates |= {at: BEHIND for at in order if self.items[at].lane in failed}
        return [at for at in order if at not in self.fates]

    def lanes(self, order: Sequence[int]) -> list[deque[int]]:
        """Each key's in their order; each without a key by itself."""
        lanes: dict[object, deque[int]] = {}
        for at in order:
            item = self.items[at]
            lanes.setdefault(at if item.event.key is None else item.lane, deque()).append(at)
        return list(lanes.values())


def fate(report: KafkaError | None) -> Fate | None:
    """Of an event that nothing else depends on."""
    if report is None:
        return None
    code = report.code()
    never_sent = code in _NEVER_SENT
    return Fate(report, code in _DOUBTFUL if code > 0 else not never_sent, never_sent)


def fates(
    items: Sequence[Outgoing], order: Sequence[int], reports: Reports, sent: Mapping[Place, int] | None
) -> dict[int, Fate | None]:
    """Of events that were sent together, by a producer that accepts nothing of a partition behind a refusal.

    `sent`: how many of a partition's events that were not accepted may have left for the broker; None: nobody knows.
    A producer calls purged from its queue what never left, and what left and waits to be sent again: it goes out in
    order, so the first ones did.
    """
    found: dict[int, Fate | None] = {}
    refusals: dict[Place, Fate] = {}
    beyond: set[Place] = set()  # where the batch that was refused has ended
    left = None if sent is None else dict(sent)
    for at in order:
        place = items[at].place
        ruling = fate(reports[at]) if at in reports else LOST
        if ruling is not None and place in refusals:
            if not ruling.is_refusal:
                beyond.add(place)
            found[at] = _sunk(refusals[place]) if place in beyond else ruling
            continue
        if ruling is not None and left is not None:
            left[place] = left.get(place, 0) - 1
        if ruling is not None and ruling.is_refusal:
            refusals[place] = ruling
        elif ruling is not None and ruling.code == KafkaError._PURGE_QUEUE:
            has_left = left is None or left[place] >= 0
            ruling = ruling._replace(unknown=has_left, spared=not has_left)
        found[at] = ruling
    return found


def _sunk(refusal: Fate) -> Fate:
    """Of what was sent behind a refusal, in its partition: its number no longer fits, so the broker took it not."""
    return UNANSWERED._replace(spared=True) if refusal.code in OF_ONE else refusal


def suspects(found: Mapping[int, Fate | None]) -> list[int]:
    """Those of a batch that was refused for one of them, whichever it is."""
    return [at for at, each in found.items() if each is not None and each.is_refusal and each.code in OF_ONE]


def spared_by_refusal(found: Mapping[int, Fate | None]) -> list[int]:
    """Those that were not stored because another was refused. Where nobody has answered there are none."""
    failed = {at: each for at, each in found.items() if each is not None}
    if not any(each.is_refusal for each in failed.values()):
        return []
    return [at for at, each in failed.items() if each.spared]


def awaited(items: Sequence[Outgoing], order: Sequence[int], reports: Reports) -> bool:
    """Whether there may be a report to come that tells something: none does, behind a refusal."""
    found = fates(items, order, reports, None)
    return any(each is LOST for each in found.values())
