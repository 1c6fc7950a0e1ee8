"""The outcome of each event that was sent, from the reports and counts of the producer. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError

from onward.brokers.core.cloudevents import Header
from onward.brokers.core.publishing import BEHIND as BEHIND_IN_QUEUE
from onward.brokers.core.publishing import UNANSWERED, Outgoing, Refusal

PartitionId = tuple[str, int]
Reports = Mapping[int, KafkaError | None]

# A batch is refused because of one of its events; the others may be fine.
OF_ONE = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_RECORD,
    }
)
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
_NEVER_SENT = frozenset(
    {KafkaError._QUEUE_FULL, KafkaError._FATAL, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)
# The broker reported an error, and may have stored the event all the same.
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


Packed = Sequence[Header]  # an event's headers; a tuple with its key would be one more object for the collector
KafkaOutgoing = Outgoing[Packed]


class SendFailure(NamedTuple):
    """Why an event was not accepted."""

    cause: KafkaError | str
    unknown: bool = False  # it may have been stored
    spared: bool = False  # it was certainly not stored, and the reason may be another event

    @property
    def code(self) -> int:
        return self.cause.code() if isinstance(self.cause, KafkaError) else 0

    @property
    def is_refusal(self) -> bool:
        """The broker refused the event for good."""
        return self.code > 0 and not self.unknown

    def refusal(self, item: KafkaOutgoing, timeout_s: float) -> Refusal:
        """The failure as it is reported to the publisher."""
        event, cause = item.event, self.cause
        if isinstance(cause, str):
            why = cause
        elif self.code in _PURGED:
            why = f"no answer from Kafka in publish_timeout_s={timeout_s:g}; is it running?"
        elif self.code == KafkaError.MSG_SIZE_TOO_LARGE:
            why = (
                f"event {event.id} of {event.size} bytes is too large for topic {event.topic}; raise the topic's "
                f"max.message.bytes, or publish smaller events ({cause.str()})"
            )
        else:
            why = f"event {event.id}: {cause.str()}" if self.code in OF_ONE else str(cause.str())
        return Refusal(why, self.unknown)


NOT_SENT = SendFailure(KafkaError(KafkaError._PURGE_QUEUE))
NO_REPORT = SendFailure(UNANSWERED.why, UNANSWERED.unknown)
BEHIND = SendFailure(BEHIND_IN_QUEUE.why)
LATE = SendFailure(
    "not sent in publish_timeout_s: a batch was refused, and sending its events again one by one took too long"
)


class Sending:
    """A window that is being sent. `outcomes` has an entry for each event by its index; None: it was accepted."""

    __slots__ = ("deadline", "items", "outcomes")

    def __init__(self, items: Sequence[KafkaOutgoing], deadline: float) -> None:
        self.items = items
        self.deadline = deadline
        self.outcomes: dict[int, SendFailure | None] = {}

    def answers(self, timeout_s: float) -> dict[int, Refusal | None]:
        """The outcomes as they are reported to the publisher."""
        if not any(self.outcomes.values()):
            return dict.fromkeys(self.outcomes)
        return {
            at: None if failure is None else failure.refusal(self.items[at], timeout_s)
            for at, failure in self.outcomes.items()
        }

    def going(self, order: Sequence[int]) -> list[int]:
        """The events that may be sent. Those behind an event of their key that was not accepted may not."""
        failed = {self.items[at].lane for at, outcome in self.outcomes.items() if outcome is not None}
        failed = {lane for lane in failed if lane[1] is not None}
        self.outcomes |= {at: BEHIND for at in order if self.items[at].lane in failed}
        return [at for at in order if at not in self.outcomes]

    def lanes(self, order: Sequence[int]) -> list[deque[int]]:
        """The events of each key, in order; each event without a key by itself."""
        lanes: dict[object, deque[int]] = {}
        for at in order:
            item = self.items[at]
            lanes.setdefault(at if item.event.key is None else item.lane, deque()).append(at)
        return list(lanes.values())


def outcome(report: KafkaError | None) -> SendFailure | None:
    """The outcome of an event by its own report alone."""
    if report is None:
        return None
    code = report.code()
    never_sent = code in _NEVER_SENT
    return SendFailure(report, code in _DOUBTFUL if code > 0 else not never_sent, never_sent)


def outcomes(
    items: Sequence[KafkaOutgoing], order: Sequence[int], reports: Reports, sent: Mapping[PartitionId, int] | None
) -> dict[int, SendFailure | None]:
    """The outcomes of events that were sent together. After a refusal, no later event of the partition is accepted.

    `sent`: how many of a partition's events that were not accepted may have reached the broker; None: unknown. The
    producer reports an event as purged from its queue if it was never sent, but also if it was sent and waits to be
    sent again. It sends in order, so the first ones were sent.
    """
    found: dict[int, SendFailure | None] = {}
    refusals: dict[PartitionId, SendFailure] = {}
    beyond: set[PartitionId] = set()  # where the refused batch has ended
    left = None if sent is None else dict(sent)
    for at in order:
        place = items[at].event.topic, items[at].partition
        failure = outcome(reports[at]) if at in reports else NO_REPORT
        if failure is not None and place in refusals:
            if not failure.is_refusal:
                beyond.add(place)
            found[at] = _behind_refusal(refusals[place]) if place in beyond else failure
            continue
        if failure is not None and left is not None:
            left[place] = left.get(place, 0) - 1
        if failure is not None and failure.is_refusal:
            refusals[place] = failure
        elif failure is not None and failure.code == KafkaError._PURGE_QUEUE:
            was_sent = left is None or left[place] >= 0
            failure = failure._replace(unknown=was_sent, spared=not was_sent)
        found[at] = failure
    return found


def _behind_refusal(refusal: SendFailure) -> SendFailure:
    """The outcome of an event that was sent behind a refusal in its partition. Its sequence number is wrong, so the
    broker did not store it."""
    return NOT_SENT._replace(spared=True) if refusal.code in OF_ONE else refusal


def suspects(found: Mapping[int, SendFailure | None]) -> list[int]:
    """The events of batches that were refused because of one of their events."""
    return [at for at, each in found.items() if each is not None and each.is_refusal and each.code in OF_ONE]


def spared_by_refusal(found: Mapping[int, SendFailure | None]) -> list[int]:
    """The events that were not stored because another was refused; none if the broker refused nothing."""
    failed = {at: each for at, each in found.items() if each is not None}
    if not any(each.is_refusal for each in failed.values()):
        return []
    return [at for at, each in failed.items() if each.spared]


def awaits_reports(items: Sequence[KafkaOutgoing], order: Sequence[int], reports: Reports) -> bool:
    """Whether a missing report can still change an outcome. Behind a refusal none can."""
    found = outcomes(items, order, reports, None)
    return any(each is NO_REPORT for each in found.values())
