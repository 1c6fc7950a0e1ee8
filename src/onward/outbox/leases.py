"""What a relay does about its leases in one turn. Pure: the store reads the view and writes the plan."""

from collections.abc import Collection, Sequence

from onward.brokers.core.observed import Observed
from onward.brokers.core.share import Seat, wish
from onward.event import Partition
from onward.outbox.base import LeasePlan, RelaysView, ShardState

_TURNS_PER_LEASE = 10
_LONGEST_PAUSE_S = 1.0  # so that the shards of a dead relay are free one second after its lease at the latest
_SAFETY = 0.8  # the part of the lease within which we may publish: clocks differ, and a call takes time
_TOPIC = "outbox"  # the fair share is computed for partitions of a topic


class RelayLeases:
    """Decides for one relay. It remembers when it saw the beats of the others, by its own clock."""

    def __init__(self, name: str, lease_s: float) -> None:
        self.name = name
        self.lease_s = lease_s
        self.yielding: frozenset[int] = frozenset()  # shards of ours that another relay should have
        self.retiring = False
        self._observed = Observed()
        self._ends: tuple[float, ...] = ()  # when the leases of other relays end, if their beats do not change

    def decide(self, view: RelaysView, now: float, busy: Collection[int]) -> LeasePlan:
        """The plan for this turn. `busy`: shards whose rows are being published, so they cannot be given back yet."""
        ended = self._ended(view, now)
        mine = [shard.number for shard in view.shards if shard.owner == self.name]
        if self.retiring:
            return LeasePlan(release=mine, strike=ended, leave=True)
        alive = sorted({self.name, *(relay.name for relay in view.relays if relay.name not in ended)})
        wanted = wish(_TOPIC, self.name, [_seat(shard, alive) for shard in view.shards], alive, leaving=0)
        spare = sorted(mine)[len(mine) - wanted.surplus :]
        self.yielding = frozenset(spare).intersection(busy)
        free = [seat.partition.index for seat in wanted.claim]
        return LeasePlan(free, [number for number in spare if number not in busy], ended)

    def sure_until(self, sent_at: float) -> float:
        """Until when our shards are surely ours, if a turn that was sent at this time has succeeded."""
        return sent_at + self.lease_s * _SAFETY

    def next_turn(self, now: float) -> float:
        """When to take the next turn: to renew our lease, or because the lease of another relay may end."""
        pause_s = min(self.lease_s / _TURNS_PER_LEASE, _LONGEST_PAUSE_S)
        return min([now + pause_s, *(end for end in self._ends if end > now)])

    def _ended(self, view: RelaysView, now: float) -> Sequence[str]:
        """The relays whose beats have not changed for the time of their lease."""
        others = [relay for relay in view.relays if relay.name != self.name]
        for relay in others:
            self._observed.saw(relay.name, relay.beat, now)
        ends = {relay.name: self._observed.over_at(relay.name, relay.lease_s) or now for relay in others}
        ended = [name for name, end in ends.items() if end <= now]
        self._observed.forget(set(ended))
        self._ends = tuple(end for end in ends.values() if end > now)
        return ended


def _seat(shard: ShardState, alive: Sequence[str]) -> Seat:
    return Seat(Partition(_TOPIC, shard.number), shard.owner if shard.owner in alive else None, shard.fence)
