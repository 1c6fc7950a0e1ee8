"""Consuming a backlog from SQLite: the whole of Onward, a bare loop as the limit, and the peers. They take turns."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.contestants import huey_tasks, persist_queue
from bench.kit import Bench, Figure, Ran, child, fast_folder, median, ratios, spread
from bench.workload import fill, settled

ONWARD, BARE = "onward", "bare"


class Contestant(msgspec.Struct, frozen=True):
    name: str
    run: Callable[[int], Ran]  # with the number of the round
    ordered: bool = True


def run(bench: Bench) -> None:
    rounds = bench.sized(5, 3)
    contestants = [*_ours(bench), *_peers(bench)]
    results: dict[str, list[Ran]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants:
            bench.say(f"consume: {contestant.name}, round {number + 1} of {rounds}")
            ran = contestant.run(number)
            bench.judge(f"consumed by {contestant.name}", ran.verdict, ordered=contestant.ordered)
            results[contestant.name].append(ran)
    _report_ours(bench, results[ONWARD], results[BARE])
    for contestant in contestants:
        if contestant.name not in (ONWARD, BARE):
            _report_peer(bench, contestant.name, results[ONWARD], results[contestant.name])


def _ours(bench: Bench) -> list[Contestant]:
    events = bench.sized(100_000, 20_000)
    path = bench.path("consume.db")
    bench.say(f"consume: filling SQLite with {events:,} events")
    fill(path, events)

    def onward(number: int) -> Ran:
        ran = child("bench.contestants.app", bench.folder, path=str(path), events=events, group=f"round-{number}")
        done = asyncio.run(settled(path, f"round-{number}"))
        bench.check("acknowledged by onward", done == events, f"{done:,} of {events:,} events settled")
        return ran

    return [
        Contestant(ONWARD, onward),
        Contestant(BARE, lambda _: child("bench.contestants.bare", bench.folder, path=str(path), events=events)),
    ]


def _peers(bench: Bench) -> list[Contestant]:
    slow, fast = bench.sized((4_000, 50_000), (1_000, 10_000))
    tasks = bench.path("huey.db")
    queues = {mode: bench.path(f"persist-{mode}") for mode in ("ack", "batch")}
    with fast_folder() as memory:
        bench.say("consume: filling the peers' queues")
        huey_tasks.fill(memory / "huey.db", slow)
        shutil.move(memory / "huey.db", tasks)
        for mode, events in (("ack", slow), ("batch", fast)):
            persist_queue.fill(memory / mode, events, mode)
            shutil.move(memory / mode, queues[mode])
    return [
        Contestant("huey, 1 worker", lambda _: _huey(bench, tasks, slow, 1)),
        Contestant("huey, 4 workers, no order", lambda _: _huey(bench, tasks, slow, 4), ordered=False),
        Contestant("persist-queue, ack per event", lambda _: _persist(bench, queues["ack"], slow, "ack")),
        Contestant(
            "persist-queue, lone reader, commit per 100", lambda _: _persist(bench, queues["batch"], fast, "batch")
        ),
    ]


def _huey(bench: Bench, filled: Path, events: int, workers: int) -> Ran:
    path = bench.path("huey-round.db")
    shutil.copy(filled, path)  # consuming empties the file
    try:
        return child("bench.contestants.huey_tasks", bench.folder, path=str(path), events=events, workers=workers)
    finally:
        for each in bench.folder.glob(f"{path.name}*"):
            each.unlink()


def _persist(bench: Bench, filled: Path, events: int, mode: str) -> Ran:
    path = bench.path("persist-round")
    shutil.copytree(filled, path)
    try:
        return child("bench.contestants.persist_queue", bench.folder, path=str(path), events=events, mode=mode)
    finally:
        shutil.rmtree(path)


def _report_ours(bench: Bench, ours: list[Ran], bare: list[Ran]) -> None:
    rate, limit = [ran.per_cpu_s for ran in ours], [ran.per_cpu_s for ran in bare]
    bench.add(
        Figure(
            what="consume, typed handler, key order",
            measured=f"{spread(rate)} per CPU second",
            value=median(rate),
            beside=f"bare loop: {spread(limit)}",
            ratio=ratios(rate, limit),
            target="≥ 40,000",
            met=median(rate) >= 40_000,
            samples={"onward": rate, "bare": limit},
        )
    )
    rate, limit = [ran.per_wall_s for ran in ours], [ran.per_wall_s for ran in bare]
    bench.add(
        Figure(
            what="the same, by the clock",
            measured=f"{spread(rate)} /s",
            value=median(rate),
            beside=f"bare loop: {spread(limit)} /s",
            ratio=ratios(rate, limit),
            samples={"onward": rate, "bare": limit},
        )
    )


def _report_peer(bench: Bench, name: str, ours: list[Ran], theirs: list[Ran]) -> None:
    for unit, rate in ((" per CPU second", _per_cpu_s), (" /s", _per_wall_s)):
        mine, other = [rate(ran) for ran in ours], [rate(ran) for ran in theirs]
        ratio = ratios(mine, other)
        inverted = max(ran.verdict.inverted for ran in theirs)
        bench.add(
            Figure(
                what=f"consume, beside {name}",
                measured=f"{median(mine):,.0f}{unit}",
                value=median(mine),
                beside=f"{spread(other)}{f', {inverted} inverted' if inverted else ''}",
                ratio=ratio,
                target="≥ 10x",
                met=ratio >= 10,
                samples={"onward": mine, name: other},
            )
        )


def _per_cpu_s(ran: Ran) -> float:
    return ran.per_cpu_s


def _per_wall_s(ran: Ran) -> float:
    return ran.per_wall_s
