"""Until when the group surely counts us in."""

from typing import Protocol

BEATS = 5  # in a session


class Answers(Protocol):
    """When that was sent which the coordinator took last as from a member, and which it answered last at all."""

    taken_at: float
    heard_at: float


class Contact:
    """While we are awake a client of the classic protocol tells by itself when its session has ended, up to a second
    late, for which whoever takes over waits; so its silence is an answer. After a sleep it is none: the client may go
    by an answer that came while we slept. That of KIP-848 never tells. Then only a commit will do which was sent since,
    and which the coordinator took."""

    def __init__(self, session_s: float, now: float, *, told: bool) -> None:
        self.session_s = session_s
        self.since = now  # when we were last known to be in the group
        self._told = told
        self._looked = now
        self._woke: float | None = None  # and have no proof yet that nothing was lost in our sleep

    @property
    def beat_s(self) -> float:
        return self.session_s / BEATS

    @property
    def sure_s(self) -> float:
        """A session is counted from a heartbeat, and the last one may be as old as a beat."""
        return self.session_s - self.beat_s

    @property
    def sure_until(self) -> float:
        return self.since + self.sure_s

    def look(self, now: float, answers: Answers) -> None:
        """To be called more often than hearts beat."""
        if now - self._looked > self.beat_s:
            self._woke = now
        self._looked = now
        if self._woke is None or answers.taken_at >= self._woke:
            self._woke = None
            self.since = max(self.since, now if self._told else answers.heard_at)

    def wants_proof(self, now: float) -> bool:
        return self._woke is not None or now - self.since > self.beat_s
