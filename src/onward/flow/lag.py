"""How far behind a partition is in this process, and what holds it up."""

import msgspec

from onward.flow.holding import Holding
from onward.flow.limits import Limits
from onward.flow.pressure import fullest


class Blocking(msgspec.Struct, frozen=True):
    """What keeps a partition's watermark where it is."""

    position: int
    key: str | None
    state: str
    for_s: float


class Lag(msgspec.Struct, frozen=True):
    """What this process has of a partition and has not finished; `gap`: done, but above the watermark."""

    queued: int
    running: int
    delayed: int
    parked: int
    gap: int
    blocking: Blocking | None
    paused_by: str | None = None  # the limit that is full; None: it is not paused


def lag_of(holding: Holding, limits: Limits, now: float) -> Lag:
    tracker = holding.tracker
    entry = tracker.blocking()
    blocking = None
    if entry is not None:
        since = holding.blocked[1] if holding.blocked and holding.blocked[0] == tracker.watermark else now
        delivery = entry.delivery
        blocking = Blocking(delivery.position, delivery.event.key, entry.stage.name.lower(), now - since)
    return Lag(
        queued=len(tracker) + len(holding.backlog) + len(holding.drawn) - holding.running - holding.delayed,
        running=holding.running,
        delayed=holding.delayed,
        parked=len(holding.parking),
        gap=sum(stop - start for start, stop in tracker.done_above()),
        blocking=blocking,
        paused_by=fullest(holding, limits) if holding.paused else None,
    )
