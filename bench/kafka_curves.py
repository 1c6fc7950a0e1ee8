"""Two curves on one real Kafka, drawn in docs/plots: throughput by events in flight, and cost by open events."""

from collections import Counter
from pathlib import Path
from typing import Any

from tests.servers.needs import Missing

from bench.cluster import KEYS, VALUE_BYTES, fill, kafka
from bench.kafka import CONFLUENT, EVENTS, ONWARD, Contestant, Track
from bench.kit import HERE, Bench, Figure, Ran, median
from bench.plot import Axis, Chart, Point, draw
from bench.workload import PARTITIONS, items

PLOTS = HERE.parent / "docs" / "plots"
IN_FLIGHT = {1: 2_000, 4: 2_000, 16: 20_000, 64: 20_000, 256: EVENTS, 1_024: EVENTS}  # with how many events
LATE_KEYS = (0, 20, 100, 200, 400, 800)
SETTING = f"Kafka, {PARTITIONS} partitions, {KEYS:,} keys in order, {VALUE_BYTES} bytes"


def run(bench: Bench) -> None:
    try:
        with kafka() as server:
            track = Track(bench, server)
            topics = {events: fill(server, f"of-{events}", events) for events in {*IN_FLIGHT.values(), EVENTS}}
            _by_in_flight(bench, track, topics)
            _by_open(bench, track, topics[EVENTS])
    except Missing as reason:
        bench.say(f"kafka_curves: skipped: {reason}")


def _by_in_flight(bench: Bench, track: Track, topics: dict[int, str]) -> None:
    lines: dict[str, list[Point]] = {name: [] for name in ((ONWARD, CONFLUENT) if track.java else (ONWARD,))}
    for number, events in IN_FLIGHT.items():
        more: dict[str, Any] = {"events": events, "concurrency": number, "wait_ms": 2}
        contestants = [track.onward(ONWARD, topics[events], **more), *track.confluent(topics[events], **more)]
        for name, ran in _middle(track, f"{number} in flight", bench.sized(3, 1), contestants).items():
            lines[name].append((number, ran.per_wall_s))
    bench.add(_figure("Kafka, 2 ms wait: /s by events in flight", lines))
    chart = Chart(
        title="Throughput by events in flight",
        note=f"{SETTING}; each event waits 2 ms",
        x=Axis("events in flight", log=True),
        y=Axis("events per second"),
        lines=lines,
    )
    draw(chart, _place(bench, "kafka-in-flight.svg"))


def _by_open(bench: Bench, track: Track, topic: str) -> None:
    """The first orders of some customers do not end. So all orders of these customers stay open while the other orders
    flow."""
    counts = Counter(key for key, _ in items(EVENTS, keys=KEYS, value_bytes=VALUE_BYTES))
    line: list[Point] = []
    for keys in LATE_KEYS:
        left = sum(counts[f"c-{number}"] for number in range(keys))
        late = {"keys": keys, "seconds": 60.0, "max_in_flight": EVENTS}
        onward = track.onward(ONWARD, topic, whole=False, events=EVENTS - left, late=late)
        ran = _middle(track, f"{left} open", bench.sized(3, 1), [onward])[ONWARD]
        line.append((left, 1e6 / ran.per_cpu_s))
    bench.add(_figure("Kafka, typed no-op: µs of CPU by open events", {ONWARD: line}))
    chart = Chart(
        title="Cost of an event by events that stay open",
        note=f"{SETTING}; typed no-op, commits included",
        x=Axis("events that are open at the end"),
        y=Axis("µs of processor time per event"),
        lines={ONWARD: line},
    )
    draw(chart, _place(bench, "kafka-open.svg"))


def _middle(track: Track, what: str, rounds: int, contestants: list[Contestant]) -> dict[str, Ran]:
    """For each contestant, the run with the median rate per processor second."""
    found = track.race(what, rounds, contestants)
    return {name: sorted(runs, key=lambda ran: ran.per_cpu_s)[len(runs) // 2] for name, runs in found.items()}


def _figure(what: str, lines: dict[str, list[Point]]) -> Figure:
    axes = {"x": 0, "y": 1}
    text = [
        f"{name}: " + ", ".join(f"{x:,.0f}: {y:,.{0 if y >= 100 else 1}f}" for x, y in line)
        for name, line in lines.items()
    ]
    return Figure(
        what=what,
        measured=text[0],
        value=median([y for _, y in lines[ONWARD]]),
        beside="; ".join(text[1:]),
        samples={f"{name}_{x}": [point[at] for point in lines[name]] for name in lines for x, at in axes.items()},
    )


def _place(bench: Bench, name: str) -> Path:
    """A quick run does not replace the plots of the docs."""
    return (HERE / "results" if bench.quick else PLOTS) / name
