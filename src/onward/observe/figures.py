"""Readings as families of metrics. Pure."""

from collections.abc import Iterator, Sequence
from typing import Literal

from onward.observe.metrics import Family, Sample
from onward.observe.reading import Reading

_LABELS = ("topic", "group")
_GAUGES = {
    "engine_workers": ("workers", "Tasks, threads or processes that are ready or running."),
    "engine_busy": ("busy", "Of those, the ones that run a handler."),
    "engine_oldest_running_seconds": ("oldest_running_s", "How long the longest present run has taken so far."),
    "lag_undelivered": ("undelivered", "Events in the log that were not delivered yet."),
    "lag_undelivered_oldest_seconds": ("undelivered_oldest_s", "Age of the oldest of those."),
    "lag_open": ("open", "Events delivered and not done: queued, running or delayed."),
    "lag_delayed": ("delayed", "Of those, the ones that wait in memory for their next try."),
    "lag_oldest_open_seconds": ("oldest_open_s", "Age of the oldest open event."),
    "lag_blocked_seconds": ("blocked_s", "How long the first open event has held a partition's progress up."),
    "lag_gap": ("gap", "Events that are done, but behind one that is open."),
    "parked_events": ("parked", "Events that wait in the store for a retry, or behind one."),
    "parked_keys": ("parked_keys", "Keys that those belong to."),
    "dead_letters": ("dead_letters", "Dead letters of the group, as last counted; one process of the fleet counts."),
    "dead_letters_oldest_seconds": ("dead_oldest_s", "Age of the oldest of those."),
}
_COUNTERS = {
    "engine_restarted": ("restarted", "Workers that died or overran their time and were replaced."),
    "events_delivered": ("delivered", "Events taken in."),
    "events_skipped": ("skipped", "Events delivered again although they were done."),
    "events_filtered": ("filtered", "Events of a type that the handler does not take; they are done without a run."),
    "events_stale": ("stale", "Deliveries and completions of an ownership that had ended."),
    "events_done": ("done", "Events handled."),
    "events_retried": ("retried", "Failed tries after which an event is tried again."),
    "events_dead": ("dead", "Events given up."),
    "events_declined": ("declined", "Events that their handler skipped; they count as done."),
}
_PARTITION_GAUGES = {
    "partition_undelivered": ("undelivered", "Events of the partition in the log that were not delivered yet."),
    "partition_open": ("open", "Events of the partition delivered and not done."),
    "partition_gap": ("gap", "Events of the partition that are done, but behind one that is open."),
    "partition_lag": ("lag", "The sum of these three: events between the watermark and the end of the log."),
    "partition_blocking_position": ("blocking_position", "Position of the event that holds the watermark."),
}
_UNKNOWN = {
    "undelivered",
    "dead_letters",
    "dead_oldest_s",
}  # None: no sample; of the others None means that there is none
_LARGEST = {"dead_letters", "blocking_position"}  # of several processes, like every gauge of seconds


def figures(readings: Sequence[Reading]) -> list[Family]:
    """Every family, also when there is no reading."""
    families = [_gauge(name, field, text, readings) for name, (field, text) in _GAUGES.items()]
    for name, (field, text) in _COUNTERS.items():
        samples = tuple(Sample((each.topic, each.group), getattr(each, field)) for each in readings)
        families.append(Family(name, "counter", text, _LABELS, samples))
    return [*families, *_partitions(readings)]


def _gauge(name: str, field: str, text: str, readings: Sequence[Reading]) -> Family:
    values = [(each, getattr(each, field)) for each in readings]
    samples = tuple(
        Sample((each.topic, each.group), value or 0.0)
        for each, value in values
        if value is not None or field not in _UNKNOWN
    )
    return Family(name, "gauge", text, _LABELS, samples, fold=_fold(field))


def _partitions(readings: Sequence[Reading]) -> Iterator[Family]:
    labels = (*_LABELS, "partition")
    parts = [((each.topic, each.group, str(part.partition)), part) for each in readings for part in each.partitions]
    for name, (field, text) in _PARTITION_GAUGES.items():
        values = [(place, getattr(part, field)) for place, part in parts]
        samples = tuple(Sample(place, value) for place, value in values if value is not None)
        yield Family(name, "gauge", text, labels, samples, fold=_fold(field))
    text = "How long the watermark has not moved; status is what the event that holds it does."
    blocked = [
        ((*place, part.blocking_state), part.blocked_s) for place, part in parts if part.blocking_state is not None
    ]
    samples = tuple(Sample(place, seconds) for place, seconds in blocked)
    yield Family("partition_blocked_seconds", "gauge", text, (*labels, "status"), samples, fold="max")


def _fold(field: str) -> Literal["sum", "max"]:
    return "max" if field.endswith("_s") or field in _LARGEST else "sum"
