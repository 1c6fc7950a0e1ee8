"""What is counted of exchanges and queues, for the metrics."""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from onward.brokers.base import Figure, FigureSample

Status = Literal["success", "failed", "retried"]
OTHER = "other"  # the routing key of all that is beyond _MOST_KEYS
_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
_MOST_KEYS = 1_000  # time series of published messages; a program may make up a new type for each event


class QueueDepth(NamedTuple):
    """A queue at one moment. `oldest_age_s`: None if the server does not know it."""

    ready: int
    consumers: int
    oldest_age_s: float | None = None


class RabbitFigures:
    """The counts of one broker object. Any thread may write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: Counter[tuple[str, str]] = Counter()
        self._processed: Counter[tuple[str, str]] = Counter()
        self._consumed: dict[tuple[str, ...], tuple[str, ...]] = {}  # by topic and group: the queue
        self._depths: dict[str, QueueDepth] = {}
        self._failed_probes: Counter[str] = Counter()

    def published(self, exchange: str, key: str, count: int = 1) -> None:
        """The server has accepted so many messages. `key`: the type of their events, or their routing key."""
        with self._lock:
            place = (exchange, key)
            if place not in self._published and len(self._published) >= _MOST_KEYS:
                place = (exchange, OTHER)
            self._published[place] += count

    def processed(self, queue: str, status: Status, count: int = 1) -> None:
        """Messages are done with. success: the handler has returned, or its `types` filter the message out. failed: it
        became a dead letter. retried: it comes again."""
        with self._lock:
            self._processed[queue, status] += count

    def consumes(self, topic: str, group: str, queue: str) -> None:
        """This process handles the messages of the queue. With tiers, it is that of normal events."""
        with self._lock:
            self._consumed[topic, group] = (queue,)

    def depth(self, queue: str, ready: int, consumers: int = 0, oldest_age_s: float | None = None) -> None:
        with self._lock:
            self._depths[queue] = QueueDepth(ready, consumers, oldest_age_s)

    def probe_failed(self, queue: str) -> None:
        """The depth of the queue is unknown. It has no value then, because an old one would look healthy."""
        with self._lock:
            self._depths.pop(queue, None)
            self._failed_probes[queue] += 1

    def forget(self, queue: str) -> None:
        """This process no longer asks for the depth of the queue."""
        with self._lock:
            self._depths.pop(queue, None)

    def figures(self) -> list[Figure]:
        with self._lock:
            return [
                _counter("messages_published", _PUBLISHED, ("exchange", "routing_key"), self._published),
                _counter("messages_processed", _PROCESSED, ("queue", "status"), self._processed),
                self._gauge("queue_depth", _DEPTH, [(name, each.ready) for name, each in self._depths.items()]),
                self._gauge(
                    "queue_consumers", _CONSUMERS, [(name, each.consumers) for name, each in self._depths.items()]
                ),
                self._gauge("queue_oldest_seconds", _OLDEST, self._ages()),
                _counter(
                    "queue_probe_failures",
                    _FAILURES,
                    ("queue",),
                    {(name,): count for name, count in self._failed_probes.items()},
                ),
                self._durations(),
            ]

    def _ages(self) -> list[tuple[str, float]]:
        return [(name, each.oldest_age_s) for name, each in self._depths.items() if each.oldest_age_s is not None]

    def _gauge(self, name: str, text: str, values: list[tuple[str, float]]) -> Figure:
        samples = [FigureSample((queue,), value) for queue, value in sorted(values)]
        return Figure(name, "gauge", text, ("queue",), samples, largest=True)

    def _durations(self) -> Figure:
        return Figure(
            "message_process_seconds",
            "histogram",
            _SECONDS,
            ("queue",),
            bounds=_BOUNDS,
            alias_of="handler_duration_seconds",
            places=dict(self._consumed),
        )


_PUBLISHED = "Messages that the server has accepted from this process."
_PROCESSED = (
    "Messages that are done with. status is success (or filtered out by types), failed (a dead letter) or retried."
)
_DEPTH = "Messages in the queue that no consumer has yet."
_CONSUMERS = "Consumers of the queue."
_OLDEST = "Age of the oldest message in the queue, where the server knows it."
_FAILURES = "Times that the depth of the queue could not be read."
_SECONDS = "How long runs of the handler took. All tiers of a queue count together."


def _counter(name: str, text: str, labels: tuple[str, ...], counts: Mapping[Any, int]) -> Figure:
    samples = [FigureSample(place, count) for place, count in sorted(counts.items())]
    return Figure(name, "counter", text, labels, samples)
