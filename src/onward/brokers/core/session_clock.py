"""Until when a group that answers requests surely counts us in. Pure."""

from typing import Protocol

BEATS = 5  # heartbeats in a session


class Answers(Protocol):
    """When the last request was sent that the coordinator accepted from us as a member, and the last that it answered
    at all."""

    accepted_at: float
    answered_at: float


class SessionClock:
    """For a client library that keeps the session by itself.

    `reports_loss`: the client reports a lost session, up to a second late. While the process runs, no report then means
    that we are still members. After the process was suspended it means nothing: the client may rely on an answer that
    came while we were suspended. A client that never reports a loss proves nothing at any time. In both cases only a
    request counts that was sent since, and that the coordinator accepted.
    """

    def __init__(self, session_s: float, now: float, *, reports_loss: bool) -> None:
        self.session_s = session_s
        self._since = now  # when we were last known to be in the group
        self._reports_loss = reports_loss
        self._looked = now
        self._resumed: float | None = None  # when the process went on, until it is proved that nothing was lost

    @property
    def beat_s(self) -> float:
        return self.session_s / BEATS

    @property
    def sure_s(self) -> float:
        """A session is counted from a heartbeat, and the last one may be as old as a beat."""
        return self.session_s - self.beat_s

    @property
    def sure_until(self) -> float:
        return self._since + self.sure_s

    def look(self, now: float, answers: Answers) -> None:
        """To be called more often than once in a beat: a longer gap means that the process was suspended."""
        if now - self._looked > self.beat_s:
            self._resumed = now
        self._looked = now
        if self._resumed is None or answers.accepted_at >= self._resumed:
            self._resumed = None
            self._since = max(self._since, now if self._reports_loss else answers.answered_at)

    def wants_proof(self, now: float) -> bool:
        """A request should be sent, so that its answer extends `sure_until`."""
        return self._resumed is not None or now - self._since > self.beat_s
