"""Readings, and what a broker counts, as families of metrics. Pure."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from onward.brokers.base import Figure
from onward.observe.metrics import Family, Sample, folded
from onward.observe.reading import Reading

_LABELS = ("topic", "group")
_GAUGES = {
    "engine_workers": ("workers", "Tasks, threads or processes that are ready or running."),
    "engine_busy": ("busy", "Tasks, threads or processes that run a handler now."),
    "engine_oldest_running_seconds": ("oldest_running_s", "How long the oldest running call has taken so far."),
    "lag_undelivered": ("undelivered", "Events in the log that were not delivered yet."),
    "lag_undelivered_oldest_seconds": ("undelivered_oldest_s", "Age of the oldest event that was not delivered yet."),
    "lag_open": ("open", "Events delivered and not done: queued, running or delayed."),
    "lag_delayed": ("delayed", "Open events that wait in memory for their retry."),
    "lag_oldest_open_seconds": ("oldest_open_s", "Age of the oldest open event."),
    "lag_blocked_seconds": ("blocked_s", "How long the first open event has blocked the progress of a partition."),
    "lag_gap": ("gap", "Events that are done, while an earlier event of their partition is open."),
    "parked_events": ("parked", "Events that wait in the store for a retry, or behind an event that does."),
    "parked_keys": ("parked_keys", "Keys of the parked events."),
    "dead_letters": ("dead_letters", "Dead letters of the group at the last count. One process of the fleet counts."),
    "dead_letters_oldest_seconds": ("dead_oldest_s", "Age of the oldest dead letter."),
}
_COUNTERS = {
    "engine_restarted": ("restarted", "Workers that were replaced because they died or exceeded their time limit."),
    "events_delivered": ("delivered", "Events delivered to the process."),
    "events_skipped": ("skipped", "Events delivered again although they were done."),
    "events_filtered": ("filtered", "Events of a type that the handler does not handle. They are done without a call."),
    "events_stale": ("stale", "Deliveries and completions of an ownership that had ended."),
    "events_done": ("done", "Events handled."),
    "events_retried": ("retried", "Failed attempts after which the event is retried."),
    "events_dead": ("dead", "Events that became dead letters."),
    "events_declined": ("declined", "Events for which the handler raised Skip. They count as done."),
}
_PARTITION_GAUGES = {
    "partition_undelivered": ("undelivered", "Events of the partition in the log that were not delivered yet."),
    "partition_open": ("open", "Events of the partition delivered and not done."),
    "partition_gap": ("gap", "Events of the partition that are done, while an earlier one is open."),
    "partition_lag": ("lag", "Events between the watermark and the end of the log: undelivered, open and gap."),
    "partition_blocking_position": ("blocking_position", "Position of the event that blocks the watermark."),
}
# In these, None means unknown, so there is no sample. In the other gauges, None means that there is nothing: 0.
_UNKNOWN = {"undelivered", "dead_letters", "dead_oldest_s"}
_LARGEST = {"dead_letters", "blocking_position"}  # of several processes the largest counts, as for gauges of seconds


def figures(readings: Sequence[Reading]) -> list[Family]:
    """All families, even if there is no reading."""
    families = [_gauge(name, field, text, readings) for name, (field, text) in _GAUGES.items()]
    for name, (field, text) in _COUNTERS.items():
        samples = tuple(Sample((each.topic, each.group), getattr(each, field)) for each in readings)
        families.append(Family(name, "counter", text, _LABELS, samples))
    return [*families, *_partitions(readings)]


def of_broker(found: Sequence[Figure], readings: Sequence[Reading], durations: Sequence[Family] = ()) -> list[Family]:
    """The metrics that only one kind of broker has. `durations`: of the runs, by topic and group."""
    known = {family.name: family for family in (*_partitions(readings), *durations)}
    return [_family(each, _aliased(each, known) if each.alias_of else _samples(each)) for each in found]


def _aliased(figure: Figure, known: Mapping[str, Family]) -> tuple[Sample, ...]:
    family = known.get(figure.alias_of)
    if family is None:
        return ()
    if figure.kind != "histogram":
        return family.samples
    found = [each for each in family.samples if each.labels in figure.places]
    renamed = [
        Sample(figure.places[each.labels], each.value, _coarser(each.buckets, family.bounds, figure.bounds))
        for each in found
    ]
    return folded([[_family(figure, (each,))] for each in renamed])[0].samples if renamed else ()


def _coarser(buckets: Sequence[int], bounds: Sequence[float], wanted: Sequence[float]) -> tuple[int, ...]:
    """The counts of a histogram by fewer bounds, all of which are among its own."""
    counts = [0] * (len(wanted) + 1)
    for count, bound in zip(buckets, (*bounds, math.inf), strict=True):
        counts[bisect_left(wanted, bound)] += count
    return tuple(counts)


def _samples(figure: Figure) -> tuple[Sample, ...]:
    return tuple(Sample(*each) for each in figure.samples)


def _family(figure: Figure, samples: tuple[Sample, ...]) -> Family:
    fold: Literal["sum", "max"] = "max" if figure.largest else "sum"
    return Family(figure.name, figure.kind, figure.help, figure.labels, samples, figure.bounds, fold)


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
    text = "How long the watermark has not moved. The label status is the state of the event that blocks it."
    blocked = [
        ((*place, part.blocking_state), part.blocked_s) for place, part in parts if part.blocking_state is not None
    ]
    samples = tuple(Sample(place, seconds) for place, seconds in blocked)
    yield Family("partition_blocked_seconds", "gauge", text, (*labels, "status"), samples, fold="max")


def _fold(field: str) -> Literal["sum", "max"]:
    return "max" if field.endswith("_s") or field in _LARGEST else "sum"
