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


_LABELS = ("topic", "group")
_GAUGES = {
    "engine_workers": ("workers", "Tasks, threads or processes that stand ready or run."),
    "engine_busy": ("busy", "Of those, the ones that run a handler."),
    "engine_oldest_running_seconds": ("oldest_running_s", "How long the longest present run takes already."),
}
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
                family.add_metric([reading.topic, reading.group], getattr(reading, field) or 0.0)
            yield family
