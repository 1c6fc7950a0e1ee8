"""When a partition has enough: it is paused at its first full limit, and resumed when all have room again."""

from onward.flow.holding import Holding
from onward.flow.limits import Limits

RESUME_AT = 0.7  # of the limit: without the gap a full partition would flap between paused and resumed


def is_full(holding: Holding, limits: Limits) -> bool:
    """Has any limit been reached? Asked on every tick."""
    tracker = holding.tracker
    if (
        len(tracker.open) + len(holding.backlog) + holding.storing >= limits.max_in_flight
        or holding.bytes >= limits.max_in_flight_bytes
    ):
        return True
    may_be = len(holding.parking.refs) >= limits.max_parked or tracker.span >= limits.max_gap
    return may_be and weight(holding, limits) >= 1.0


def weight(holding: Holding, limits: Limits) -> float:
    """How full the fullest limit is."""
    tracker = holding.tracker
    count = len(tracker.open) + len(holding.backlog) + holding.storing
    most = max(count / limits.max_in_flight, holding.bytes / limits.max_in_flight_bytes)
    if holding.parking.refs:
        most = max(most, _parked(holding, limits))
    if tracker.span > most * limits.max_gap:  # seldom: only then is it worth the exact number
        most = max(most, tracker.gap / limits.max_gap)
    return most


def fullest(holding: Holding, limits: Limits) -> str:
    """The name of the limit that is the fullest."""
    count = len(holding.tracker.open) + len(holding.backlog) + holding.storing
    weights = {
        "max_in_flight": count / limits.max_in_flight,
        "max_in_flight_bytes": holding.bytes / limits.max_in_flight_bytes,
        "max_parked": _parked(holding, limits),
        "max_gap": holding.tracker.gap / limits.max_gap,
    }
    return max(weights, key=weights.__getitem__)


def _parked(holding: Holding, limits: Limits) -> float:
    """Records beyond what was read of the log wait for it to be read: a pause would be for ever."""
    return 0.0 if holding.unread else len(holding.parking.refs) / limits.max_parked
