"""Until when this member is certain that it owns its partitions."""

from onward import clock
from onward.brokers.core.session_clock import SessionClock
from onward.brokers.kafka.commits import Commits
from onward.brokers.kafka.hold import KafkaHoldings

_PROVE_S = 0.25  # between two commits that are sent to prove that we are members


class Certainty:
    """Only the member's thread calls `look`; any thread may read the properties."""

    def __init__(
        self, session: SessionClock, commits: Commits, holdings: KafkaHoldings, *, max_poll_gap_s: float
    ) -> None:
        self._session = session
        self._commits = commits
        self._holdings = holdings
        self._max_poll_gap_s = max_poll_gap_s
        self._polled_at = clock.now()
        self._prove_at = 0.0
        self._was_sure = True

    def polled(self) -> None:
        """Receive is being called."""
        self._polled_at = clock.now()

    @property
    def is_idle(self) -> bool:
        """Receive was not called for `max_poll_gap_s`, so this member should leave the group."""
        return clock.now() - self._polled_at > self._max_poll_gap_s

    @property
    def sure_s(self) -> float:
        return self._session.sure_s

    @property
    def session_ended(self) -> bool:
        """The coordinator may have ended our session."""
        return clock.now() > self._session.sure_until

    @property
    def sure_until(self) -> float:
        if not self._holdings.held:
            return clock.now() + self._session.sure_s
        return min(self._session.sure_until, self._polled_at + self._max_poll_gap_s)

    def set_session(self, session_s: float) -> None:
        """The group, not this member, decides how long a session is."""
        self._session.session_s = session_s

    def look(self) -> None:
        """Call this more often than once in a fifth of a session."""
        now = clock.now()
        self._session.look(now, self._commits)
        if self._session.wants_proof(now) and now >= self._prove_at:
            self._prove_at = now + _PROVE_S
            self._commits.prove()
        is_sure = now < self._session.sure_until
        if is_sure and not self._was_sure:
            self._holdings.bell.ring()  # ownerships and events were withheld
        self._was_sure = is_sure
