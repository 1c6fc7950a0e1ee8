"""Peak memory of the consuming process: it must not grow with the backlog."""

from bench.kit import Bench, Figure, child, median
from bench.workload import fill

SMALL = 10_000


def run(bench: Bench) -> None:
    large = bench.sized(1_000_000, 100_000)
    small_kb = [_peak(bench, SMALL, number) for number in range(bench.sized(5, 3))]
    large_kb = _peak(bench, large, 0)
    ratio = large_kb / median(small_kb)
    bench.add(
        Figure(
            what=f"peak memory, {large:,} events waiting",
            measured=f"{large_kb / 1024:.1f} MB",
            value=large_kb / 1024,
            beside=f"{SMALL:,} waiting: {median(small_kb) / 1024:.1f} MB",
            ratio=ratio,
            target="≤ 1.1x",
            met=ratio <= 1.1,
            samples={"large_kb": [large_kb], "small_kb": small_kb},
        )
    )


def _peak(bench: Bench, events: int, number: int) -> float:
    path = bench.path(f"memory-{events}.db")
    if not path.exists():
        bench.say(f"memory: filling SQLite with {events:,} events")
        fill(path, events, batch=1_000)
    bench.say(f"memory: consuming {events:,} events")
    ran = child("bench.contestants.app", bench.folder, path=str(path), events=events, group=f"memory-{number}")
    bench.judge(f"consumed {events:,} waiting events", ran.verdict)
    return ran.peak_kb
