"""Prometheus metrics. The client is imported when they are first asked for."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from prometheus_client import Metric


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one handler's consumer and engine say of themselves at one moment."""

    topic: str
    group: str
    engine: str
    workers: int
    busy: int
    restarted: int
    oldest_running_s: float | None
    delivered: int
    skipped: int
    stale: int
    done: int
    retried: int
    dead: int
    declined: int
    undelivered: int | None
    undelivered_oldest_s: float | None
    open: int
    oldest_open_s: float | None
    blocked_s: float
    gap: int
    delayed: int
    parked: int
    parked_keys: int
    dead_letters: int | None  # None: another process counts them, or they were not counted yet
    dead_oldest_s: float | None


_LABELS = ("topic", "group")
_GAUGES = {
    "engine_workers": ("workers", "Tasks, threads or processes that stand ready or run."),
    "engine_busy": ("busy", "Of those, the ones that run a handler."),
    "engine_oldest_running_seconds": ("oldest_running_s", "How long the longest present run takes already."),
    "lag_undelivered": ("undelivered", "Events in the log that were not delivered yet."),
    "lag_undelivered_oldest_seconds": ("undelivered_oldest_s", "Age of the oldest of those."),
    "lag_open": ("open", "Events delivered and not done: queued, running or delayed."),
    "lag_delayed": ("delayed", "Of those, the ones that wait in memory for their next try."),
    "lag_oldest_open_seconds": ("oldest_open_s", "Age of the oldest open event."),
    "lag_blocked_seconds": ("blocked_s", "How long the first open event has held a partition's progress up."),
    "lag_gap": ("gap", "Events that are done, but behind one that is open."),
    "parked_events": ("parked", "Events that wait in the store for a retry, or behind one."),
    "parked_keys": ("parked_keys", "Keys that those belong to."),
    "dead_letters": ("dead_letters", "Dead letters of the group, as last counted; told by one process of the fleet."),
    "dead_letters_oldest_seconds": ("dead_oldest_s", "Age of the oldest of those."),
}
_UNKNOWN = {"undelivered", "dead_letters", "dead_oldest_s"}  # None says nothing; of the others, that there is none
_COUNTERS = {
    "engine_restarted": ("restarted", "Workers that died or overran their time and were replaced."),
    "events_delivered": ("delivered", "Events taken in."),
    "events_skipped": ("skipped", "Events delivered again although they were done."),
    "events_stale": ("stale", "Deliveries and completions of an ownership that had ended."),
    "events_done": ("done", "Events handled."),
    "events_retried": ("retried", "Failed tries after which an event is tried again."),
    "events_dead": ("dead", "Events given up."),
    "events_declined": ("declined", "Events that their handler skipped; they count as done."),
}


def exposition(readings: Sequence[Reading], *, prefix: str = "onward") -> str:
    """The text that Prometheus scrapes."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(readings, prefix))
    return generate_latest(registry).decode()


class _Collector:
    def __init__(self, readings: Sequence[Reading], prefix: str) -> None:
        self._readings = readings
        self._prefix = prefix

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        yield from self._families(GaugeMetricFamily, _GAUGES)
        yield from self._families(CounterMetricFamily, _COUNTERS)

    def _families(self, kind: Any, table: dict[str, tuple[str, str]]) -> "Iterator[Metric]":
        for name, (field, text) in table.items():
            family = kind(f"{self._prefix}_{name}", text, labels=_LABELS)
            for reading in self._readings:
                value = getattr(reading, field)
                if value is not None or field not in _UNKNOWN:
                    family.add_metric([reading.topic, reading.group], value or 0.0)
            yield family
