"""How long we are surely members of a group, for brokers whose client library keeps the session. Pure."""

from typing import Protocol

BEATS = 5  # heartbeats in a session


class Answers(Protocol):
    """Send times of our requests to the coordinator."""

    accepted_at: float  # of the last request that it accepted from us as a member
    answered_at: float  # of the last request that it answered at all


class SessionClock:
    """Calculates `sure_until` for a client library that keeps the session by itself.

    `reports_loss`: the client reports a lost session, up to a second late. While the process runs, no report means that
    we are still members. After the process was suspended, no report proves nothing, because the client may rely on an
    answer that arrived during the suspension. A client that never reports a loss proves nothing at any time. In both
    cases the only proof is a request that we sent since then and that the coordinator accepted.
    """

    def __init__(self, session_s: float, now: float, *, reports_loss: bool) -> None:
        self.session_s = session_s
        self._since = now  # the last time at which we were surely in the group
        self._reports_loss = reports_loss
        self._looked = now
        self._resumed: float | None = None  # when a suspension ended, until it is proved that we are still members

    @property
    def beat_s(self) -> float:
        return self.session_s / BEATS

    @property
    def sure_s(self) -> float:
        """The session less one heartbeat interval: the session starts at the last heartbeat, which may be one interval
        old."""
        return self.session_s - self.beat_s

    @property
    def sure_until(self) -> float:
        return self._since + self.sure_s

    def look(self, now: float, answers: Answers) -> None:
        """Update `sure_until`. Call it more often than once per heartbeat interval: a longer pause between two calls is
        taken as a suspension of the process."""
        if now - self._looked > self.beat_s:
            self._resumed = now
        self._looked = now
        if self._resumed is None or answers.accepted_at >= self._resumed:
            self._resumed = None
            self._since = max(self._since, now if self._reports_loss else answers.answered_at)

    def wants_proof(self, now: float) -> bool:
        """Whether to send a request, so that its answer extends `sure_until`."""
        return self._resumed is not None or now - self._since > self.beat_s
