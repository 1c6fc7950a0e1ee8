"""The pure parts alone, in processor time per event: the control plane, the tracker, an Event."""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from bench.kit import Bench, Figure, median, spread
from bench.workload import PARTITIONS, batches, value
from onward import Event
from onward.brokers.base import Assigned
from onward.event import Delivery, Partition, new_id
from onward.flow.entry import DONE, Entry
from onward.flow.plane import ControlPlane, Limits
from onward.flow.tracker import Tracker

KEYS = 1_000
RECEIVED = 1_000  # events that one receive brings
PER_SECOND = 40_000  # the pace of the plane's clock: how much is done between two settles
TRACKED = 50_000
PARTS = [Partition("orders", index) for index in range(PARTITIONS)]


def run(bench: Bench) -> None:
    repeats = bench.sized(5, 3)
    zipf = [1 / rank for rank in range(1, KEYS + 1)]
    _plane(bench, "by Zipf", zipf, repeats)
    _plane(bench, "evenly", [1.0] * KEYS, repeats)
    bench.say("micro: tracker and Event")
    _simple(bench, f"tracker, complete and watermark, {TRACKED:,} open", [_tracker_us() for _ in range(repeats)])
    _simple(bench, "building an Event", [_event_us() for _ in range(repeats)], limit_us=0.3)


def _plane(bench: Bench, how: str, weights: list[float], repeats: int) -> None:
    bench.say(f"micro: control plane, keys {how}")
    total = bench.sized(100_000, 20_000)
    deliveries = list(_deliveries(total, weights))
    few: list[float] = []
    many: list[float] = []
    for _ in range(repeats):
        few.append(_plane_us(bench, deliveries, RECEIVED))
        many.append(_plane_us(bench, deliveries, total))
    bench.add(
        Figure(
            what=f"control plane, {KEYS:,} keys {how}, {total:,} open",
            measured=f"{spread(many, '.2f')} µs CPU",
            value=median(many),
            beside=f"{RECEIVED:,} open: {spread(few, '.2f')} µs CPU",
            ratio=median(many) / median(few),
            samples={"few_us": few, "many_us": many},
        )
    )


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


def _plane_us(bench: Bench, deliveries: list[Delivery], at_once: int) -> float:
    """Deliver so many events at once and work them off, until all are done."""
    plane = ControlPlane(
        Limits(
            group="bench",
            ordering="key",
            concurrency=1_000,
            max_in_flight=len(deliveries),
            max_in_flight_bytes=1 << 40,
            settle_interval_s=0.05,
        )
    )
    for partition in PARTS:
        plane.assigned(Assigned(partition, 1, 1, "log", None, False))
    received = list(batches(batches(deliveries, RECEIVED), at_once // RECEIVED))
    taken = 0
    start = time.process_time()
    for group in received:
        for batch in group:
            plane.delivered(batch)
            taken += len(batch)
        _work_off(plane, taken)
    took_us = (time.process_time() - start) / len(deliveries) * 1e6
    bench.check("the plane alone", plane.counts.done == len(deliveries) and not plane.open, str(plane.counts))
    return took_us


def _work_off(plane: ControlPlane, until: int) -> None:
    while plane.counts.done < until:
        now = plane.counts.done / PER_SECOND
        actions = plane.tick(now, math.inf)
        if actions.settle is not None:
            plane.settled([], now)
        if not actions.work:
            raise RuntimeError(f"the plane holds {plane.open:,} open events and starts none of them")
        plane.completed([(delivery, DONE) for delivery in actions.work], now)


def _deliveries(count: int, weights: list[float]) -> Iterator[Delivery]:
    """As a broker brings them: a thousand at a time, partition by partition."""
    draw = random.Random(7)
    positions = dict.fromkeys(PARTS, 0)
    for batch in batches(draw.choices(range(KEYS), weights, k=count), RECEIVED):
        runs: dict[Partition, list[int]] = defaultdict(list)
        for key in batch:
            runs[PARTS[key % PARTITIONS]].append(key)
        for partition, keys in runs.items():
            for key in keys:
                event = Event(new_id(), "orders", f"c-{key}", value(f"c-{key}", positions[partition]))
                yield Delivery(event, partition, positions[partition], 1)
                positions[partition] += 1


def _tracker_us() -> float:
    """Take one, complete any, ask for the watermark."""
    draw = random.Random(7)
    tracker = Tracker(None)
    entry = Entry(Delivery(Event("id", "orders", None, None), PARTS[0], 0, 1), 0)
    order = list(range(2 * TRACKED))
    for position in range(TRACKED):
        tracker.add(position, entry)
    picks = _shuffled_window(order, TRACKED, draw)
    start = time.process_time()
    for step, position in enumerate(picks):
        tracker.add(TRACKED + step, entry)
        tracker.done(position)
        assert tracker.watermark <= TRACKED + step + 1
    return (time.process_time() - start) / len(picks) * 1e6


def _shuffled_window(order: list[int], window: int, draw: random.Random) -> list[int]:
    """Positions in a random order in which each comes no sooner than it is open."""
    pool, picks = order[:window], []
    for following in order[window:]:
        at = draw.randrange(window)
        picks.append(pool[at])
        pool[at] = following
    return picks


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
