"""The thread that carries windows of events to Kafka.

A window goes to one producer that pipelines it in batches. When the broker refuses a batch for one event of it, those
that were certainly not stored are sent again: the events of the batch one by one, which tells the one from the others,
then the rest as before.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, Producer

from onward import clock
from onward.brokers.kafka.client import REQUEST_S, Client
from onward.brokers.kafka.window import (
    BEHIND,
    LATE,
    LOST,
    UNANSWERED,
    Fate,
    Outgoing,
    Place,
    Window,
    awaited,
    fate,
    fates,
    spared_by_refusal,
    suspects,
)

log = logging.getLogger("onward")

_POLL_S = 0.05
_LAST_WORDS_S = 2.0  # for the reports of a window that has failed
_COUNT_S = 1.0  # how often a producer tells what it has counted
_SMALLEST_BATCH_BYTES = 1_024


class Courier:
    """The thread that owns the producer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._work: queue.SimpleQueue[tuple[Window, Any] | None] = queue.SimpleQueue()
        self._batch_bytes: int | None = None
        self._producer: Producer | None = None
        self._counters = Counters()
        self._thread: threading.Thread | None = None

    def warm(self) -> None:
        """Make the producer now: it takes half a second to be given its number."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="onward-kafka-publisher", daemon=True)
            self._thread.start()
            self._work.put((Window(), lambda _: None))

    def take(self, window: Window, done: Callable[[Window], object]) -> None:
        self.warm()
        self._work.put((window, done))

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            window, done = work
            try:
                self._carry(window)
            except Exception as error:
                log.exception("a window of %d events failed", len(window.items))
                for at in range(len(window.items)):
                    window.fates.setdefault(at, Fate(str(error), unknown=True))
                self._producer = None
            done(window)
        if self._producer is not None:
            self._producer.purge()
            self._producer.flush(0)
            self._producer = None  # it would go on asking for its topics, and so make one that is deleted

    def _next(self) -> tuple[Window, Any] | None:
        while True:
            try:
                return self._work.get(timeout=_COUNT_S)
            except queue.Empty:
                if self._producer is not None:
                    _is_fatal(self._producer, 0)  # what it counts would pile up

    def _carry(self, window: Window) -> None:
        refused, rest = self._together(window, range(len(window.items)))
        if refused or rest:
            self._one_by_one(window, window.going(refused))
            self._fit(window, refused)
            refused, rest = self._together(window, window.going(rest))
            self._one_by_one(window, window.going(sorted((*refused, *rest))))
            self._fit(window, refused)

    def _together(self, window: Window, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """Send these. Answers which were refused for one of them, and which were not stored because of a refusal."""
        if order and clock.now() > window.deadline:
            window.fates |= dict.fromkeys(order, UNANSWERED)
            return [], []
        producer, reports = self._ready(), dict[int, KafkaError | None]()
        failing = not _hand_over(producer, window.items, order, reports)
        while len(producer) and not failing:
            failing = clock.now() > window.deadline or _is_fatal(producer, _POLL_S)
        if not failing and not any(reports.values()):
            window.fates |= dict.fromkeys(reports)
            return [], []
        self._producer = None
        _hear_out(producer, window, order, reports)
        found = fates(window.items, order, reports, None)
        if any(each.unknown and each.code == KafkaError._PURGE_QUEUE for each in found.values() if each is not None):
            found = fates(window.items, order, reports, self._counters.sent(producer))
        refused, spared = suspects(found), spared_by_refusal(found)
        again = {*refused, *spared}
        window.fates |= {at: each for at, each in found.items() if at not in again}
        return refused, spared

    def _ready(self) -> Producer:
        if self._producer is None:
            more: dict[str, Any] = {} if self._batch_bytes is None else {"batch.size": self._batch_bytes}
            more |= {"statistics.interval.ms": int(_COUNT_S * 1_000), "stats_cb": self._counters.hear}
            self._producer = self._client.producer(**more)
        return self._producer

    def _one_by_one(self, window: Window, order: Sequence[int]) -> None:
        """Send these so that none shares the fate of another: alone, and no two of a key at a time."""
        lanes = window.lanes(order)
        producer = self._client.single_producer() if lanes else None
        while lanes and producer is not None and clock.now() < window.deadline:
            heads = [lane.popleft() for lane in lanes]
            _send_each(producer, window, heads)
            failed = [lane for at, lane in zip(heads, lanes, strict=True) if window.fates[at] is not None]
            window.fates |= {at: BEHIND for lane in failed for at in lane}
            lanes = [lane for at, lane in zip(heads, lanes, strict=True) if lane and window.fates[at] is None]
        window.fates |= {at: LATE for lane in lanes for at in lane}

    def _fit(self, window: Window, tried: Sequence[int]) -> None:
        """Events that fit alone may not fit together: the topic's limit is below the size of our batches."""
        sizes = {at: window.items[at].size for at in tried}
        fitting = sum(size for at, size in sizes.items() if window.fates[at] is None)
        too_large = [size for at, size in sizes.items() if (found := window.fates[at]) and found.is_refusal]
        if len(tried) > 1 and fitting > min(too_large, default=0):
            self._batch_bytes = max(_SMALLEST_BATCH_BYTES, (self._batch_bytes or 1_000_000) // 8)


class Counters:
    """What a producer has counted, which it tells once in a while."""

    def __init__(self) -> None:
        self._told = ""

    def hear(self, text: str) -> None:
        self._told = text

    def sent(self, producer: Producer) -> Mapping[Place, int] | None:
        """How many messages went out, by partition, beyond those that were accepted: once or more often. The producer
        holds none any more. None: it does not tell."""
        since_us = int(time.monotonic() * 1_000_000)  # the clock of librdkafka
        end = clock.now() + 3 * _COUNT_S
        self._told = ""
        while clock.now() < end:
            _is_fatal(producer, _POLL_S)
            if self._told and (told := msgspec.json.decode(self._told, type=_Told)).ts >= since_us:
                return {
                    (topic, int(index)): counted.txmsgs - counted.acked_msgid
                    for topic, each in told.topics.items()
                    for index, counted in each.partitions.items()
                }
        return None


class _Counted(msgspec.Struct):
    txmsgs: int  # each sending of a message counts
    acked_msgid: int  # they are numbered from 1, and accepted in order


class _Topic(msgspec.Struct):
    partitions: dict[str, _Counted]


class _Told(msgspec.Struct):
    ts: int
    topics: dict[str, _Topic]


def _hand_over(
    producer: Producer, items: Sequence[Outgoing], order: Sequence[int], reports: dict[int, KafkaError | None]
) -> bool:
    """Give all to the producer; False when it takes no more."""

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


def _hear_out(producer: Producer, window: Window, order: Sequence[int], reports: dict[int, KafkaError | None]) -> None:
    """Hear the last reports of a producer that is parted with: what it still holds must not go out later."""
    if not any(isinstance(report, KafkaError) for report in reports.values()):
        producer.purge(in_flight=clock.now() > window.deadline)  # what is on its way may still be answered for
    while clock.now() < window.deadline and awaited(window.items, order, reports):
        _is_fatal(producer, _POLL_S)
    producer.purge()
    _drain(producer, clock.now() + _LAST_WORDS_S)


def _send_each(producer: Producer, window: Window, order: Sequence[int]) -> None:
    reports: dict[int, KafkaError | None] = {}

    def report(at: int, error: KafkaError | None, _: object) -> None:
        reports[at] = error

    for at in order:
        if (refusal := _refused(producer, window.items[at], partial(report, at))) is not None:
            reports[at] = refusal
    _drain(producer, window.deadline)
    if len(producer):
        producer.purge()
        _drain(producer, clock.now() + _LAST_WORDS_S)
    window.fates |= {at: fate(reports[at]) if at in reports else LOST for at in order}


def _drain(producer: Producer, end: float) -> None:
    while len(producer) and clock.now() < end:
        _is_fatal(producer, _POLL_S)


def _refused(
    producer: Producer, item: Outgoing, report: Callable[[KafkaError | None, object], None]
) -> KafkaError | None:
    """Hand it over; answers why the producer does not take it."""
    try:
        _produce(producer, item, report)
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        return cause
    except BufferError:
        return KafkaError(KafkaError._QUEUE_FULL)
    return None


def _produce(producer: Producer, item: Outgoing, report: Callable[[KafkaError | None, object], None]) -> None:
    event = item.event
    arguments = (event.topic, event.value, item.key, item.partition, report)
    try:
        producer.produce(*arguments, headers=item.headers)
    except KafkaException as error:
        if error.args[0].code() != KafkaError._UNKNOWN_PARTITION:
            raise
        producer.list_topics(timeout=REQUEST_S)  # it was added since the producer has last looked
        producer.produce(*arguments, headers=item.headers)


def _is_fatal(producer: Producer, wait_s: float) -> bool:
    """Serve the producer's reports for a while. A fatal error is raised by it once; the reports follow."""
    try:
        producer.poll(wait_s)
    except KafkaException as error:
        log.warning("Kafka: the producer is replaced: %s", error.args[0].str())
        return True
    return False
