"""Run the simulator on many seeds with all cores, or replay one seed with a readable trace."""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from onward.testing.simulator.many import simulate_many
from onward.testing.simulator.world import Result, simulate

SHOWN = 10  # how many failures are printed


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every run kept every promise, else 1."""
    parser = argparse.ArgumentParser(prog="python -m onward.testing.simulator", description=__doc__)
    parser.add_argument("--runs", type=int, help="number of seeds (default: 1000, or 1 with --seed)")
    parser.add_argument("--seed", type=int, help="the first seed (default: 0)")
    parser.add_argument("--trace", action="store_true", help="print every step of each run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes (default: one per core)")
    args = parser.parse_args(argv)
    first = args.seed if args.seed is not None else 0
    runs = args.runs if args.runs is not None else 1_000 if args.seed is None else 1
    if args.trace:
        return max(_replay(seed) for seed in range(first, first + runs))
    return _run(range(first, first + runs), args.jobs or 1)


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _replay(seed: int) -> int:
    result = simulate(seed, trace=True)
    _print("\n".join(result.trace))
    _print(f"seed {seed}: {result.message or 'every promise was kept'}")
    return 1 if result.checker else 0


def _run(seeds: range, jobs: int) -> int:
    counts: Counter[str] = Counter()
    failed: list[Result] = []
    started, done = time.monotonic(), 0
    for number, new_failures, new_counts in simulate_many(seeds, jobs):
        done += number
        counts.update(new_counts)
        failed.extend(new_failures)
        if done % 1_000 < number or done == len(seeds):
            rate = done / (time.monotonic() - started)
            _print(f"{done} of {len(seeds)} runs, {rate:.0f} runs/s, {len(failed)} failed")
    _print("counts over all runs: " + ", ".join(f"{name} {counts[name]}" for name in sorted(counts)))
    for result in sorted(failed, key=lambda each: each.seed)[:SHOWN]:
        _print(f"seed {result.seed}: {result.message}")
        _print(
            f"  run it again with a trace: {os.path.basename(sys.executable)} -m onward.testing.simulator "
            f"--seed {result.seed} --trace    (make sim SEED={result.seed})"
        )
    _print(f"{len(seeds)} runs in {time.monotonic() - started:.1f} s: {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
