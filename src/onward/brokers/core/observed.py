"""Whether another member's lease has ended, by our own clock. Pure."""

from typing import NamedTuple


class _Seen(NamedTuple):
    beat: object
    since: float


class Observed:
    """Observes the beats of other members, which grow with every renewal of a lease.

    A lease has ended if its beat has not changed for the owner's lease time, measured with *our* boot clock. No other
    clock is read, so it does not matter if one is changed. If a restart or a fail-over sets a beat back, that counts as
    a change."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def saw(self, name: str, beat: object, now: float) -> None:
        """Remember the beat that the store shows. It can be any value that is compared with `==`."""
        seen = self._seen.get(name)
        if seen is None or seen.beat != beat:
            self._seen[name] = _Seen(beat, now)

    def over_at(self, name: str, lease_s: float) -> float | None:
        """When the lease ends if its beat does not change. None if it was never seen."""
        seen = self._seen.get(name)
        return None if seen is None else seen.since + lease_s

    def is_over(self, name: str, lease_s: float, now: float) -> bool:
        """Whether the lease has ended. A lease that was never seen has not: it must first be observed for a full lease
        time."""
        over_at = self.over_at(name, lease_s)
        return over_at is not None and now >= over_at

    def forget(self, names: set[str]) -> None:
        """Forget members that were removed from the store."""
        for name in names & self._seen.keys():
            del self._seen[name]
