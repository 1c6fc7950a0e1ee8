"""Families of metrics, and the text that Prometheus reads.

A stage gets a counter, a gauge or a histogram from the application's `registry` and writes to it, or adds a collector
that is called at every scrape. This module writes the text format itself: that is a page of code, while importing a
client library would block the event loop for 100 ms at the first scrape. The only labels are those of LABELS, never a
key, an id or a job, because the number of time series must not grow with the traffic.
"""

import logging
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, TypeVar

import msgspec

log = logging.getLogger("onward")

LABELS = frozenset({"topic", "group", "partition", "status", "domain", "shard"})
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_NAME = re.compile("[a-z][a-z0-9_]*")


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One value. For a histogram: the sum of the observations, and how many of them are in each bucket."""

    labels: tuple[str, ...]
    value: float
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Only plain numbers and strings can be sent to a supervisor. Others are converted, or TypeError is raised."""
        if type(self.value) is not float and (type(self.value) is not int or abs(self.value) >= 2**63):
            msgspec.structs.force_setattr(self, "value", float(self.value))
        if any(type(label) is not str for label in self.labels):
            msgspec.structs.force_setattr(self, "labels", tuple(map(str.__str__, self.labels)))


class Family(msgspec.Struct, frozen=True):
    """All values of one metric at one moment. `fold`: how the gauges of several processes are combined."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    samples: tuple[Sample, ...] = ()
    bounds: tuple[float, ...] = ()
    fold: Literal["sum", "max"] = "sum"

    def __post_init__(self) -> None:
        """Raise ValueError if a sample does not fit."""
        labels, buckets = len(self.labels), len(self.bounds) + 1 if self.kind == "histogram" else 0
        for sample in self.samples:
            if len(sample.labels) != labels or len(sample.buckets) != buckets:
                raise ValueError(f"metric {self.name!r} has {labels} labels and {buckets} buckets; not so {sample}")


class Metric:
    """What the three kinds share: a family, and its values by labels, in the order of the label names."""

    def __init__(self, blank: Family) -> None:
        self.blank = blank
        self._values: dict[tuple[str, ...], float] = {}

    def family(self) -> Family:
        samples = tuple(Sample(labels, value) for labels, value in self._values.items())
        return msgspec.structs.replace(self.blank, samples=samples)

    def collect(self) -> list[Family]:
        return [self.family()]


class Counter(Metric):
    def add(self, labels: tuple[str, ...], amount: float = 1) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount


class Gauge(Metric):
    def set(self, labels: tuple[str, ...], value: float) -> None:
        self._values[labels] = value


class Histogram(Metric):
    """Counts observations by bucket. `observe` takes a list of them."""

    def __init__(self, blank: Family) -> None:
        super().__init__(blank)
        self._buckets: dict[tuple[str, ...], list[int]] = {}

    def observe(self, labels: tuple[str, ...], values: Sequence[float]) -> None:
        if not values:
            return
        bounds = self.blank.bounds
        buckets = self._buckets.get(labels)
        if buckets is None:
            buckets = self._buckets[labels] = [0] * (len(bounds) + 1)
        self._values[labels] = self._values.get(labels, 0.0) + sum(values)
        if max(values) <= bounds[0]:  # fast path: with fast handlers the cost of counting matters most
            buckets[0] += len(values)
        else:
            for value in values:
                buckets[bisect_left(bounds, value)] += 1

    def family(self) -> Family:
        samples = [Sample(labels, total, tuple(self._buckets[labels])) for labels, total in self._values.items()]
        return msgspec.structs.replace(self.blank, samples=tuple(samples))


Kind = TypeVar("Kind", bound=Metric)
Collector = Callable[[], Iterable[Family]]


class Registry:
    """The metrics of one application. To be used on its event loop only."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._collectors: list[Collector] = []
        self._failed: set[tuple[str, type[Exception]]] = set()  # already logged

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """Only grows. Its name in Prometheus ends in `_total`."""
        return self._one(Counter, Family(name, "counter", text, tuple(labels)))

    def gauge(self, name: str, text: str, labels: Sequence[str] = (), *, fold: Literal["sum", "max"] = "sum") -> Gauge:
        """Goes up and down. With `--workers` the values of all processes add up; with fold="max" the largest counts."""
        return self._one(Gauge, Family(name, "gauge", text, tuple(labels), fold=fold))

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), *, bounds: Sequence[float] = SECONDS
    ) -> Histogram:
        """Counts observations by size. `bounds` are the upper ends of its buckets, ascending."""
        return self._one(Histogram, Family(name, "histogram", text, tuple(labels), bounds=tuple(bounds)))

    def collect_from(self, collector: Collector) -> None:
        """Call this at every scrape. It must return at once. If it raises, that scrape leaves it out."""
        self._collectors.append(collector)

    def families(self) -> list[Family]:
        """All families, without those of a metric or collector that raises. Each type of error is logged once."""
        sources: list[tuple[str, Collector]] = [
            (f"metric {name}", each.collect) for name, each in self._metrics.items()
        ]
        sources += [(f"collector {getattr(each, '__qualname__', each)}", each) for each in self._collectors]
        return [family for name, collector in sources for family in self._collected(name, collector)]

    def _collected(self, name: str, collector: Collector) -> list[Family]:
        try:
            return list(collector())
        except Exception as error:  # code of the application
            if (name, type(error)) not in self._failed:
                self._failed.add((name, type(error)))
                log.exception("%s raised an error; it is left out of the metrics while it does", name)
            return []

    def _one(self, kind: type[Kind], blank: Family) -> Kind:
        """The metric of this name. A stage that is created twice gets the same one."""
        known = self._metrics.get(blank.name)
        if known is None:
            _check(blank)
            known = self._metrics[blank.name] = kind(blank)
        if not isinstance(known, kind) or known.blank != blank:
            raise ValueError(f"metric {blank.name!r} is already declared differently: {known.blank}")
        return known


def _check(blank: Family) -> None:
    if not _NAME.fullmatch(blank.name):
        raise ValueError(f"metric {blank.name!r}: use lower case letters, digits and _")
    if unknown := set(blank.labels) - LABELS:
        raise ValueError(f"metric {blank.name!r}: labels {sorted(unknown)}; only {sorted(LABELS)} are allowed")
    if blank.kind == "histogram" and (not blank.bounds or list(blank.bounds) != sorted(set(blank.bounds))):
        raise ValueError(f"metric {blank.name!r}: bounds {blank.bounds}; they must ascend")


def folded(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """Combines the families of several processes: counters and histograms add up, gauges by the `fold` of their family.

    If processes differ in the kind, labels or bounds of a family, the last part counts: it has the newest code."""
    blanks: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, ...], Sample]] = {}
    for family in (family for part in parts for family in part):
        known = values.setdefault(family.name, {})
        if _shape(blanks.get(family.name, family)) != _shape(family):
            known.clear()
        blanks[family.name] = family
        for sample in family.samples:
            before = known.get(sample.labels)
            known[sample.labels] = sample if before is None else _fold(family, before, sample)
    return [msgspec.structs.replace(blanks[name], samples=tuple(known.values())) for name, known in values.items()]


def _shape(family: Family) -> tuple[object, ...]:
    """Only samples of the same shape can be added up."""
    return family.kind, family.labels, family.bounds


def _fold(family: Family, one: Sample, other: Sample) -> Sample:
    if family.kind == "gauge" and family.fold == "max":
        return one if one.value >= other.value else other
    buckets = tuple(a + b for a, b in zip(one.buckets, other.buckets, strict=True))
    return Sample(one.labels, one.value + other.value, buckets)


def exposition(families: Iterable[Family], *, prefix: str = "onward") -> str:
    """The text that Prometheus reads, version 0.0.4 of its format."""
    return "".join(f"{line}\n" for family in families for line in _lines(family, f"{prefix}_{family.name}"))


def _lines(family: Family, name: str) -> Iterator[str]:
    name = f"{name}_total" if family.kind == "counter" else name
    yield f"# HELP {name} {_escaped(family.help)}"
    yield f"# TYPE {name} {family.kind}"
    for sample in family.samples:
        labels = list(zip(family.labels, sample.labels, strict=True))
        if family.kind != "histogram":
            yield f"{name}{_braces(labels)} {_number(sample.value)}"
            continue
        for bound, count in zip((*family.bounds, math.inf), accumulate(sample.buckets), strict=True):
            yield f"{name}_bucket{_braces([*labels, ('le', _number(bound))])} {count}"
        yield f"{name}_sum{_braces(labels)} {_number(sample.value)}"
        yield f"{name}_count{_braces(labels)} {sum(sample.buckets)}"


def _braces(labels: list[tuple[str, str]]) -> str:
    inner = [f'{name}="{_escaped(value, quote=True)}"' for name, value in sorted(labels)]
    return f"{{{','.join(inner)}}}" if inner else ""


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def _number(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 2**53:
        return str(value)  # a position: a float would round it
    number = float(value)
    return repr(number) if math.isfinite(number) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(number, "NaN")
