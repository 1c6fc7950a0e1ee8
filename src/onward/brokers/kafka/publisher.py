"""Publishing: calls queue up in the loop, a thread carries them out in windows, each awaited whole.

One window is under way at a time, so that what fails takes down what stands behind it before that is sent. Within a
window the idempotent producer sees to it: after a refusal nothing later of that partition is accepted.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from onward import clock
from onward.brokers.kafka.client import REQUEST_S, Client
from onward.brokers.kafka.message import Header, headers_of
from onward.brokers.kafka.parting import parted
from onward.brokers.partition import partition_of
from onward.errors import Backlogged, Closed, OnwardError, PublishError, TooLarge, Unserialisable
from onward.event import Event
from onward.settings import Settings

log = logging.getLogger("onward")

_WINDOW_EVENTS = 10_000
_WINDOW_BYTES = 16 << 20
_POLL_S = 0.05
_LAST_WORDS_S = 2.0  # for the reports of a window that has failed
_SMALLEST_BATCH_BYTES = 1_024
BEHIND = "refused, because an event published before it was refused; publish both again, in order"

Key = tuple[str, str | None]


class Outgoing(NamedTuple):
    """An event as it is handed to the producer."""

    event: Event
    partition: int
    key: bytes | None
    headers: Sequence[Header]
    size: int


class Parcel:
    """What is left of one publish call."""

    __slots__ = ("deadline", "failed", "future", "items", "size", "unsent")

    def __init__(self, items: Sequence[Outgoing], deadline: float, future: "asyncio.Future[None]") -> None:
        self.items: deque[Outgoing] = deque(items)  # not yet in a window
        self.unsent = len(items)  # not yet answered for
        self.size = sum([item.size for item in items])
        self.deadline = deadline
        self.future = future
        self.failed: list[Failed] = []


class Failed(NamedTuple):
    event: Event
    why: str
    unknown: bool


class Window:
    """What one turn of the thread sends. `reports` has an answer for each, None where it was accepted."""

    __slots__ = ("deadline", "items", "parcels", "reports")

    def __init__(self) -> None:
        self.items: list[Outgoing] = []
        self.parcels: list[Parcel] = []  # beside the items
        self.reports: dict[int, KafkaError | str | None] = {}
        self.deadline = 0.0


class Publisher:
    def __init__(self, client: Client, settings: Settings) -> None:
        self._settings = settings
        self._parcels: deque[Parcel] = deque()
        self._queued_bytes = 0
        self._spread = itertools.count()
        self._courier = Courier(client)
        self._busy = False
        self._closed = False
        self._idle: asyncio.Future[None] | None = None

    def pack(self, events: Sequence[Event], counts: Mapping[str, int]) -> list[Outgoing]:
        """PayloadError: nothing has been written."""
        try:
            return [self._outgoing(event, counts[event.topic]) for event in events]
        except (AttributeError, TypeError, ValueError) as error:
            raise Unserialisable(
                f"an event cannot be stored: {error}; value takes bytes, headers map str to str"
            ) from error

    def _outgoing(self, event: Event, partitions: int) -> Outgoing:
        size = event.size
        if size > self._settings.max_event_bytes:
            raise TooLarge(f"event {event.id} of {size} bytes exceeds max_event_bytes")
        if event.value is not None and not isinstance(event.value, bytes):
            raise TypeError(f"value of event {event.id} is {type(event.value).__name__}")
        if event.key is None:
            return Outgoing(event, next(self._spread) % partitions, None, headers_of(event), size)
        return Outgoing(event, partition_of(event.key, partitions), event.key.encode(), headers_of(event), size)

    def enter(self, items: Sequence[Outgoing]) -> "asyncio.Future[None]":
        """Done when all are accepted. Whoever cancels leaves them on their way: others may stand behind them."""
        if self._closed:
            raise Closed("the broker is closed")
        loop = asyncio.get_running_loop()
        parcel = Parcel(items, clock.now() + self._settings.publish_timeout_s, loop.create_future())
        if self._queued_bytes and self._queued_bytes + parcel.size > self._settings.max_backlog_bytes:
            raise Backlogged(
                f"{self._queued_bytes} bytes wait to be published; slow down, or raise max_backlog_bytes",
                refused=[item.event for item in items],
            )
        self._parcels.append(parcel)
        self._queued_bytes += parcel.size
        self._next_window(loop)
        return asyncio.shield(parcel.future)

    def warm(self) -> None:
        self._courier.warm()

    async def close(self) -> None:
        """Finish what was entered; what cannot be sent in its time is refused."""
        self._closed = True
        if self._busy:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        await parted(self._courier.close)

    def _next_window(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._busy or not self._parcels:
            return
        window, room = Window(), _WINDOW_BYTES
        window.deadline = self._parcels[0].deadline
        while self._parcels and room > 0 and len(window.items) < _WINDOW_EVENTS:
            parcel = self._parcels[0]
            while parcel.items and room > 0 and len(window.items) < _WINDOW_EVENTS:
                item = parcel.items.popleft()
                room -= item.size
                window.items.append(item)
                window.parcels.append(parcel)
            if not parcel.items:
                self._parcels.popleft()
                self._queued_bytes -= parcel.size
        self._busy = True
        self._courier.take(window, lambda done: loop.call_soon_threadsafe(self._finished, done, loop))

    def _finished(self, window: Window, loop: asyncio.AbstractEventLoop) -> None:
        self._busy = False
        failed: dict[Key, str] = {}
        sunk = _sunk(window) if any(window.reports.values()) else set[int]()
        silent = all(_is_purged(report) for report in window.reports.values() if report is not None)
        for at, (item, parcel) in enumerate(zip(window.items, window.parcels, strict=True)):
            report = window.reports.get(at, "its fate is not known")
            parcel.unsent -= 1
            if report is not None:
                why = self._why(report, silent=silent)
                parcel.failed.append(Failed(item.event, why, _unknown(report) and at not in sunk))
                failed[item.event.topic, item.event.key] = why
        if failed:
            self._bring_down(failed)
        for parcel in dict.fromkeys(window.parcels):
            _answer(parcel)
        self._next_window(loop)
        if not self._busy and self._idle is not None:
            self._idle.set_result(None)

    def _why(self, report: KafkaError | str, *, silent: bool) -> str:
        """`silent`: there was no other answer to its window."""
        if not _is_purged(report):
            return report if isinstance(report, str) else str(report.str())
        if silent:
            return f"no answer from Kafka in publish_timeout_s={self._settings.publish_timeout_s:g}; is it running?"
        return "not sent, because another event of the same call was refused"

    def _bring_down(self, failed: dict[Key, str]) -> None:
        """No event of a key that failed goes out, of the calls that have been entered."""
        failed = {key: why for key, why in failed.items() if key[1] is not None}
        for parcel in tuple(self._parcels):
            kept: deque[Outgoing] = deque()
            for item in parcel.items:
                if (item.event.topic, item.event.key) in failed:
                    parcel.failed.append(Failed(item.event, BEHIND, False))
                    parcel.unsent -= 1
                else:
                    kept.append(item)
            parcel.items = kept
            if not kept:
                self._parcels.remove(parcel)
                self._queued_bytes -= parcel.size
                _answer(parcel)


def _answer(parcel: Parcel) -> None:
    if parcel.unsent or parcel.future.done():
        return
    if not parcel.failed:
        parcel.future.set_result(None)
        return
    parcel.future.set_exception(_error(parcel.failed))
    parcel.future.exception()  # a caller that was cancelled does not look


def _error(failed: Iterable[Failed]) -> OnwardError:
    failed = list(failed)
    causes = ", ".join(dict.fromkeys(each.why for each in failed))
    return PublishError(
        f"Kafka: {len(failed)} events were not accepted: {causes}",
        refused=[each.event for each in failed if not each.unknown],
        unknown=[each.event for each in failed if each.unknown],
    )


_NEVER_SENT = frozenset({KafkaError._PURGE_QUEUE, KafkaError._QUEUE_FULL, KafkaError._FATAL, KafkaError._UNKNOWN_TOPIC})


def _is_purged(report: KafkaError | str) -> bool:
    return isinstance(report, KafkaError) and report.code() in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)


def _unknown(report: KafkaError | str) -> bool:
    """May the event have been stored? A broker that says no has not."""
    if isinstance(report, str):
        return True
    return report.code() < 0 and report.code() not in _NEVER_SENT


def _sunk(window: Window) -> set[int]:
    """Those sent behind one that the broker refused, in its partition: their numbers no longer fit, so it took none."""
    closed: set[tuple[str, int]] = set()
    sunk = set()
    for at, item in enumerate(window.items):
        place = (item.event.topic, item.partition)
        report = window.reports.get(at, "")
        if place in closed:
            sunk.add(at)
        elif isinstance(report, KafkaError) and report.code() > 0:
            closed.add(place)
    return sunk


class Courier:
    """The thread that owns the producer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._work: queue.SimpleQueue[tuple[Window, Any] | None] = queue.SimpleQueue()
        self._batch_bytes: int | None = None
        self._producer: Producer | None = None
        self._thread: threading.Thread | None = None

    def warm(self) -> None:
        """Make the producer now: it takes half a second to be given its number."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="onward-kafka-publisher", daemon=True)
            self._thread.start()
            self._work.put((Window(), lambda _: None))

    def take(self, window: Window, done: Any) -> None:
        self.warm()
        self._work.put((window, done))

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            window, done = work
            try:
                self._carry(window)
            except Exception as error:
                log.exception("a window of %d events failed", len(window.items))
                for at in range(len(window.items)):
                    window.reports.setdefault(at, str(error))
                self._producer = None
            done(window)
        if self._producer is not None:
            self._producer.purge()
            self._producer.flush(0)
            self._producer = None  # it would go on asking for its topics, and so make one that is deleted

    def _carry(self, window: Window) -> None:
        if self._producer is None:
            more = {} if self._batch_bytes is None else {"batch.size": self._batch_bytes}
            self._producer = self._client.producer(**more)
        producer, reports = self._producer, window.reports
        failing = not self._hand_over(producer, window)
        while len(producer) and not failing:
            failing = clock.now() > window.deadline or _is_fatal(producer, _POLL_S)
        if failing or any(report is not None for report in reports.values()):
            self._give_up(producer, window)

    def _hand_over(self, producer: Producer, window: Window) -> bool:
        """Give all to the producer; False when it takes no more."""

        def report(at: int, error: KafkaError | None, _: object) -> None:
            window.reports[at] = error

        for at, item in enumerate(window.items):
            try:
                _produce(producer, item, partial(report, at))
            except (KafkaException, BufferError) as error:
                cause = error.args[0] if isinstance(error, KafkaException) else KafkaError(KafkaError._QUEUE_FULL)
                for rest in range(at, len(window.items)):
                    window.reports[rest] = cause if rest == at else KafkaError(KafkaError._PURGE_QUEUE)
                return False
            if at % 1_000 == 999 and _is_fatal(producer, 0):
                for rest in range(at + 1, len(window.items)):
                    window.reports[rest] = KafkaError(KafkaError._PURGE_QUEUE)
                return False
        return True

    def _give_up(self, producer: Producer, window: Window) -> None:
        """Hear the last reports, then part with this producer: what it still holds must not go out later."""
        end = clock.now() + _LAST_WORDS_S
        if not any(isinstance(report, KafkaError) for report in window.reports.values()):
            producer.purge(in_flight=clock.now() > window.deadline)  # what is on its way may still be answered for
        while len(producer) and clock.now() < end:
            _is_fatal(producer, _POLL_S)
            if clock.now() > end - _LAST_WORDS_S / 2:
                producer.purge()
        self._fit(window)
        self._producer = None

    def _fit(self, window: Window) -> None:
        """Events that fit alone may not fit together: the topic's limit is below the size of our batches."""
        reports = [report for report in window.reports.values() if isinstance(report, KafkaError)]
        if sum(report.code() == KafkaError.MSG_SIZE_TOO_LARGE for report in reports) > 1:
            self._batch_bytes = max(_SMALLEST_BATCH_BYTES, (self._batch_bytes or 1_000_000) // 8)


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
