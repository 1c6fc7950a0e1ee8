"""Onward on one real Redis, in turn with a bare loop, one acknowledgement per event, FastStream and taskiq-redis.

4 partitions, 1,000 keys, 200 bytes, an append-only file synced every second. The time runs from a contestant's first
event to its last. Every run is checked: no event is missing, each key is in order, and every event is acknowledged.
"""

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from tests.servers.needs import Missing
from tests.servers.redis import RedisServer

from bench import redis_members, redis_publish, redis_reclaim
from bench.kit import Bench, Figure, Ran, child, median, ratios, server_cpu_s, spread
from bench.redis_server import (
    KEYS,
    PARTITIONS,
    VALUE_BYTES,
    fill,
    fill_faststream,
    fill_plain,
    fill_taskiq,
    pending,
    redis,
    unsettled,
)

SMALL = 10_000
ONWARD, BARE, ONE_BY_ONE = "Onward", "bare XREADGROUP 1000 + XACK 1000 loop", "XREADGROUP 100, one XACK per event"
FASTSTREAM, TASKIQ = "FastStream", "taskiq-redis"
TARGETS = {BARE: 0.4, FASTSTREAM: 15.0, TASKIQ: 8.0, ONE_BY_ONE: 6.0}
Runs = Mapping[str, list[Ran]]


class Contestant(msgspec.Struct, frozen=True):
    name: str
    run: Callable[[str], Ran]  # with the name of its group
    unfinished: Callable[[str], object]  # what the group has not acknowledged at the server
    ordered: bool = True


def run(bench: Bench) -> None:
    try:
        with redis() as server:
            track = Track(bench, server)
            _consume(track)
            _memory(track)
            redis_publish.run(bench, server)
            redis_members.run(bench, server)
            redis_reclaim.run(bench, server)
    except Missing as reason:
        bench.say(f"redis: skipped: {reason}")


class Track:
    """Runs contestants in turn on one server."""

    def __init__(self, bench: Bench, server: RedisServer) -> None:
        self.bench = bench
        self.server = server

    def race(self, rounds: int, contestants: Sequence[Contestant]) -> Runs:
        found: dict[str, list[Ran]] = {contestant.name: [] for contestant in contestants}
        for number in range(rounds):
            for contestant in contestants:
                group = re.sub(r"\W+", "-", f"{contestant.name}-{number}")
                found[contestant.name].append(self.turn(contestant, group))
        return found

    def turn(self, contestant: Contestant, group: str) -> Ran:
        before = server_cpu_s(self.server.pid)
        ran = contestant.run(group)
        ran = msgspec.structs.replace(ran, server_s=server_cpu_s(self.server.pid) - before)
        costs = f"{_us(ran.cpu_s, ran):.1f} + {_us(ran.server_s, ran):.2f} µs CPU (process + server)"
        self.bench.say(
            f"redis: {contestant.name}: {ran.per_wall_s:,.0f} /s, {costs}, {ran.peak_kb / 1024:.0f} MB; "
            f"load {os.getloadavg()[0]:.1f}"
        )
        self.bench.judge(f"Redis, consumed by {contestant.name}", ran.verdict, ordered=contestant.ordered)
        left = contestant.unfinished(group)
        self.bench.check(f"Redis, acknowledged by {contestant.name}", not left, f"not acknowledged: {left or 'none'}")
        return ran

    def onward(self, topic: str, events: int) -> Contestant:
        return Contestant(
            ONWARD,
            lambda group: self._child("server_app", topic=topic, group=group, events=events),
            lambda group: asyncio.run(unsettled(self.server, topic, group)),
        )

    def peer(self, name: str, module: str, streams: list[str], events: int, *, ordered: bool = True) -> Contestant:
        return Contestant(
            name,
            lambda group: self._child(module, streams=streams, group=group, events=events),
            lambda group: pending(self.server, streams, group),
            ordered,
        )

    def _child(self, module: str, **arguments: Any) -> Ran:
        return child(f"bench.contestants.{module}", self.bench.folder, url=self.server.url, **arguments)


# -- a backlog through a typed handler that does nothing -----------------------------------------------------------


def _consume(track: Track) -> None:
    bench = track.bench
    events, few = bench.sized((100_000, 20_000), (20_000, 4_000))
    bench.say(f"redis: {PARTITIONS} partitions, {KEYS:,} keys, {VALUE_BYTES} bytes, {events:,} events")
    runs = track.race(bench.sized(5, 3), contestants(track, events, few))
    for name, least in TARGETS.items():
        bench.add(_against(runs[ONWARD], name, runs[name], least))
    bench.add(_server_cpu(runs[ONWARD], runs[BARE]))


def contestants(track: Track, events: int, few: int) -> list[Contestant]:
    """All of them, with their events in the server. `few` events are for those that would take minutes."""
    server = track.server
    return [
        track.onward(fill(server, "orders", events), events),
        track.peer(BARE, "redis_bare", fill_plain(server, "plain", events), events),
        track.peer(ONE_BY_ONE, "redis_one_by_one", fill_plain(server, "few", few), few),
        track.peer(FASTSTREAM, "redis_faststream", fill_faststream(server, "faststream", few), few),
        track.peer(TASKIQ, "redis_taskiq", fill_taskiq(server, "taskiq", few), few, ordered=False),
    ]


def _us(seconds: float, ran: Ran) -> float:
    return seconds / ran.verdict.handled * 1e6


def _per_cpu_s(ran: Ran) -> float:
    """Events per processor second of process and server together. A loop that waits for each reply is never faster."""
    return ran.verdict.handled / (ran.cpu_s + ran.server_s)


def _against(ours: list[Ran], name: str, theirs: list[Ran], least: float) -> Figure:
    mine, other = [ran.per_wall_s for ran in ours], [ran.per_wall_s for ran in theirs]
    ratio = ratios(mine, other)
    cost, their_cost = [_per_cpu_s(ran) for ran in ours], [_per_cpu_s(ran) for ran in theirs]
    inverted = max(ran.verdict.inverted for ran in theirs)
    return Figure(
        what="Redis, typed no-op, key order",
        measured=f"{spread(mine)} /s",
        value=median(mine),
        beside=f"{name}: {spread(other)} /s{f', {inverted} inverted' if inverted else ''}; "
        f"per CPU second of process and server {ratios(cost, their_cost):.2f}x",
        ratio=ratio,
        target=f"≥ {least:g}x",
        met=ratio >= least,
        samples={
            "onward": mine,
            name: other,
            "onward_per_cpu_s": cost,
            f"{name}_per_cpu_s": their_cost,
            "onward_process_us": [_us(ran.cpu_s, ran) for ran in ours],
            f"{name}_process_us": [_us(ran.cpu_s, ran) for ran in theirs],
        },
    )


def _server_cpu(ours: list[Ran], bare: list[Ran]) -> Figure:
    mine, other = [_us(ran.server_s, ran) for ran in ours], [_us(ran.server_s, ran) for ran in bare]
    ratio = ratios(mine, other)
    return Figure(
        what="Redis, CPU of the server per event consumed",
        measured=f"{spread(mine, '.2f')} µs",
        value=median(mine),
        beside=f"{BARE}: {spread(other, '.2f')} µs",
        ratio=ratio,
        target="≤ 0.5x",
        met=ratio <= 0.5,
        samples={"onward_us": mine, "bare_us": other},
    )


# -- memory --------------------------------------------------------------------------------------------------------


def _memory(track: Track) -> None:
    bench = track.bench
    large = bench.sized(1_000_000, 100_000)
    few_waiting = track.onward(fill(track.server, "small", SMALL), SMALL)
    many_waiting = track.onward(fill(track.server, "large", large), large)
    small_mb = [track.turn(few_waiting, f"memory-{number}").peak_kb / 1024 for number in range(bench.sized(5, 3))]
    large_mb = track.turn(many_waiting, "memory").peak_kb / 1024
    ratio = large_mb / median(small_mb)
    bench.add(
        Figure(
            what=f"Redis, peak memory, {large:,} events waiting",
            measured=f"{large_mb:.1f} MB",
            value=large_mb,
            beside=f"{SMALL:,} waiting: {spread(small_mb, '.1f')} MB",
            ratio=ratio,
            target="≤ 1.1x",
            met=ratio <= 1.1,
            samples={"large_mb": [large_mb], "small_mb": small_mb},
        )
    )
