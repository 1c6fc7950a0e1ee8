"""The profile of one run: limits, sizes, times and the fates of events, all drawn from its seed."""

from random import Random
from typing import Literal

import msgspec

from onward.brokers.base import Ordering
from onward.brokers.core.progress_codec import LIMIT_CHARS
from onward.flow.limits import Limits

TIMES = 1_790_000_000_000 << 21  # a first position made of milliseconds: too large for a float
FATES = ("ok", "slow", "flaky", "timeout", "poison", "killer")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    limits: Limits

    # the load
    partitions: int
    members: int
    events: int
    keys: int
    keyless: float  # share of the events that have no key
    first_position: int  # where the logs begin
    stride: int  # about how many positions lie between two events; 1: dense
    holes: float  # chance of a hole in the log before an event
    largest: int  # size of the largest events, in bytes
    fates: tuple[float, ...]  # weights, in the order of FATES
    active_s: float  # how long events are published and faults happen

    # the handler
    attempts: int
    delays_s: tuple[float, ...]
    timeout_s: float
    kills: Literal["process", "worker"]  # what a killer event kills

    # the broker
    shared: bool  # partitions without owners, see onward.brokers.base.Assigned
    atomic: bool  # a settle is one transaction; otherwise it is done in steps
    metadata: int  # characters for what is done above the watermark; the highest events that do not fit run again
    receive_batch: int
    page: int  # how many records a load returns
    lease_s: float
    grace_s: float  # after the lease, before another member becomes the owner
    revoke_s: float
    latency_s: float

    faults: int
    operations: int  # how often operators change the aside


def draw(rng: Random) -> Profile:
    limits = _limits(rng)
    shared = limits.ordering == "none" and rng.random() < 0.6
    one_lane = limits.ordering == "partition"  # so a retry that waits in place delays all later events
    killers = rng.choice((0.0, 0.0, 0.02))
    stride = rng.choice((1, 1, 1_000_000))
    return Profile(
        limits=limits,
        partitions=rng.choice((1, 1, 2, 3, 4)),
        members=rng.choice((1, 2, 2, 3, 4)),
        events=rng.choice((40, 80, 120)) if not one_lane else rng.choice((30, 60)),
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
        delays_s=(0.0, 0.05, 0.2) if one_lane else rng.choice(((0.0, 0.1), (0.1, 0.5, 3.0), (2.0, 6.0))),
        timeout_s=2.0,
        # A shared partition does not store which events have started, so a crash cannot be blamed on one.
        kills=rng.choice(("process", "process", "worker")) if not shared else "worker",
        shared=shared,
        atomic=rng.random() < 0.5,
        # The smallest is too short for all intervals. Sparse positions have longer numbers.
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
    # With `hold`, a key behind a dead letter may fill its partition for ever. Such a run would not end.
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
