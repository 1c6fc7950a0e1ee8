"""When a partition has enough: it is paused at its first full limit, and resumed when all have room again."""

from onward.flow.holding import Holding
from onward.flow.limits import Limits

RESUME_AT = 0.7  # of the limit: without the gap a full partition would flap between paused and resumed


def is_full(holding: Holding, limits: Limits) -> bool:
    """Has any limit been reached? Asked on every tick."""
    if _count(holding) >= limits.max_in_flight or holding.room.bytes >= limits.max_in_flight_bytes:
        return True
    spread = len(holding.tracker.flags) - len(holding.tracker.open)  # no less than the gap, and cheaper
    if spread < limits.max_gap and len(holding.outside.parking.refs) < limits.max_parked:
        return False
    return weight(holding, limits) >= 1.0


def weight(holding: Holding, limits: Limits) -> float:
    """How full the fullest limit is."""
    tracker = holding.tracker
    most = max(_count(holding) / limits.max_in_flight, holding.room.bytes / limits.max_in_flight_bytes)
    if holding.outside.parking.refs:
        most = max(most, _parked(holding, limits))
    if len(tracker.flags) - len(tracker.open) > most * limits.max_gap:  # seldom: only then is it worth the exact number
        most = max(most, tracker.gap / limits.max_gap)
    return most


def fullest(holding: Holding, limits: Limits) -> str:
    """The name of the limit that is the fullest."""
    weights = {
        "max_in_flight": _count(holding) / limits.max_in_flight,
        "max_in_flight_bytes": holding.room.bytes / limits.max_in_flight_bytes,
        "max_parked": _parked(holding, limits),
        "max_gap": holding.tracker.gap / limits.max_gap,
    }
    return max(weights, key=weights.__getitem__)


def _count(holding: Holding) -> int:
    """Delivered and not done."""
    return len(holding.tracker.open) + len(holding.tracker.leaving) + len(holding.early.backlog)


def _parked(holding: Holding, limits: Limits) -> float:
    """Records beyond what was read of the log wait for it to be read: a pause would be for ever."""
    return 0.0 if holding.outside.unread else len(holding.outside.parking.refs) / limits.max_parked
