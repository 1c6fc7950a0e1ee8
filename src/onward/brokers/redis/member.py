"""One member of a group on Redis: who it is, what it holds, and how long its leases last."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onward.brokers.base import PASSING, Start
from onward.brokers.core.holdings import Hold, Holdings
from onward.brokers.redis.event_count import EventCount
from onward.brokers.redis.foreign.shard import StreamShard
from onward.brokers.redis.keys import Keyspace, PartitionKeys, TopicKeys
from onward.brokers.redis.positions import hex_of, joined
from onward.brokers.redis.stream_figures import StreamFigures
from onward.event import Partition

LEAST_BATCH = 16
_PASSING_S = 3_600.0  # how long a passing group is stored when its members are gone


class RedisPlace:
    """What the broker keeps with an ownership."""

    __slots__ = (
        *("batch", "count", "damage", "is_gone", "largest", "mean_bytes", "rests_until", "shard", "sure_until"),
        "token",
    )

    def __init__(
        self, token: str, *, is_gone: bool, count: int | None = None, shard: StreamShard | None = None
    ) -> None:
        self.token = token  # under which the server knows this ownership
        self.sure_until = 0.0  # when the lease lapses, unless it is renewed
        self.shard = shard  # if the stream belongs to others
        self.is_gone = is_gone  # no process of the owner before is left
        self.count = EventCount(count)
        self.damage = ""  # why it cannot be read further
        self.rests_until = 0.0  # when that is tried again
        self.batch = LEAST_BATCH  # how many entries to read at once; it grows with each full batch
        self.mean_bytes = 0.0  # of the entries that were read last
        self.largest = 0  # bytes of the largest entry, as far as we know


RedisHold = Hold[RedisPlace]
RedisHoldings = Holdings[RedisPlace]


class RedisMember(NamedTuple):
    """Who joins what."""

    group: str
    owner: str  # the member's text with a suffix of this subscription's own
    topics: Sequence[str]
    start: Start
    epochs: Iterator[int]
    gone: frozenset[str]  # the names of members that have no process left
    keyspace: Keyspace
    figures: StreamFigures

    @property
    def is_passing(self) -> bool:
        return self.group.startswith(PASSING)

    @property
    def real_group(self) -> str:
        """The name of its consumer group in streams of others. A passing group has none, so that none is left there."""
        return "" if self.is_passing else self.group

    @property
    def ttl_ms(self) -> str:
        return str(int(_PASSING_S * 1000)) if self.is_passing else ""

    def key(self, partition: Partition) -> str:
        return self.keyspace.of(partition).group(self.group)

    def members(self, topic: str) -> str:
        return TopicKeys(topic).members(self.group)

    def news(self, topic: str) -> str:
        return TopicKeys(topic).news(self.group)

    def claim_keys(self, partition: Partition) -> list[str]:
        keys = self.keyspace.of(partition)
        return [keys.group(self.group), keys.meta, keys.stream, keys.moves(self.group), keys.marks]

    def join_keys(self, keys: PartitionKeys) -> list[str]:
        return [
            keys.stream,
            keys.meta,
            keys.group(self.group),
            keys.passing if self.is_passing else keys.groups,
            keys.marks,
        ]


def start_text(start: Start) -> str:
    """As JOIN takes it."""
    if isinstance(start, str):
        return start
    position = joined(int(max(0.0, start) * 1000))
    return "latest" if position is None else hex_of(position)
