"""How many partitions of a topic a member should own, as far as it knows the other members."""

from collections.abc import Sequence

from onward import clock
from onward.brokers.core.share import quotas
from onward.brokers.rabbitmq.ordered.seat import TokenSeat
from onward.brokers.rabbitmq.presence import Presence
from onward.brokers.rabbitmq.registry.registry_fold import TopicEntry

_ANYWAY_S = 30.0  # how long a partition that no other member took is not given back


class FairShare:
    def __init__(self, topic: TopicEntry, presence: Presence, seats: Sequence[TokenSeat]) -> None:
        self.presence = presence
        self._topic = topic
        self._seats = seats
        self._anyway: list[float] = []  # until when these count as room

    def has_room(self) -> bool:
        return len(self._busy()) < self._quota()

    def accepted_anyway(self) -> None:
        self._anyway.append(clock.now() + _ANYWAY_S)

    def is_claimed(self, index: int) -> bool:
        """Whether another live member has this partition."""
        return any(index in note.held for note in self.presence.notes().values())

    def look(self, now: float, *, is_sure: bool) -> None:
        """Find out which partitions have no owner. `is_sure`: this member stands by, and the server takes its notes."""
        for seat in self._seats:
            seat.look(now, is_sure=is_sure and not self.presence.trouble)

    def wake(self) -> None:
        """Members may be known to be gone: those who wait for them look again."""
        for seat in self._seats:
            if seat.tenancy is not None and seat.tenancy.hold is None:
                seat.tenancy.wake()

    def surplus(self) -> list[TokenSeat]:
        """The seats whose partitions this member should give back: first those of which nothing can have run."""
        staying = [seat for seat in self._busy() if not _is_leaving(seat)]
        count = len(staying) - self._quota()
        return sorted(staying, key=lambda seat: (_is_announced(seat), -seat.partition.index))[: max(0, count)]

    def _busy(self) -> list[TokenSeat]:
        return [seat for seat in self._seats if seat.is_busy]

    def _quota(self) -> int:
        now = clock.now()
        self._anyway = [until for until in self._anyway if until > now]
        held = {owner: len(note.held) for owner, note in self.presence.notes().items()}
        held[self.presence.owner] = len(self._busy())
        found = quotas(self._topic.name, self._topic.partitions, list(held), held)
        return found[self.presence.owner] + len(self._anyway)


def _is_announced(seat: TokenSeat) -> bool:
    hold = seat.tenancy.hold if seat.tenancy is not None else None
    return hold is not None and hold.announced


def _is_leaving(seat: TokenSeat) -> bool:
    tenancy = seat.tenancy
    if tenancy is None:
        return False
    return tenancy.is_ending or (tenancy.hold is not None and tenancy.hold.revoking)
