"""Whether another member's lease is over, by our own clock. Pure."""

from typing import NamedTuple


class _Seen(NamedTuple):
    beat: object
    since: float


class Observed:
    """A lease is over when its beat has not changed for the owner's lease time on *our* boot clock. No other clock is
    compared, so no step of one matters. A restart or fail-over that sets a beat back counts as a change."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def saw(self, name: str, beat: object, now: float) -> None:
        """The store shows this beat, whatever it is made of."""
        seen = self._seen.get(name)
        if seen is None or seen.beat != beat:
            self._seen[name] = _Seen(beat, now)

    def over_at(self, name: str, lease_s: float) -> float | None:
        """When the lease ends if its beat does not change; None: it was never seen."""
        seen = self._seen.get(name)
        return None if seen is None else seen.since + lease_s

    def is_over(self, name: str, lease_s: float, now: float) -> bool:
        """What was never seen is not over: it must be watched for a whole lease first."""
        over_at = self.over_at(name, lease_s)
        return over_at is not None and now >= over_at

    def forget(self, names: set[str]) -> None:
        """These are gone from the store."""
        for name in names & self._seen.keys():
            del self._seen[name]
