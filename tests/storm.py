"""What storm tests share. A storm kills, suspends and replaces processes under load, then checks every effect."""

import os
import random
from pathlib import Path
from typing import NamedTuple

import msgspec

from onward.testing.scenario import whole_lines

STORM_S = float(os.environ.get("ONWARD_STORM_S", "20"))  # `make test-more` sets two minutes


def seeded() -> random.Random:
    """The choices of a storm. ONWARD_STORM_SEED makes the same choices again."""
    seed = int(os.environ.get("ONWARD_STORM_SEED") or random.randrange(1 << 32))
    print(f"\nONWARD_STORM_SEED={seed}")  # noqa: T201
    return random.Random(seed)


class Handled(NamedTuple):
    """A line of an effects file: an event that a member handled."""

    key: str
    n: int
    partition: int
    position: int
    fence: int
    pid: int
    id: str


def read(path: Path) -> list[Handled]:
    return [msgspec.convert(line.split(), Handled, strict=False) for line in whole_lines(path)]


def check_fences(done: list[Handled]) -> None:
    """A fence belongs to one ownership, and nothing starts under a lower one once a higher one has begun."""
    highest: dict[int, int] = {}
    late = 0
    owners = {(each.partition, each.fence, each.pid) for each in done}
    assert len(owners) == len({owner[:2] for owner in owners}), "two members had one fence"
    for each in done:
        late += each.fence < highest.get(each.partition, 0)
        highest[each.partition] = max(each.fence, highest.get(each.partition, 0))
    assert not late, f"{late} runs under a superseded fence"
