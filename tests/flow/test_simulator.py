"""The simulator on a fixed set of seeds: every promise is kept, and the same seed gives the same run, byte for byte.

`make sim RUNS=10000` runs many more; `make sim SEED=7` runs one of them with its trace.
"""

import os
import subprocess
import sys
from collections import Counter

import msgspec
import pytest

from onward.flow import plane
from onward.testing.simulator import simulate
from onward.testing.simulator.__main__ import main
from onward.testing.simulator.profile import Profile

pytestmark = pytest.mark.slow

SEEDS = 500
PARTS = 5

# What must happen in a run of many seeds: the simulator proves nothing about a case that it never tries.
MET = [
    *("assigned", "compacted", "crash", "cut", "drained", "duplicate", "fence", "freeze", "hurry", "killed", "overdue"),
    *("pauses", "rebalance", "reconnect", "released", "remove", "repeats", "replay", "resumes", "revoked", "split"),
    *("trimmed", "undrained"),
    "dead records",
    "fenced settles",
    "give up",
    "held records",
    "loads failed",
    "records loaded",
    "records removed",
    "settle error",
    "settle late",
    "settle lost answer",
    "settle refuse",
    "shared by several",
    "shared requeued",
    "shared retries",
    "shared runs",
    "slow down",
    "sparse intervals stored",
    "sparse runs",
    "stale delivery",
    "stale effects",
    "taken over unclean",
    "waiting records",
    "worker died",
]


def refusing(profile: Profile) -> Profile:
    """A store that refuses records often, and settles of many partitions at once."""
    limits = msgspec.structs.replace(profile.limits, settle_interval_s=0.3)
    fates = (1.0, 0.0, 0.3, 0.0, 0.1, 0.0)
    return msgspec.structs.replace(
        profile,
        shared=False,
        limits=limits,
        partitions=8,
        members=2,
        events=240,
        fates=fates,
        active_s=25.0,
        faults=150,
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_is_kept(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS):
        result = simulate(seed)
        assert result.checker is None, f"make sim SEED={seed}: {result.message}"
        counts.update(result.counts)
    assert [name for name in MET if not counts[name]] == []


def test_promises_hold_when_records_are_refused_in_some_partitions_and_others_are_lost() -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        result = simulate(seed, shape=refusing)
        assert result.checker is None, f"seed {seed}: {result.message}"
        counts.update(result.counts)
    assert counts["refused in part"] > 15
    assert counts["refused and lost"] > 5


def sharing(profile: Profile) -> Profile:
    """Partitions without owners."""
    limits = msgspec.structs.replace(profile.limits, ordering="none")
    return msgspec.structs.replace(profile, limits=limits, shared=True, kills="worker")


def test_every_promise_but_order_is_kept_in_shared_partitions() -> None:
    counts: Counter[str] = Counter()
    for seed in range(200):
        result = simulate(seed, shape=sharing)
        assert result.checker is None, f"seed {seed}: {result.message}"
        counts.update(result.counts)
    assert counts["shared by several"] > 1_000
    assert counts["shared requeued"] > 1_000
    assert counts["shared retries"] > 1_000
    assert counts["dead records"] > 500
    met = ("crash", "fence", "reconnect", "drained", "undrained", "stale delivery", "replay", "settle refuse")
    assert [name for name in met if not counts[name]] == []


def test_the_same_seed_gives_the_same_run() -> None:
    once, again = simulate(11, trace=True), simulate(11, trace=True)
    assert once.trace == again.trace
    assert len(once.trace) > 100


def test_a_trace_changes_nothing() -> None:
    for seed in range(5):
        assert simulate(seed, trace=True).counts == simulate(seed).counts


def test_a_seed_gives_the_same_run_in_another_process() -> None:
    traces = {replay(7, hash_seed) for hash_seed in ("0", "1", "77")}
    assert len(traces) == 1
    assert traces.pop().decode().splitlines()[:-1] == simulate(7, trace=True).trace


def replay(seed: int, hash_seed: str) -> bytes:
    command = [sys.executable, "-m", "onward.testing.simulator", "--seed", str(seed), "--trace"]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout


def test_many_seeds_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "3", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("0 failed")


def test_a_failure_prints_its_seed_and_the_command_to_trace_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plane.ControlPlane, "fenced", lambda *_: None)
    assert main(["--runs", "40", "--jobs", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = next(line for line in lines if line.startswith("seed "))
    seed = int(failed.split()[1].strip(":"))
    assert f"--seed {seed} --trace" in lines[lines.index(failed) + 1]
    assert main(["--seed", str(seed), "--trace"]) == 1
    assert "checker" in capsys.readouterr().out.splitlines()[-2]
