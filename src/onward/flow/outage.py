"""How long to wait before the next try to reach a service that is down."""

_SHORTEST_S = 0.2
_LONGEST_S = 10.0


class Outage:
    """Pure. The next pause is as long as the outage so far, however many callers there are. So the pauses double."""

    def __init__(self) -> None:
        self.why = ""  # empty: there is no outage
        self._since = 0.0

    def met(self, why: str, now: float) -> float:
        """The service could not be reached. Returns how many seconds to wait."""
        if not self.why:
            self._since = now
        self.why = why
        return min(max(now - self._since, _SHORTEST_S), _LONGEST_S)

    def over(self) -> None:
        self.why = ""
