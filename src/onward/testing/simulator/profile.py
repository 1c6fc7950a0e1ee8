"""What one run is like: limits, sizes, times and fates, all drawn from its seed."""

from random import Random
from typing import Literal

import msgspec

from onward.brokers.base import Ordering
from onward.brokers.core.progress_codec import LIMIT_CHARS
from onward.flow.limits import Limits

TIMES = 1_790_000_000_000 << 21  # positions that are times in milliseconds: too large for a float
FATES = ("ok", "slow", "flaky", "timeout", "poison", "killer")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    limits: Limits

    # the load
    partitions: int
    members: int
    events: int
    keys: int
    keyless: float  # share of the events
    first_position: int  # where logs begin
    stride: int  # positions from one event to the next, about; 1: dense
    holes: float  # chance of a hole in the log before an event
    largest: int  # bytes
    fates: tuple[float, ...]  # weights, beside FATES
    active_s: float  # publishing and faults end then

    # the handler
    attempts: int
    delays_s: tuple[float, ...]
    timeout_s: float
    kills: Literal["process", "worker"]  # what dies with a killer

    # the broker
    shared: bool  # partitions without owners, see onward.brokers.base.Assigned
    atomic: bool  # one transaction per settle; otherwise records, progress and removals one after the other
    metadata: int  # characters for what is done above the watermark; what is cut off at the top runs again
    receive_batch: int
    page: int  # records read at once
    lease_s: float
    grace_s: float  # beyond the lease, before another member is given the partition
    revoke_s: float
    latency_s: float

    faults: int
    operations: int  # of operators on the aside


def draw(rng: Random) -> Profile:
    limits = _limits(rng)
    shared = limits.ordering == "none" and rng.random() < 0.6
    whole = limits.ordering == "partition"  # one lane: what waits in place makes all others wait
    killers = rng.choice((0.0, 0.0, 0.02))
    stride = rng.choice((1, 1, 1_000_000))
    return Profile(
        limits=limits,
        partitions=rng.choice((1, 1, 2, 3, 4)),
        members=rng.choice((1, 2, 2, 3, 4)),
        events=rng.choice((40, 80, 120)) if not whole else rng.choice((30, 60)),
        keys=rng.choice((2, 4, 8, 16)),
        keyless=rng.choice((0.0, 0.0, 0.15)),
        first_position=rng.choice((0, TIMES)) if stride > 1 else 0,
        stride=stride,
        holes=rng.choice((0.0, 0.1, 0.4)),
        largest=rng.choice((40, limits.max_in_flight_bytes // 3, int(limits.max_in_flight_bytes * 1.2)))
        if limits.max_in_flight_bytes < 10_000
        else 60,
        fates=(1.0, 0.08, rng.choice((0.0, 0.1, 0.3)), 0.02, rng.choice((0.0, 0.04, 0.1)), killers),
        active_s=rng.choice((4.0, 12.0, 25.0)),
        attempts=rng.choice((1, 2, 3, 4)),
        delays_s=(0.0, 0.05, 0.2) if whole else rng.choice(((0.0, 0.1), (0.1, 0.5, 3.0), (2.0, 6.0))),
        timeout_s=2.0,
        kills=rng.choice(("process", "process", "worker")) if not shared else "worker",  # no start is recorded there
        shared=shared,
        atomic=rng.random() < 0.5,
        # Too short for all intervals. Those of sparse positions need longer numbers.
        metadata=rng.choice((LIMIT_CHARS, LIMIT_CHARS, LIMIT_CHARS, 9 if stride == 1 else 14)),
        receive_batch=rng.choice((1, 4, 10, 30)),
        page=rng.choice((1, 2, 5, 100)),
        lease_s=3.0,
        grace_s=rng.choice((0.0, 0.5, 1.5)),
        revoke_s=rng.choice((0.3, 2.0, 8.0)),
        latency_s=rng.choice((0.0, 0.001, 0.02)),
        faults=rng.choice((0, 3, 8, 16)),
        operations=rng.choice((0, 0, 4, 12, 40)),
    )


def _limits(rng: Random) -> Limits:
    ordering: Ordering = rng.choice(("key", "key", "key", "key", "key", "partition", "none"))
    batch_size = rng.choice((1, 1, 1, 2, 5))
    on_dead: Literal["pass", "hold"] = rng.choice(("pass", "pass", "hold"))
    # A key that is held for ever fills its partition, as it should: such a run would not end.
    max_parked = rng.choice((4, 12, 1_000)) if on_dead == "pass" else 1_000
    return Limits(
        group="g",
        handler="h",
        ordering=ordering,
        on_dead=on_dead,
        concurrency=rng.choice((1, 2, 4, 8, 16)),
        batch_size=batch_size,
        batch_wait_s=rng.choice((0.0, 0.1)) if batch_size > 1 else 0.0,
        max_in_flight=rng.choice((8, 12, 16, 32, 64)),
        max_in_flight_bytes=rng.choice((300, 1_000, 1 << 20)),
        max_delayed=rng.choice((2, 4, 100)),
        max_parked=max_parked,
        max_gap=rng.choice((6, 20, 1_000_000)),
        park_after_s=rng.choice((0.2, 1.0)),
        crash_limit=rng.choice((1, 2, 3)),
        settle_interval_s=rng.choice((0.0, 0.05, 0.3)),
    )
