"""How a consumer of a token queue finds the newest token, and how an owner writes tokens. Pure: deliveries in,
reactions out; `seat.py` carries them out.

    stand by ─ first delivery ─▶ send a probe ─ the probe is back ─▶ newest token ─ claim ─ the claim is back ─▶ owner

An owner's write counts only when the token was delivered back to it for the first time. The server confirms a message
also if another consumer is active meanwhile. A delivery proves that we were the active consumer when the queue stored
the token.
"""

from enum import Enum
from typing import NamedTuple

from onward.brokers.rabbitmq.ordered.token import Probe, Stray, Token, TokenArrival, newer

MANY_UNACKED = 25  # acknowledge what is replaced; the server delivers at most PREFETCH unacknowledged messages
PREFETCH = 50


class TokenStep(Enum):
    GOES_ON = "goes on"
    PROBE = "send the probe"
    FOUND = "the newest token is known"
    STORED = "the token that was written last is stored"
    LATER = "the queue has a token of a later version, which must not be replaced"
    LOST = "another member may be the owner"


class Reaction(NamedTuple):
    """What to do after a delivery. `acks`: tags to acknowledge one by one. `ack_to`: acknowledge this tag and all lower
    ones; 0: none."""

    step: TokenStep = TokenStep.GOES_ON
    acks: tuple[int, ...] = ()
    ack_to: int = 0
    why: str = ""


def _lost(why: str) -> Reaction:
    return Reaction(TokenStep.LOST, why=why)


class Takeover:
    """From the first delivery to the newest token. `newest` is None if the queue has no token."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.newest: Token | None = None
        self.unacked: list[int] = []
        self._newest_tag = 0
        self._probed = False

    @property
    def is_active(self) -> bool:
        """The server has made us the active consumer."""
        return self._probed

    def delivered(self, arrival: TokenArrival) -> Reaction:
        self.unacked.append(arrival.tag)
        message = arrival.message
        if isinstance(message, Stray):
            if message.is_newer:
                return Reaction(TokenStep.LATER)
        elif isinstance(message, Token):
            if message.has_room:
                self._compare(message, arrival.tag)
        elif message == self.probe:
            if arrival.redelivered:  # returned messages come first, so it says nothing about those behind it
                return _lost("the probe was delivered to another member first")
            return Reaction(TokenStep.FOUND, self._spare())
        if not self._probed:
            self._probed = True
            return Reaction(TokenStep.PROBE)
        return Reaction(acks=self._spare())

    def _compare(self, token: Token, tag: int) -> None:
        best = newer(self.newest, token)
        if best is not self.newest:
            self.newest, self._newest_tag = best, tag

    def _spare(self) -> tuple[int, ...]:
        """If many messages are unacknowledged: all but the newest token."""
        return self.spare() if len(self.unacked) > MANY_UNACKED else ()

    def spare(self) -> tuple[int, ...]:
        """All but the newest token. They are not needed once that one is known."""
        spare = tuple(tag for tag in self.unacked if tag != self._newest_tag)
        self.unacked = [self._newest_tag] if self.newest is not None else []
        return spare


class Tenure:
    """One ownership of a token, from its claim on. At most one token is on its way at a time."""

    def __init__(self, name: str, unacked: list[int]) -> None:
        """`unacked`: the deliveries that the takeover left."""
        self.name = name
        self.held: Token | None = None  # the last one that came back
        self.sure_since = 0.0  # when that one was sent
        self.sent: Token | None = None  # the one that is on its way
        self.sent_at = 0.0
        self._unacked = unacked

    def send(self, token: Token, now: float) -> None:
        """This token is being sent now."""
        assert self.sent is None, "the last token must come back first"
        assert token.tenure == self.name, "an owner writes only tokens of its own"
        assert self.held is None or token.order > self.held.order, "tokens of an owner ascend"
        self.sent, self.sent_at = token, now

    def delivered(self, arrival: TokenArrival) -> Reaction:
        self._unacked.append(arrival.tag)
        message = arrival.message
        if not isinstance(message, Token):
            return self._passed_over(arrival.tag)
        if message.tenure == self.name:
            return self._own(arrival, message)
        mine = self.held or self.sent
        if mine is not None and message.order >= mine.order:
            return _lost(f"another member has written a token with fence {message.fence}")
        return self._passed_over(arrival.tag)

    def is_overdue(self, now: float, lease_s: float) -> bool:
        """The token that was sent last has not come back in the time of a lease."""
        return self.sent is not None and now > self.sent_at + lease_s

    def _own(self, arrival: TokenArrival, token: Token) -> Reaction:
        if arrival.redelivered:
            return _lost("its token was delivered to another member in between")
        if self.sent is None or token.order != self.sent.order:
            return _lost("a token came back that was not on its way")
        self.held, self.sure_since, self.sent = self.sent, self.sent_at, None
        below, self._unacked = self._unacked[:-1], self._unacked[-1:]
        return Reaction(TokenStep.STORED, ack_to=max(below, default=0))

    def _passed_over(self, tag: int) -> Reaction:
        """A probe, a late token of a former owner, or a message of another program. Before the claim is stored nothing
        is acknowledged, because the next owner may need it."""
        if self.held is None:
            return Reaction()
        self._unacked.remove(tag)
        return Reaction(acks=(tag,))
