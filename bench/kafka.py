"""Onward on one real Kafka, in turn with a bare loop, Confluent's Parallel Consumer, FastStream and pyrallel-consumer.

8 partitions, 2,000 keys, 200 bytes. The time runs from a contestant's first event to its last, so it includes warming
up while events flow. Every run is checked: no event is missing, and each key is in order.
"""

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from tests.servers.kafka import KafkaServer
from tests.servers.needs import Missing

from bench.cluster import KEYS, VALUE_BYTES, fill, fill_by_onward, kafka, settled
from bench.contestants import confluent, pyrallel
from bench.kit import Bench, Figure, Ran, child, median, ratios, spread
from bench.workload import PARTITIONS, items, loops_for

EVENTS = 100_000
MILLION = 1_000_000
FEW = 10_000  # for contestants that would take minutes
COMPUTED = 3_000
WORKERS = 2
ONWARD, BARE, CONFLUENT = "Onward", "bare consume(1000) loop", "Confluent Parallel Consumer"
FASTSTREAM, IN_LISTS, PYRALLEL = "FastStream", "FastStream, lists of 1,000", "pyrallel-consumer"
HEADED = "Onward, events that it published, with its headers"
ALONE, PROCESSES = "one process", "processes"
Runs = Mapping[str, list[Ran]]


class Contestant(msgspec.Struct, frozen=True):
    name: str
    run: Callable[[str], Ran]  # with the name of its group
    settles: str | None = None  # the topic, if all its events must be settled at the broker afterwards


def run(bench: Bench) -> None:
    try:
        with kafka() as server:
            _measure(bench, Track(bench, server))
    except Missing as reason:
        bench.say(f"kafka: skipped: {reason}")


def _measure(bench: Bench, track: "Track") -> None:
    bench.say(f"kafka: {PARTITIONS} partitions, {KEYS:,} keys, {VALUE_BYTES} bytes, {EVENTS:,} events")
    topic = fill(track.server, "orders", EVENTS)
    rounds = bench.sized(3, 1)
    no_op = track.race("no-op", rounds, _no_op(track, topic))
    waiting = track.race("2 ms", rounds, _pair(track, topic, EVENTS, wait_ms=2))
    _report_no_op(bench, no_op)
    _report_waiting(bench, waiting)
    _report_memory(bench, no_op)
    _report_slow_key(bench, track.race("one slow key", bench.sized(5, 1), _slow_key(track, topic)))
    _report_computing(bench, track.race("1 ms of computing", rounds, _computing(track)))
    if not bench.quick:
        topic = fill(track.server, "million", MILLION)
        _report_million(bench, track.race("a million", 1, _million(track, topic)))


class Track:
    """Runs contestants in turn on one server."""

    def __init__(self, bench: Bench, server: KafkaServer) -> None:
        self.bench = bench
        self.server = server
        self.java = confluent.build(bench.say)
        self.python = pyrallel.interpreter(bench.say)

    def race(self, what: str, rounds: int, contestants: Sequence[Contestant]) -> Runs:
        found: dict[str, list[Ran]] = {contestant.name: [] for contestant in contestants}
        for number in range(rounds):
            for contestant in contestants:
                group = re.sub(r"\W+", "-", f"{what}-{contestant.name}-{number}")
                found[contestant.name].append(self._turn(what, contestant, group))
        return found

    def _turn(self, what: str, contestant: Contestant, group: str) -> Ran:
        ran = contestant.run(group)
        text = f"{ran.per_wall_s:,.0f} /s, {ran.per_cpu_s:,.0f} per CPU second, {ran.peak_kb / 1024:.0f} MB"
        self.bench.say(f"kafka: {what}, {contestant.name}: {text}; load {os.getloadavg()[0]:.1f}")
        self.bench.judge(f"Kafka, {what}, {contestant.name}", ran.verdict)
        if contestant.settles is not None:
            done, events = asyncio.run(settled(self.server, contestant.settles, group)), ran.verdict.expected
            self.bench.check(f"Kafka, {what}, acknowledged", done == events, f"{done:,} of {events:,} events settled")
        return ran

    def onward(self, name: str, topic: str, *, whole: bool = True, **more: Any) -> Contestant:
        """`whole`: every event of the topic must be done at the end."""
        return Contestant(
            name,
            lambda group: self._child("server_app", url=self.server.url, topic=topic, group=group, **more),
            settles=topic if whole else None,
        )

    def python_peer(self, name: str, module: str, topic: str, **more: Any) -> Contestant:
        where = {"servers": self.server.bootstrap, "topic": topic}
        return Contestant(name, lambda group: self._child(module, group=group, **where, **more))

    def confluent(self, topic: str, **more: Any) -> Iterator[Contestant]:
        if self.java:
            where: dict[str, Any] = {"servers": self.server.bootstrap, "topic": topic}
            yield Contestant(CONFLUENT, lambda group: confluent.run(self.bench.folder, group=group, **where, **more))

    def _child(self, module: str, **arguments: Any) -> Ran:
        return child(f"bench.contestants.{module}", self.bench.folder, **arguments)


# -- contestants --------------------------------------------------------------------------------------------------


def _no_op(track: Track, topic: str) -> list[Contestant]:
    peers = [
        *_pair(track, topic, EVENTS),
        track.python_peer(BARE, "kafka_bare", topic, events=EVENTS),
        track.python_peer(FASTSTREAM, "faststream_app", topic, events=EVENTS),
        track.python_peer(IN_LISTS, "faststream_app", topic, events=EVENTS, batch=True),
        track.onward(HEADED, fill_by_onward(track.server, "headed", EVENTS), events=EVENTS),
    ]
    if track.python is not None:
        few = fill(track.server, "few", FEW)
        peers.append(track.python_peer(PYRALLEL, "pyrallel", few, events=FEW, python=track.python))
    return peers


def _pair(track: Track, topic: str, events: int, **more: Any) -> list[Contestant]:
    return [
        track.onward(ONWARD, topic, events=events, concurrency=256, **more),
        *track.confluent(topic, events=events, concurrency=256, **more),
    ]


def _slow_key(track: Track, topic: str) -> list[Contestant]:
    """How fast the events of all other customers run: once with a fast first customer, and once with a first customer
    whose events take half a second each."""
    others = sum(key != "c-0" for key, _ in items(EVENTS, keys=KEYS, value_bytes=VALUE_BYTES))
    quick, slow = ({"keys": 1, "seconds": seconds, "max_in_flight": 1_000} for seconds in (0.0, 0.5))
    return [
        track.onward("without it", topic, whole=False, events=others, wait_ms=2, late=quick),
        track.onward("with it", topic, whole=False, events=others, wait_ms=2, late=slow),
    ]


def _computing(track: Track) -> list[Contestant]:
    topic = fill(track.server, "computed", COMPUTED)
    loops = loops_for(1_000)
    return [
        track.python_peer(ALONE, "kafka_bare", topic, events=COMPUTED, loops=loops),
        track.python_peer(PROCESSES, "kafka_burn", topic, events=COMPUTED, loops=loops, workers=WORKERS),
    ]


def _million(track: Track, topic: str) -> list[Contestant]:
    return [*_pair(track, topic, MILLION), track.python_peer(BARE, "kafka_bare", topic, events=MILLION)]


# -- the report ----------------------------------------------------------------------------------------------------


def _report_no_op(bench: Bench, runs: Runs) -> None:
    for name, least in (
        (CONFLUENT, 1.5),
        (PYRALLEL, 6.0),
        (FASTSTREAM, 5.0),
        (IN_LISTS, None),
        (HEADED, None),
        (BARE, None),
    ):
        if name in runs:
            bench.add(_against("Kafka, typed no-op, key order", runs[ONWARD], name, runs[name], least))


def _report_waiting(bench: Bench, runs: Runs) -> None:
    if CONFLUENT in runs:
        what = "Kafka, 2 ms wait, 256 in flight, key order"
        bench.add(_against(what, runs[ONWARD], CONFLUENT, runs[CONFLUENT], 1.2))


def _report_memory(bench: Bench, runs: Runs) -> None:
    if CONFLUENT not in runs:
        return
    ours, theirs = ([ran.peak_kb / 1024 for ran in runs[name]] for name in (ONWARD, CONFLUENT))
    ratio = ratios(ours, theirs)
    bench.add(
        Figure(
            what="Kafka, peak memory, typed no-op",
            measured=f"{spread(ours)} MB",
            value=median(ours),
            beside=f"{CONFLUENT}, -Xmx1g: {spread(theirs)} MB",
            ratio=ratio,
            target="≤ 0.35x",
            met=ratio <= 0.35,
            samples={"onward_mb": ours, "confluent_mb": theirs},
        )
    )


def _report_slow_key(bench: Bench, runs: Runs) -> None:
    without, slow = ([ran.wall_s for ran in runs[name]] for name in ("without it", "with it"))
    ratio = ratios(slow, without)
    bench.add(
        Figure(
            what="Kafka, one key at 500 ms: all others end after",
            measured=f"{spread(slow, '.2f')} s",
            value=median(slow),
            beside=f"without it: {spread(without, '.2f')} s",
            ratio=ratio,
            target="≤ 1.1x",
            met=ratio <= 1.1,
            samples={"with_s": slow, "without_s": without},
        )
    )


def _report_computing(bench: Bench, runs: Runs) -> None:
    what = f"Kafka, 1 ms of computing, {WORKERS} processes"
    bench.add(_against(what, runs[PROCESSES], ALONE, runs[ALONE], 1.8))


def _report_million(bench: Bench, runs: Runs) -> None:
    for name in (CONFLUENT, BARE):
        if name in runs:
            bench.add(_against("Kafka, typed no-op, 1,000,000 events", runs[ONWARD], name, runs[name], None))


def _against(what: str, ours: list[Ran], name: str, theirs: list[Ran], least: float | None) -> Figure:
    mine, other = [ran.per_wall_s for ran in ours], [ran.per_wall_s for ran in theirs]
    ratio = ratios(mine, other)
    per_cpu = ratios([ran.per_cpu_s for ran in ours], [ran.per_cpu_s for ran in theirs])
    return Figure(
        what=what,
        measured=f"{spread(mine)} /s",
        value=median(mine),
        beside=f"{name}: {spread(other)} /s; per CPU second {per_cpu:.2f}x",
        ratio=ratio,
        target="" if least is None else f"≥ {least:g}x",
        met=None if least is None else ratio >= least,
        samples={
            "onward": mine,
            name: other,
            "onward_per_cpu_s": [ran.per_cpu_s for ran in ours],
            f"{name}_per_cpu_s": [ran.per_cpu_s for ran in theirs],
            "onward_mb": [ran.peak_kb / 1024 for ran in ours],
            f"{name}_mb": [ran.peak_kb / 1024 for ran in theirs],
        },
    )
