"""Members on RabbitMQ: how long an event takes to another process, and how soon the next owner works."""

import asyncio

from bench.kit import Bench, Figure, percentile, spread
from bench.rabbitmq_server import Target
from bench.takeover import CASES, measure
from bench.wakeup import Ticks
from bench.wakeup import measure as measure_delays
from onward import Onward
from onward.brokers.base import Ordering

PER_S = 500
KEYS = 100
KINDS: dict[Ordering, str] = {"none": "work queue", "key": "key order"}
LIMITS_MS: dict[str, tuple[float, float | None]] = {"p50": (0.5, 10.0), "p99": (0.99, None)}
LEAVE_S = 0.5


def run(bench: Bench, server: Target) -> None:
    for ordering in KINDS:
        _delays(bench, server, ordering)
    _takeovers(bench, server)


def _delays(bench: Bench, server: Target, ordering: Ordering) -> None:
    kind = KINDS[ordering]
    events = PER_S * bench.sized(10, 2)
    ticks = Ticks(f"ticks-{ordering}", events, every_s=1 / PER_S, keys=KEYS, ordering=ordering)
    bench.say(f"rabbitmq: {kind}, publish to handler in another process, {events:,} events at {PER_S:,} /s")
    result, took_ms = measure_delays(bench, Onward(server.url), ticks)
    bench.judge(f"RabbitMQ, {kind}, handled in another process", result.verdict, ordered=ordering == "key")
    for name, (share, limit_ms) in LIMITS_MS.items():
        delay, publish = percentile(result.delays_ms, share), percentile(took_ms, share)
        bench.add(
            Figure(
                what=f"RabbitMQ, {kind}, publish to handler in another process, {PER_S:,} /s, {name}",
                measured=f"{delay:.2f} ms",
                value=delay,
                beside=f"the publish call itself: {publish:.2f} ms",
                target="" if limit_ms is None else f"≤ {limit_ms:g} ms",
                met=None if limit_ms is None else delay <= limit_ms,
                samples={"delays_ms": result.delays_ms, "publish_ms": took_ms},
            )
        )


def _takeovers(bench: Bench, server: Target) -> None:
    lease_s, rounds = bench.sized((15.0, 3), (3.0, 1))
    limits_s: dict[str, float | None] = {"process killed": lease_s + 3, "clean leave": LEAVE_S, "worker killed": None}
    for name, limit_s in limits_s.items():
        took_s = []
        for number in range(1, rounds + 1):
            took_s.append(asyncio.run(measure(server.url, bench.folder, CASES[name], lease_s)))
            bench.say(f"rabbitmq: {name}, round {number} of {rounds}: {took_s[-1]:.2f} s")
        bench.add(
            Figure(
                what=f"RabbitMQ, {name}: to the next event of its key, lease_s={lease_s:g}",
                measured=f"{spread(took_s, '.2f')} s",
                value=max(took_s),
                target="" if limit_s is None else f"≤ {limit_s:g} s, each",
                met=None if limit_s is None else max(took_s) <= limit_s,
                samples={"took_s": took_s},
            )
        )
