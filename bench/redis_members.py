"""Members on Redis: how long an event takes to another process, how soon the next owner works, what waiting costs."""

import asyncio

from tests.servers.redis import RedisServer

from bench.kit import Bench, Figure, child, percentile, spread
from bench.takeover import CASES, measure
from bench.wakeup import Ticks
from bench.wakeup import measure as measure_delays
from onward import Onward

PER_S = 1_000
KEYS = 100
LIMITS_MS = {"p50": (0.5, 3.0), "p99": (0.99, 15.0)}
LEAVE_S, WORKERS_S = 0.3, 3.0
IDLE_PARTITIONS = 256
IDLE_SHARE = 0.01


def run(bench: Bench, server: RedisServer) -> None:
    _delays(bench, server)
    _takeovers(bench, server)
    _idle(bench, server)


def _delays(bench: Bench, server: RedisServer) -> None:
    ticks = Ticks("ticks", events=PER_S * bench.sized(10, 2), every_s=1 / PER_S, keys=KEYS)
    bench.say(f"redis: publish to handler in another process, {ticks.events:,} events at {PER_S:,} /s")
    result, took_ms = measure_delays(bench, Onward(server.url), ticks)
    bench.judge("Redis, handled in another process", result.verdict)
    for name, (share, limit_ms) in LIMITS_MS.items():
        delay, publish = percentile(result.delays_ms, share), percentile(took_ms, share)
        bench.add(
            Figure(
                what=f"Redis, publish to handler in another process, {PER_S:,} /s, {name}",
                measured=f"{delay:.2f} ms",
                value=delay,
                beside=f"the publish call itself: {publish:.2f} ms",
                target=f"≤ {limit_ms:g} ms",
                met=delay <= limit_ms,
                samples={"delays_ms": result.delays_ms, "publish_ms": took_ms},
            )
        )


def _takeovers(bench: Bench, server: RedisServer) -> None:
    lease_s, rounds = bench.sized((10.0, 3), (2.0, 2))
    limits_s = {"process killed": 1.1 * lease_s + 1.5, "clean leave": LEAVE_S, "worker killed": WORKERS_S}
    for name, limit_s in limits_s.items():
        took_s = []
        for number in range(1, rounds + 1):
            took_s.append(asyncio.run(measure(server.url, bench.folder, CASES[name], lease_s)))
            bench.say(f"redis: {name}, round {number} of {rounds}: {took_s[-1]:.2f} s")
        bench.add(
            Figure(
                what=f"Redis, {name}: to the next event of its key, lease_s={lease_s:g}",
                measured=f"{spread(took_s, '.2f')} s",
                value=max(took_s),
                target=f"≤ {limit_s:g} s, each",
                met=max(took_s) <= limit_s,
                samples={"took_s": took_s},
            )
        )


def _idle(bench: Bench, server: RedisServer) -> None:
    idle_s = bench.sized(20.0, 4.0)
    bench.say(f"redis: {IDLE_PARTITIONS} idle partitions for {idle_s:g} s")
    ran = child(
        "bench.contestants.idle",
        bench.folder,
        url=server.url,
        topic="idle",
        partitions=IDLE_PARTITIONS,
        idle_s=idle_s,
        server=server.pid,
    )
    bench.judge("Redis, handled after the wait", ran.verdict)
    share = ran.cpu_s / ran.wall_s
    bench.add(
        Figure(
            what=f"Redis, {IDLE_PARTITIONS} idle partitions, one process",
            measured=f"{share:.2%} of a core",
            value=share,
            beside=f"the server: {ran.server_s / ran.wall_s:.2%}",
            target=f"≤ {IDLE_SHARE:.0%}",
            met=share <= IDLE_SHARE,
            samples={"share": [share], "server_share": [ran.server_s / ran.wall_s]},
        )
    )
