"""What is counted of each partition, for the metrics. The labels are those of the event router whose dashboards people
have: the domain is the topic, the shard is the partition."""

import threading
from bisect import bisect_left

from onward.brokers.base import Figure, FigureKind, FigureSample
from onward.event import Partition

_LABELS = ("domain", "shard")
_COUNTERS = {
    "reclaim_messages": "Entries of other consumers that were reclaimed.",
    "stream_trimmed": "Finished events that were removed from the stream.",
    "stream_lost": "Events that another program removed from the stream before the group had read them.",
}
_GAUGES = {
    "stream_kept_events": "Events beyond the retention that stay because a group has not finished them.",
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
_HISTOGRAMS = {
    "reclaim_latency_seconds": ("How long it took to reclaim the entries of one page.", _SECONDS),
    "xreadgroup_batch_size": ("Entries of one partition in one read that found some.", _SIZES),
}
_ALIASES = {
    "stream_pending": ("partition_open", "Events that were delivered and are not done."),
    "stream_lag": ("partition_undelivered", "Events in the stream that were not delivered yet, as Onward counts them."),
}


class StreamFigures:
    """The counts of one broker object. Any thread may write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Partition, float]] = {name: {} for name in (*_COUNTERS, *_GAUGES, *_HISTOGRAMS)}
        self._buckets: dict[str, dict[Partition, list[int]]] = {name: {} for name in _HISTOGRAMS}

    def reclaimed(self, partition: Partition, count: int, seconds: float) -> None:
        """A page of entries of other consumers was reclaimed, or none were found."""
        self._add("reclaim_messages", partition, count)
        self._observe("reclaim_latency_seconds", partition, seconds)

    def lost(self, partition: Partition, count: int) -> None:
        self._add("stream_lost", partition, count)

    def trimmed(self, partition: Partition, count: int) -> None:
        self._add("stream_trimmed", partition, count)

    def kept(self, partition: Partition, count: int) -> None:
        """So many events stay beyond the retention now."""
        with self._lock:
            self._values["stream_kept_events"][partition] = count

    def batch(self, partition: Partition, size: int) -> None:
        """A read returned so many entries of this partition."""
        self._observe("xreadgroup_batch_size", partition, size)

    def figures(self) -> list[Figure]:
        with self._lock:
            found = [self._figure(name, "counter", text) for name, text in _COUNTERS.items()]
            found += [self._figure(name, "gauge", text) for name, text in _GAUGES.items()]
            found += [self._figure(name, "histogram", text, bounds) for name, (text, bounds) in _HISTOGRAMS.items()]
        return found + [
            Figure(name, "gauge", text, ("domain", "group", "shard"), alias_of=of)
            for name, (of, text) in _ALIASES.items()
        ]

    def _add(self, name: str, partition: Partition, amount: float) -> None:
        with self._lock:
            values = self._values[name]
            values[partition] = values.get(partition, 0) + amount

    def _observe(self, name: str, partition: Partition, value: float) -> None:
        bounds = _HISTOGRAMS[name][1]
        with self._lock:
            values = self._values[name]
            values[partition] = values.get(partition, 0) + value
            buckets = self._buckets[name].setdefault(partition, [0] * (len(bounds) + 1))
            buckets[bisect_left(bounds, value)] += 1

    def _figure(self, name: str, kind: FigureKind, text: str, bounds: tuple[float, ...] = ()) -> Figure:
        buckets = self._buckets.get(name, {})
        samples = [
            FigureSample((partition.topic, str(partition.index)), value, tuple(buckets.get(partition, ())))
            for partition, value in sorted(self._values[name].items())
        ]
        return Figure(name, kind, text, _LABELS, samples, bounds, largest=kind == "gauge")
