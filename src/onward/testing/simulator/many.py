"""Runs many seeds on several cores."""

import multiprocessing
from collections import Counter
from collections.abc import Iterator

from onward.testing.simulator.world import Result, simulate

CHUNK = 25


def simulate_many(seeds: range, jobs: int) -> Iterator[tuple[int, list[Result], Counter[str]]]:
    """Yields for each chunk of seeds: the number of runs, the failed ones, and the counts of what happened."""
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    if jobs == 1 or len(chunks) == 1:
        yield from map(_chunk, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(chunks))) as pool:
        yield from pool.imap_unordered(_chunk, chunks)


def _chunk(seeds: range) -> tuple[int, list[Result], Counter[str]]:
    counts: Counter[str] = Counter()
    failed: list[Result] = []
    for seed in seeds:
        result = simulate(seed)
        counts.update(result.counts)
        if result.checker:
            failed.append(result)
    return len(seeds), failed, counts
