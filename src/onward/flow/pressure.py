"""Back-pressure: a partition is paused when one of its limits is full, and resumed when all have room again."""

from onward.flow.holding import Holding
from onward.flow.limits import Limits

RESUME_AT = 0.7  # of the limit; without this distance a full partition would flap between paused and resumed


def is_full(holding: Holding, limits: Limits) -> bool:
    """Whether a limit has been reached. Called on every tick, so it is cheap."""
    events = holding.events
    tracker = events.tracker
    opened = len(tracker.open)
    if (
        opened + len(tracker.leaving) + len(events.before_load.backlog) >= limits.max_in_flight
        or events.bytes >= limits.max_in_flight_bytes
    ):
        return True
    spread = len(tracker.flags) - opened  # at least the gap, and cheaper to compute
    if spread < limits.max_gap and len(holding.aside.parking.records) < limits.max_parked:
        return False
    return weight(holding, limits) >= 1.0


def weight(holding: Holding, limits: Limits) -> float:
    """How full the fullest limit is."""
    tracker = holding.events.tracker
    most = max(_count(holding) / limits.max_in_flight, holding.events.bytes / limits.max_in_flight_bytes)
    if holding.aside.parking.records:
        most = max(most, _parked(holding, limits))
    if len(tracker.flags) - len(tracker.open) > most * limits.max_gap:  # only then compute the exact gap
        most = max(most, tracker.gap / limits.max_gap)
    return most


def fullest(holding: Holding, limits: Limits) -> str:
    """The name of the fullest limit."""
    weights = {
        "max_in_flight": _count(holding) / limits.max_in_flight,
        "max_in_flight_bytes": holding.events.bytes / limits.max_in_flight_bytes,
        "max_parked": _parked(holding, limits),
        "max_gap": holding.events.tracker.gap / limits.max_gap,
    }
    return max(weights, key=weights.__getitem__)


def _count(holding: Holding) -> int:
    """Delivered and not done."""
    events = holding.events
    return len(events.tracker.open) + len(events.tracker.leaving) + len(events.before_load.backlog)


def _parked(holding: Holding, limits: Limits) -> float:
    """How full max_parked is; 0 while records wait for the log to be read past them, or the pause would never end."""
    return 0.0 if holding.aside.unread else len(holding.aside.parking.records) / limits.max_parked
