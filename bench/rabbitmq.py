"""Onward on one real RabbitMQ, in turn with hand-written frames, FastStream, Dramatiq, Celery and taskiq-aio-pika.

1,000 keys, 200 bytes. Work queues are quorum queues; with key order the events are in 8 streams. The time runs from a
contestant's first event to its last. Every run is checked: no event is missing, with order each key is in order, and
every event is acknowledged.
"""

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from tests.servers.needs import Missing

from bench import rabbitmq_members, rabbitmq_publish
from bench.contestants import rabbitmq_celery, rabbitmq_dramatiq, rabbitmq_faststream, rabbitmq_taskiq
from bench.kit import Bench, Figure, Ran, child, median, ratios, server_cpu_s, spread
from bench.rabbitmq_server import (
    KEYS,
    VALUE_BYTES,
    Target,
    delete,
    drop,
    fill,
    fill_group,
    fill_plain,
    left_in,
    orders,
    quieten,
    rabbitmq,
    streams,
    unsettled,
)
from bench.workload import PARTITIONS
from onward.brokers.base import Ordering
from onward.brokers.rabbitmq import names

WORK, ORDERED = "RabbitMQ, work queue, typed no-op", "RabbitMQ, key order, typed no-op"
ONWARD, BARE = "Onward", "hand-written frames, one ack for 500"
FASTSTREAM, DRAMATIQ, CELERY, TASKIQ = "FastStream", "Dramatiq", "Celery", "taskiq-aio-pika"
PEERS = {
    FASTSTREAM: rabbitmq_faststream,
    DRAMATIQ: rabbitmq_dramatiq,
    CELERY: rabbitmq_celery,
    TASKIQ: rabbitmq_taskiq,
}
TARGETS: Mapping[str, float | None] = {BARE: 0.5, FASTSTREAM: 5.0, DRAMATIQ: None, CELERY: None, TASKIQ: None}
FEW_WAITING = 1_000
MOST_MEMORY = 1.2
Runs = Mapping[str, list[Ran]]


class Contestant(msgspec.Struct, frozen=True):
    """Each function gets the name of the turn."""

    name: str
    prepare: Callable[[str], object]
    run: Callable[[str], Ran]
    unfinished: Callable[[str], object]  # what is not acknowledged at the server
    clean: Callable[[str], object]
    ordered: bool = False


def run(bench: Bench) -> None:
    try:
        with rabbitmq() as server:
            track = Track(bench, server)
            _work(track)
            _ordered(track)
            _memory(track)
            rabbitmq_publish.run(bench, server)
            rabbitmq_members.run(bench, server)
    except Missing as reason:
        bench.say(f"rabbitmq: skipped: {reason}")


class Track:
    """Runs contestants in turn on one server."""

    def __init__(self, bench: Bench, server: Target) -> None:
        self.bench = bench
        self.server = server

    def race(self, rounds: int, contestants: Sequence[Contestant]) -> Runs:
        found: dict[str, list[Ran]] = {contestant.name: [] for contestant in contestants}
        for number in range(rounds):
            for contestant in contestants:
                turn = re.sub(r"\W+", "-", f"{contestant.name}-{number}")
                found[contestant.name].append(self.turn(contestant, turn))
        return found

    def turn(self, contestant: Contestant, turn: str) -> Ran:
        contestant.prepare(turn)
        quieten(self.server)
        before = server_cpu_s(self.server.pid)
        ran = contestant.run(turn)
        ran = msgspec.structs.replace(ran, server_s=server_cpu_s(self.server.pid) - before)
        costs = f"{_us(ran.cpu_s, ran):.1f} + {_us(ran.server_s, ran):.1f} µs CPU (process + server)"
        self.bench.say(
            f"rabbitmq: {contestant.name}: {ran.per_wall_s:,.0f} /s, {costs}, {ran.peak_kb / 1024:.0f} MB; "
            f"load {os.getloadavg()[0]:.1f}"
        )
        self.bench.judge(f"RabbitMQ, consumed by {contestant.name}", ran.verdict, ordered=contestant.ordered)
        left = contestant.unfinished(turn)
        self.bench.check(
            f"RabbitMQ, acknowledged by {contestant.name}", not left, f"not acknowledged: {left or 'none'}"
        )
        contestant.clean(turn)
        return ran

    def work(self, events: int) -> Contestant:
        """Onward on a work queue. Each turn has a topic and a group of its own, because a queue is empty afterwards."""
        return Contestant(
            ONWARD,
            lambda turn: fill_group(self.server, turn, turn, events),
            lambda turn: self._onward(turn, turn, events, "none"),
            lambda turn: left_in(self.server, names.work_queue(turn, turn)),
            lambda turn: drop(self.server, turn),
        )

    def bare(self, events: int) -> Contestant:
        return Contestant(
            BARE,
            lambda turn: fill_plain(self.server, turn, events),
            lambda turn: self.child("rabbitmq_bare", queues=[turn], events=events),
            lambda turn: left_in(self.server, turn),
            lambda turn: delete(self.server, turn),
        )

    def peer(self, name: str, events: int) -> Contestant:
        module = PEERS[name]
        return Contestant(
            name,
            lambda turn: module.fill(self.server.url, turn, orders(events)),
            lambda turn: self.child(module.__name__.rpartition(".")[2], queue=turn, events=events),
            lambda turn: left_in(self.server, turn),
            lambda turn: delete(self.server, turn),
        )

    def in_order(self, topic: str, events: int) -> Contestant:
        """Onward with key order. Each turn has a group of its own in the same topic."""
        return Contestant(
            ONWARD,
            _nothing,
            lambda turn: self._onward(topic, turn, events, "key"),
            lambda turn: asyncio.run(unsettled(self.server, topic, turn)),
            _nothing,
            ordered=True,
        )

    def bare_streams(self, topic: str, events: int) -> Contestant:
        return Contestant(
            BARE,
            _nothing,
            lambda _: self.child("rabbitmq_bare", queues=streams(topic), events=events, offset="first"),
            _nothing,  # a stream has no progress at the server
            _nothing,
            ordered=True,
        )

    def _onward(self, topic: str, group: str, events: int, ordering: Ordering) -> Ran:
        return self.child("server_app", topic=topic, group=group, events=events, ordering=ordering)

    def child(self, module: str, **arguments: Any) -> Ran:
        return child(f"bench.contestants.{module}", self.bench.folder, url=self.server.url, **arguments)


def _nothing(_: str) -> None:
    pass


# -- a backlog through a typed handler that does nothing -----------------------------------------------------------


def _work(track: Track) -> None:
    bench = track.bench
    events, few = bench.sized((100_000, 10_000), (10_000, 2_000))
    bench.say(f"rabbitmq: work queues, {KEYS:,} keys, {VALUE_BYTES} bytes, {events:,} events")
    runs = track.race(bench.sized(5, 2), work_contestants(track, events, few))
    for name, least in TARGETS.items():
        bench.add(_against(WORK, runs[ONWARD], name, runs[name], least))
    bench.add(_server_cpu(WORK, runs))


def work_contestants(track: Track, events: int, few: int) -> list[Contestant]:
    """`few` events are for those that would take minutes."""
    return [track.work(events), track.bare(events), *[track.peer(name, few) for name in PEERS]]


def _ordered(track: Track) -> None:
    bench = track.bench
    events = bench.sized(100_000, 10_000)
    bench.say(f"rabbitmq: key order, {PARTITIONS} partitions, {events:,} events")
    runs = track.race(bench.sized(5, 2), ordered_contestants(track, events))
    bench.add(_against(ORDERED, runs[ONWARD], BARE, runs[BARE], 0.5))
    bench.add(_server_cpu(ORDERED, runs))


def ordered_contestants(track: Track, events: int) -> list[Contestant]:
    """Both read the same streams."""
    topic = fill(track.server, "orders", events)
    return [track.in_order(topic, events), track.bare_streams(topic, events)]


def _us(seconds: float, ran: Ran) -> float:
    return seconds / ran.verdict.handled * 1e6


def _per_cpu_s(ran: Ran) -> float:
    """Events per processor second of process and server together."""
    return ran.verdict.handled / (ran.cpu_s + ran.server_s)


def _against(what: str, ours: list[Ran], name: str, theirs: list[Ran], least: float | None) -> Figure:
    mine, other = [ran.per_wall_s for ran in ours], [ran.per_wall_s for ran in theirs]
    ratio = ratios(mine, other)
    cost, their_cost = [_per_cpu_s(ran) for ran in ours], [_per_cpu_s(ran) for ran in theirs]
    return Figure(
        what=what,
        measured=f"{spread(mine)} /s",
        value=median(mine),
        beside=f"{name}: {spread(other)} /s; per CPU second of process and server {ratios(cost, their_cost):.2f}x",
        ratio=ratio,
        target="" if least is None else f"≥ {least:g}x",
        met=None if least is None else ratio >= least,
        samples={
            "onward": mine,
            name: other,
            "onward_per_cpu_s": cost,
            f"{name}_per_cpu_s": their_cost,
            "onward_process_us": [_us(ran.cpu_s, ran) for ran in ours],
            f"{name}_process_us": [_us(ran.cpu_s, ran) for ran in theirs],
        },
    )


def _server_cpu(what: str, runs: Runs) -> Figure:
    costs = {name: [_us(ran.server_s, ran) for ran in rans] for name, rans in runs.items()}
    others = [f"{name}: {spread(us, '.1f')} µs" for name, us in costs.items() if name != ONWARD]
    return Figure(
        what=f"{what}: CPU of the server per event",
        measured=f"{spread(costs[ONWARD], '.1f')} µs",
        value=median(costs[ONWARD]),
        beside="; ".join(others),
        samples={f"{name}_us": us for name, us in costs.items()},
    )


# -- memory --------------------------------------------------------------------------------------------------------


def _memory(track: Track) -> None:
    bench = track.bench
    large = bench.sized(100_000, 10_000)
    few, many = track.work(FEW_WAITING), track.work(large)
    small_mb = [track.turn(few, f"few-{number}").peak_kb / 1024 for number in range(bench.sized(5, 2))]
    large_mb = [track.turn(many, f"many-{number}").peak_kb / 1024 for number in range(bench.sized(3, 1))]
    ratio = median(large_mb) / median(small_mb)
    bench.add(
        Figure(
            what=f"RabbitMQ, work queue, peak memory, {large:,} events ready",
            measured=f"{spread(large_mb, '.1f')} MB",
            value=median(large_mb),
            beside=f"{FEW_WAITING:,} ready: {spread(small_mb, '.1f')} MB",
            ratio=ratio,
            target=f"≤ {MOST_MEMORY}x",
            met=ratio <= MOST_MEMORY,
            samples={"large_mb": large_mb, "small_mb": small_mb},
        )
    )
