"""The pure parts alone, in processor time per event: the control plane, the tracker, an Event."""

import math
import random
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from sortedcontainers import SortedSet

from bench.kit import Bench, Figure, median, spread
from bench.workload import PARTITIONS, batches, value
from onward import Event
from onward.brokers.base import Assigned
from onward.event import Delivery, Partition, new_id
from onward.flow.entry import DONE, Entry, Instant
from onward.flow.limits import Limits
from onward.flow.plane import ControlPlane
from onward.flow.tracker import Tracker

KEYS = 1_000
RECEIVED = 1_000  # in flight
COMPLETED = 200  # completions that are reported at once
PER_SECOND = 40_000  # how many events are done per second of the plane's clock, so how many between two settles
TRACKED = 50_000
PARTS = [Partition("orders", index) for index in range(PARTITIONS)]


def run(bench: Bench) -> None:
    repeats = bench.sized(5, 3)
    _planes(bench, repeats)
    bench.say("micro: tracker and Event")
    _trackers(bench, repeats)
    _simple(bench, "building an Event", [_event_us() for _ in range(repeats)], limit_us=0.3)


def _planes(bench: Bench, repeats: int) -> None:
    """Keys by Zipf's law: the hottest of 1,000 keys has an eighth of all events, which are handled one by one."""
    total = bench.sized(100_000, 20_000)
    crowd = bench.sized(100_000, 20_000)
    zipf = [1 / rank for rank in range(1, KEYS + 1)]
    draw = random.Random(7)
    skewed = list(_deliveries(draw.choices(range(KEYS), zipf, k=total + crowd)))
    distinct = list(_deliveries(range(total + RECEIVED)))
    few: list[float] = []
    many: list[float] = []
    fresh: list[float] = []
    for turn in range(repeats):
        bench.say(f"micro: control plane, round {turn + 1} of {repeats}")
        few.append(_plane_us(bench, skewed[: total + RECEIVED], RECEIVED))
        many.append(_plane_us(bench, skewed, crowd))
        fresh.append(_plane_us(bench, distinct, RECEIVED))
    _simple(bench, f"control plane, {KEYS:,} Zipf keys, {RECEIVED:,} in flight", few, limit_us=4.0)
    for what, found in ((f"with {crowd:,} in flight", many), (f"with {total:,} distinct keys", fresh)):
        ratio = median(found) / median(few)
        bench.add(
            Figure(
                what=f"control plane, the same {what}",
                measured=f"{spread(found, '.2f')} µs CPU",
                value=median(found),
                beside=f"{spread(few, '.2f')} µs CPU",
                ratio=ratio,
                target="≤ 1.3x",
                met=ratio <= 1.3,
                samples={"us": found},
            )
        )
    _memory(bench, skewed[:crowd])


def _memory(bench: Bench, deliveries: list[Delivery]) -> None:
    """The memory that the plane adds to an open event, without the event itself."""
    tracemalloc.start()
    plane = _open_plane(len(deliveries))
    before = tracemalloc.get_traced_memory()[0]
    plane.delivered(deliveries, Instant(0.0, 0.0))
    each = (tracemalloc.get_traced_memory()[0] - before) / len(deliveries)
    tracemalloc.stop()
    bench.add(Figure(what="control plane, memory per open event", measured=f"{each:.0f} bytes", value=each))


def _simple(bench: Bench, what: str, found: list[float], limit_us: float | None = None) -> None:
    bench.add(
        Figure(
            what=what,
            measured=f"{spread(found, '.2f')} µs CPU",
            value=median(found),
            target="" if limit_us is None else f"≤ {limit_us} µs",
            met=None if limit_us is None else median(found) <= limit_us,
            samples={"us": found},
        )
    )


def _open_plane(limit: int) -> ControlPlane:
    limits = Limits(group="bench", concurrency=1_000, max_in_flight=4 * limit, max_in_flight_bytes=1 << 40)
    plane = ControlPlane(limits)
    start = Instant(0.0, 0.0)
    for partition in PARTS:
        plane.assigned(Assigned(partition, 1, 1, "log", None, False))
    for load in plane.tick(start, math.inf).load:
        plane.loaded(load, [], start)
    return plane


def _plane_us(bench: Bench, deliveries: list[Delivery], in_flight: int) -> float:
    """Keep `in_flight` events in flight: deliver as many as were completed, until the last is delivered."""
    plane = _open_plane(len(deliveries))
    plane.delivered(deliveries[:in_flight], Instant(0.0, 0.0))
    fed = in_flight
    work: list[Delivery] = []
    start = time.process_time()
    while fed < len(deliveries):
        at = Instant(plane.counts.done / PER_SECOND, 0.0)
        actions = plane.tick(at, math.inf)
        if actions.settle is not None:
            plane.settled([], at)
        work += cast("Sequence[Delivery]", actions.work)
        done, work = work[:COMPLETED], work[COMPLETED:]
        plane.completed([(delivery, DONE) for delivery in done], at)
        plane.delivered(deliveries[fed : fed + len(done)], at)
        fed = min(fed + len(done), len(deliveries))
    took_us = (time.process_time() - start) / plane.counts.done * 1e6
    counted = plane.counts.delivered == fed and plane.counts.done + plane.open == fed
    bench.check("the plane alone", counted, f"{plane.counts}, open {plane.open}")
    return took_us


def _deliveries(keys: Iterable[int]) -> Iterator[Delivery]:
    """Deliveries as a broker returns them: in batches, partition by partition."""
    positions = dict.fromkeys(PARTS, 0)
    for batch in batches(list(keys), COMPLETED):
        runs: dict[Partition, list[int]] = defaultdict(list)
        for key in batch:
            runs[PARTS[key % PARTITIONS]].append(key)
        for partition, mine in runs.items():
            for key in mine:
                event = Event("id", "orders", f"c-{key}", b"x" * 100)
                yield Delivery(event, partition, positions[partition], 1)
                positions[partition] += 1


def _trackers(bench: Bench, repeats: int) -> None:
    ours = [_tracker_us(_Ours()) for _ in range(repeats)]
    seed = [_tracker_us(_Sorted()) for _ in range(repeats)]
    bench.add(
        Figure(
            what=f"tracker, complete and watermark, {TRACKED:,} open",
            measured=f"{spread(ours, '.2f')} µs CPU",
            value=median(ours),
            beside=f"SortedSet of completed: {spread(seed, '.2f')} µs CPU",
            ratio=median(ours) / median(seed),
            target="≤ 0.5 µs",
            met=median(ours) <= 0.5,
            samples={"us": ours, "sorted_us": seed},
        )
    )


class _Ours:
    def __init__(self) -> None:
        self._tracker = Tracker(None)
        event = Event("id", "orders", None, None)
        for position in range(TRACKED):
            self._tracker.add(position, Entry(Delivery(event, PARTS[0], position, 1), 0))

    def complete(self, position: int) -> int:
        self._tracker.done(position)
        return self._tracker.watermark


class _Sorted:
    """The obvious design: a sorted set of completed positions, and a mark that moves while the next one is in it."""

    def __init__(self) -> None:
        self._done: SortedSet = SortedSet()
        self._mark = 0

    def complete(self, position: int) -> int:
        self._done.add(position)
        while self._done and self._done[0] == self._mark:
            self._done.pop(0)
            self._mark += 1
        return self._mark


def _tracker_us(tracker: _Ours | _Sorted) -> float:
    """Complete positions in an order that is random within a window, as handlers of different lengths do."""
    draw = random.Random(7)
    order = list(range(TRACKED))
    for at in range(0, TRACKED, 1_000):
        part = order[at : at + 1_000]
        draw.shuffle(part)
        order[at : at + 1_000] = part
    start = time.process_time()
    for position in order:
        tracker.complete(position)
    return (time.process_time() - start) / TRACKED * 1e6


def _event_us() -> float:
    number, data = new_id(), value("c-1", 1)
    return _per_call_us(lambda: Event(number, "orders", "c-1", data, {}, "Order", 1.0), 200_000)


def _per_call_us(call: Callable[[], object], times: int) -> float:
    repeat = range(times)
    start = time.process_time()
    for _ in repeat:
        pass
    empty = time.process_time() - start
    start = time.process_time()
    for _ in repeat:
        call()
    return (time.process_time() - start - empty) / times * 1e6
