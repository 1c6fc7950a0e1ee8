"""How far behind a partition is, here and at the broker, and which event blocks it."""

from collections.abc import Iterable

import msgspec

from onward.brokers.base import BrokerLag
from onward.event import Delivery
from onward.flow.holding import Holding
from onward.flow.limits import Limits
from onward.flow.pressure import fullest


class Blocking(msgspec.Struct, frozen=True):
    """The first open event of a partition: the watermark cannot pass it."""

    position: int
    key: str | None
    state: str  # queued, running, delayed, marking, leaving; loading: the partition's records are not read yet
    for_s: float  # since the watermark last moved, or since the event is open
    published: float  # Unix time of its event; 0: unknown
    attempt: int


class Lag(msgspec.Struct, frozen=True):
    """The events of a partition that this process has not finished. `gap`: done, but above the watermark."""

    queued: int
    running: int
    delayed: int
    parked: int
    parked_keys: int
    gap: int
    blocking: Blocking | None
    paused_by: str | None = None  # the limit that is full; None: the partition is not paused

    @property
    def open(self) -> int:
        return self.queued + self.running + self.delayed


class PartitionLag(msgspec.Struct, frozen=True):
    """How far behind a partition is: `local` in this process, `broker` in the log."""

    local: Lag
    broker: BrokerLag

    @property
    def events(self) -> int | None:
        """The true lag: undelivered, open, and done above the watermark. None: unknown."""
        undelivered = self.broker.undelivered
        return None if undelivered is None else undelivered + self.local.open + self.local.gap


class Behind(msgspec.Struct, frozen=True):
    """How far behind a handler is, over all partitions that this process has. Unknown is None, never 0."""

    undelivered: int | None
    undelivered_oldest_s: float | None  # age since it was published
    open: int
    oldest_open_s: float | None  # age since publication of the oldest blocking event; None: nothing is open
    blocked_s: float  # the longest time that a watermark has not moved although an event is open
    gap: int
    delayed: int
    parked: int
    parked_keys: int


def total(lags: Iterable[PartitionLag], wall: float) -> Behind:
    lags = list(lags)
    local, remote = [lag.local for lag in lags], [lag.broker for lag in lags]
    blocking = [lag.blocking for lag in local if lag.blocking is not None]
    counts = [lag.undelivered for lag in remote if lag.undelivered is not None]
    return Behind(
        undelivered=sum(counts) if counts else None,
        undelivered_oldest_s=max((lag.oldest_age_s for lag in remote if lag.oldest_age_s is not None), default=None),
        open=sum(lag.open for lag in local),
        oldest_open_s=max((max(0.0, wall - each.published) for each in blocking if each.published), default=None),
        blocked_s=max((each.for_s for each in blocking), default=0.0),
        gap=sum(lag.gap for lag in local),
        delayed=sum(lag.delayed for lag in local),
        parked=sum(lag.parked for lag in local),
        parked_keys=sum(lag.parked_keys for lag in local),
    )


def lag_of(holding: Holding, limits: Limits, now: float) -> Lag:
    events, parking = holding.events, holding.aside.parking
    return Lag(
        queued=events.count - events.running - events.delayed,
        running=events.running,
        delayed=events.delayed,
        parked=len(parking),
        parked_keys=parking.keys,
        gap=events.tracker.gap,
        blocking=_blocking(holding, now),
        paused_by=fullest(holding, limits) if holding.paused else None,
    )


def _blocking(holding: Holding, now: float) -> Blocking | None:
    events = holding.events
    for_s = events.standstill.for_s(events.tracker.watermark, now)
    if (entry := events.tracker.blocking()) is not None:
        return _blocked_by(entry.delivery, entry.stage.name.lower(), for_s)
    if events.before_load.backlog:
        return _blocked_by(events.before_load.backlog[0], "loading", for_s)
    return None


def _blocked_by(delivery: Delivery, state: str, for_s: float) -> Blocking:
    event = delivery.event
    return Blocking(delivery.position, event.key, state, for_s, event.time, delivery.attempt)
