"""How long to leave something alone that cannot be reached."""

_SHORTEST_S = 0.2
_LONGEST_S = 10.0


class Outage:
    """Pure. It is asked again after as long as it has been away already, however many ask: so the pauses double."""

    def __init__(self) -> None:
        self.why = ""  # empty: there is none
        self._since = 0.0

    def met(self, why: str, now: float) -> float:
        """It could not be reached. Returns how many seconds to wait."""
        if not self.why:
            self._since = now
        self.why = why
        return min(max(now - self._since, _SHORTEST_S), _LONGEST_S)

    def over(self) -> None:
        self.why = ""
