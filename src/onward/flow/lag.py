"""How far behind a partition is in this process, and what holds it up."""

from collections.abc import Sequence

import msgspec

from onward.brokers.base import BrokerLag
from onward.flow.holding import Holding
from onward.flow.limits import Limits
from onward.flow.pressure import fullest


class Blocking(msgspec.Struct, frozen=True):
    """What keeps a partition's watermark where it is."""

    position: int
    key: str | None
    state: str
    for_s: float
    published: float  # Unix time of its event; 0: unknown
    attempt: int = 1


class Lag(msgspec.Struct, frozen=True):
    """What this process has of a partition and has not finished; `gap`: done, but above the watermark."""

    queued: int
    running: int
    delayed: int
    parked: int
    parked_keys: int
    gap: int
    blocking: Blocking | None
    paused_by: str | None = None  # the limit that is full; None: it is not paused


class Behind(msgspec.Struct, frozen=True):
    """How far a handler is behind, over all partitions that this process has. Unknown is None, never 0."""

    undelivered: int | None
    undelivered_oldest_s: float | None  # since it was published
    open: int
    oldest_open_s: float | None  # since it was published, of those that block; None: nothing is open
    blocked_s: float  # the longest that a watermark has not moved although something is open
    gap: int
    delayed: int
    parked: int
    parked_keys: int


def total(lags: Sequence[Lag], outside: Sequence[BrokerLag], wall: float) -> Behind:
    """`outside`: what the broker says of the same partitions."""
    blocking = [lag.blocking for lag in lags if lag.blocking is not None]
    counts = [each.undelivered for each in outside if each.undelivered is not None]
    return Behind(
        undelivered=sum(counts) if counts else None,
        undelivered_oldest_s=max(
            (each.oldest_age_s for each in outside if each.oldest_age_s is not None), default=None
        ),
        open=sum(lag.queued + lag.running + lag.delayed for lag in lags),
        oldest_open_s=max((max(0.0, wall - each.published) for each in blocking if each.published), default=None),
        blocked_s=max((each.for_s for each in blocking), default=0.0),
        gap=sum(lag.gap for lag in lags),
        delayed=sum(lag.delayed for lag in lags),
        parked=sum(lag.parked for lag in lags),
        parked_keys=sum(lag.parked_keys for lag in lags),
    )


def lag_of(holding: Holding, limits: Limits, now: float) -> Lag:
    tracker = holding.tracker
    entry = tracker.blocking()
    blocking = None
    if entry is not None:
        since = holding.blocked_since if holding.blocked_at == tracker.watermark else now
        delivery = entry.delivery
        blocking = Blocking(
            position=delivery.position,
            key=delivery.event.key,
            state=entry.stage.name.lower(),
            attempt=delivery.attempt,
            for_s=now - since,
            published=delivery.event.time,
        )
    return Lag(
        queued=len(tracker)
        + len(holding.early.backlog)
        + len(holding.room.drawn)
        - holding.room.running
        - holding.room.delayed,
        running=holding.room.running,
        delayed=holding.room.delayed,
        parked=len(holding.outside.parking),
        parked_keys=holding.outside.parking.keys,
        gap=tracker.gap,
        blocking=blocking,
        paused_by=fullest(holding, limits) if holding.paused else None,
    )
