"""When a partition has enough: it is paused at its first full limit, and resumed when all have room again."""

from onward.flow.holding import Holding
from onward.flow.limits import Limits

RESUME_AT = 0.7  # of the limit: without the distance a full partition would flap between paused and resumed


def is_full(holding: Holding, limits: Limits) -> bool:
    """Has any limit been reached? Asked on every tick."""
    events = holding.events
    tracker = events.tracker
    opened = len(tracker.open)
    if (
        opened + len(tracker.leaving) + len(events.before_load.backlog) >= limits.max_in_flight
        or events.bytes >= limits.max_in_flight_bytes
    ):
        return True
    spread = len(tracker.flags) - opened  # no less than the gap, and cheaper
    if spread < limits.max_gap and len(holding.aside.parking.records) < limits.max_parked:
        return False
    return weight(holding, limits) >= 1.0


def weight(holding: Holding, limits: Limits) -> float:
    """How full the fullest limit is."""
    tracker = holding.events.tracker
    most = max(_count(holding) / limits.max_in_flight, holding.events.bytes / limits.max_in_flight_bytes)
    if holding.aside.parking.records:
        most = max(most, _parked(holding, limits))
    if len(tracker.flags) - len(tracker.open) > most * limits.max_gap:  # only then is the exact number worth its price
        most = max(most, tracker.gap / limits.max_gap)
    return most


def fullest(holding: Holding, limits: Limits) -> str:
    """The name of the limit that is the fullest."""
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
    """Records beyond what was read of the log wait for it to be read: a pause would be for ever."""
    return 0.0 if holding.aside.unread else len(holding.aside.parking.records) / limits.max_parked
