"""The thread that sends windows of events to Kafka.

A window goes to one producer that pipelines it in batches. When the broker refuses a batch because of one event, the
thread sends the events that were certainly not stored again: first those of the batch one by one, which finds the bad
event, then the rest as before.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from onward import clock
from onward.brokers.core.publishing import Window
from onward.brokers.kafka.client import ClientFactory, produce
from onward.brokers.kafka.sending import (
    BEHIND,
    LATE,
    NO_REPORT,
    NOT_SENT,
    KafkaOutgoing,
    Packed,
    SendFailure,
    Sending,
    awaits_reports,
    outcome,
    outcomes,
    spared_by_refusal,
    suspects,
)
from onward.brokers.kafka.sent_counts import INTERVAL_S, SentCounts

log = logging.getLogger("onward")

_POLL_S = 0.05
_LAST_REPORTS_S = 2.0  # for the reports of a window that has failed
_SMALLEST_BATCH_BYTES = 1_024

Done = Callable[[Window[Packed]], object]
SentReports = dict[int, KafkaError | None]


class ProducerThread:
    """Owns the producer."""

    def __init__(self, factory: ClientFactory, timeout_s: float) -> None:
        self._factory = factory
        self._timeout_s = timeout_s  # for the text of errors
        self._work: queue.SimpleQueue[tuple[Window[Packed], Done] | None] = queue.SimpleQueue()
        self._batch_bytes: int | None = None
        self._producer: Producer | None = None
        self._counts = SentCounts()
        self._thread: threading.Thread | None = None

    def warm(self) -> None:
        """Create the producer now: the cluster needs half a second to give it an id."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="onward-kafka-publisher", daemon=True)
            self._thread.start()
            self._work.put((Window(), lambda _: None))

    def take(self, window: Window[Packed], done: Done) -> None:
        self.warm()
        self._work.put((window, done))

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            window, done = work
            sending = Sending(window.items, window.deadline)
            try:
                self._carry(sending)
            except Exception as error:
                log.exception("Kafka: sending %d events failed", len(window.items))
                for at in range(len(window.items)):
                    sending.outcomes.setdefault(at, SendFailure(str(error), unknown=True))
                self._producer = None
            window.answers = sending.answers(self._timeout_s)
            done(window)
        if self._producer is not None:
            self._producer.purge()
            self._producer.flush(0)
            self._producer = None  # otherwise it goes on refreshing its topics, which may create a deleted one again

    def _next(self) -> tuple[Window[Packed], Done] | None:
        while True:
            try:
                return self._work.get(timeout=INTERVAL_S)
            except queue.Empty:
                if self._producer is not None:
                    _is_fatal(self._producer, 0)  # otherwise its statistics pile up

    def _carry(self, sending: Sending) -> None:
        refused, rest = self._together(sending, range(len(sending.items)))
        if refused or rest:
            self._one_by_one(sending, sending.going(refused))
            self._fit(sending, refused)
            refused, rest = self._together(sending, sending.going(rest))
            self._one_by_one(sending, sending.going(sorted((*refused, *rest))))
            self._fit(sending, refused)

    def _together(self, sending: Sending, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """Send these events. Returns those of refused batches, and those that were not stored because of a refusal."""
        if order and clock.now() > sending.deadline:
            sending.outcomes |= dict.fromkeys(order, NOT_SENT)
            return [], []
        producer, reports = self._ready(), SentReports()
        failing = not _hand_over(producer, sending.items, order, reports)
        while len(producer) and not failing:
            failing = clock.now() > sending.deadline or _is_fatal(producer, _POLL_S)
        if not failing and not any(reports.values()):
            sending.outcomes |= dict.fromkeys(reports)
            return [], []
        self._producer = None
        _collect_reports(producer, sending, order, reports)
        found = outcomes(sending.items, order, reports, None)
        if any(each.unknown and each.code == KafkaError._PURGE_QUEUE for each in found.values() if each is not None):
            sent = self._counts.unaccepted(lambda: _is_fatal(producer, _POLL_S))
            found = outcomes(sending.items, order, reports, sent)
        refused, spared = suspects(found), spared_by_refusal(found)
        again = {*refused, *spared}
        sending.outcomes |= {at: each for at, each in found.items() if at not in again}
        return refused, spared

    def _ready(self) -> Producer:
        if self._producer is None:
            more: dict[str, Any] = {} if self._batch_bytes is None else {"batch.size": self._batch_bytes}
            more |= {"statistics.interval.ms": int(INTERVAL_S * 1_000), "stats_cb": self._counts.update}
            self._producer = self._factory.producer(**more)
        return self._producer

    def _one_by_one(self, sending: Sending, order: Sequence[int]) -> None:
        """Send these so that none is refused because of another: each in its own batch, those of a key in turn."""
        lanes = sending.lanes(order)
        producer = self._factory.single_producer() if lanes else None
        while lanes and producer is not None and clock.now() < sending.deadline:
            heads = [lane.popleft() for lane in lanes]
            _send_each(producer, sending, heads)
            failed = [lane for at, lane in zip(heads, lanes, strict=True) if sending.outcomes[at] is not None]
            sending.outcomes |= {at: BEHIND for lane in failed for at in lane}
            lanes = [lane for at, lane in zip(heads, lanes, strict=True) if lane and sending.outcomes[at] is None]
        sending.outcomes |= {at: LATE for lane in lanes for at in lane}

    def _fit(self, sending: Sending, tried: Sequence[int]) -> None:
        """Make batches smaller if events fit alone but not together: then the topic's limit is below our batch size."""
        sizes = {at: sending.items[at].size for at in tried}
        fitting = sum(size for at, size in sizes.items() if sending.outcomes[at] is None)
        too_large = [size for at, size in sizes.items() if (found := sending.outcomes[at]) and found.is_refusal]
        if len(tried) > 1 and fitting > min(too_large, default=0):
            self._batch_bytes = max(_SMALLEST_BATCH_BYTES, (self._batch_bytes or 1_000_000) // 8)


def _hand_over(producer: Producer, items: Sequence[KafkaOutgoing], order: Sequence[int], reports: SentReports) -> bool:
    """Give all events to the producer. False: it accepts no more."""

    def report(at: int, error: KafkaError | None, _: object) -> None:
        reports[at] = error

    for number, at in enumerate(order):
        refusal = _refused(producer, items[at], partial(report, at))
        if refusal is not None:
            reports[at] = refusal
        if refusal is not None or (number % 1_000 == 999 and _is_fatal(producer, 0)):
            for rest in order[number + 1 :]:
                reports[rest] = KafkaError(KafkaError._QUEUE_FULL)
            return False
    return True


def _collect_reports(producer: Producer, sending: Sending, order: Sequence[int], reports: SentReports) -> None:
    """Collect the last reports of a producer that is given up. Events that it still has must not be sent later."""
    if not any(isinstance(report, KafkaError) for report in reports.values()):
        producer.purge(in_flight=clock.now() > sending.deadline)  # events in flight may still be answered
    while clock.now() < sending.deadline and awaits_reports(sending.items, order, reports):
        _is_fatal(producer, _POLL_S)
    producer.purge()
    _drain(producer, clock.now() + _LAST_REPORTS_S)


def _send_each(producer: Producer, sending: Sending, order: Sequence[int]) -> None:
    reports: SentReports = {}

    def report(at: int, error: KafkaError | None, _: object) -> None:
        reports[at] = error

    for at in order:
        if (refusal := _refused(producer, sending.items[at], partial(report, at))) is not None:
            reports[at] = refusal
    _drain(producer, sending.deadline)
    if len(producer):
        producer.purge()
        _drain(producer, clock.now() + _LAST_REPORTS_S)
    sending.outcomes |= {at: outcome(reports[at]) if at in reports else NO_REPORT for at in order}


def _drain(producer: Producer, end: float) -> None:
    while len(producer) and clock.now() < end:
        _is_fatal(producer, _POLL_S)


def _refused(
    producer: Producer, item: KafkaOutgoing, report: Callable[[KafkaError | None, object], None]
) -> KafkaError | None:
    """Give the event to the producer. Returns why the producer does not accept it, or None."""
    event = item.event
    key = None if event.key is None else event.key.encode()
    try:
        produce(producer, event.topic, event.value, key, item.partition, report, headers=item.packed)
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        return cause
    except BufferError:
        return KafkaError(KafkaError._QUEUE_FULL)
    return None


def _is_fatal(producer: Producer, wait_s: float) -> bool:
    """Serve the producer's reports for this time. True: it has a fatal error. It raises that once; reports follow."""
    try:
        producer.poll(wait_s)
    except KafkaException as error:
        log.warning("Kafka: the producer is replaced: %s", error.args[0].str())
        return True
    return False
