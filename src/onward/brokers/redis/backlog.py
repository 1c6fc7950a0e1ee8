"""How much of a topic some group has not finished, and how much of it a partition may have."""

from collections.abc import Sequence

from onward.brokers.redis.keys import Keyspace, PartitionKeys
from onward.brokers.redis.link import Link
from onward.brokers.redis.log_scripts import BACKLOG
from onward.brokers.redis.scripts import Command
from onward.brokers.redis.topics import RedisTopics
from onward.event import Partition

_TRIES = 3


class BacklogLimit:
    """Spreads `max_backlog_bytes` over a topic's partitions. A partition at its allowance asks for the true figures of
    all, which gives it a share of what is left. Other publishers do the same, so that the sum may be over the limit by
    what they store between two looks."""

    def __init__(self, topics: RedisTopics, max_bytes: int) -> None:
        self._topics = topics
        self._max_bytes = max_bytes
        self._allowances: dict[Partition, int] = {}

    def allowance(self, partition: Partition, partitions: int) -> int:
        return self._allowances.get(partition, self._max_bytes // partitions)

    def refreshed(self, link: Link, partition: Partition, size: int) -> str:
        """Look again. Returns why these bytes are refused; empty: try again."""
        topic = self._topics.known(partition.topic)
        count = topic.partitions if topic is not None else partition.index + 1
        found = _backlogs(link, self._topics.keyspace, [Partition(partition.topic, index) for index in range(count)])
        left = self._max_bytes - sum(backlog for backlog, _ in found.values())
        for each, (backlog, _) in found.items():
            self._allowances[each] = backlog + max(0, left) // count
        backlog, slowest = found[partition]
        if size <= left:
            self._allowances[partition] = max(self._allowances[partition], backlog + size)
            return ""
        return _complaint(partition.topic, self._max_bytes, slowest)


def _backlogs(link: Link, keyspace: Keyspace, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, str]]:
    """The bytes that some group has not finished, and the group that has the most of them."""
    found: dict[Partition, tuple[int, str]] = {}
    for _ in range(_TRIES):
        left = [each for each in partitions if each not in found]
        if not left:
            break
        sets = link.ask(*[("SMEMBERS", keyspace.of(each).groups) for each in left])
        groups = [[name.decode() for name in names] for names in sets]
        replies = link.ask(*map(_figures, map(keyspace.of, left), groups))
        for each, names, reply in zip(left, groups, replies, strict=True):
            if reply[0] == b"ok":
                found[each] = int(reply[1]), names[reply[2] - 1] if reply[2] else ""
    return dict.fromkeys(partitions, (0, "")) | found


def _figures(keys: PartitionKeys, groups: Sequence[str]) -> Command:
    return BACKLOG([*keys.log, *map(keys.group, groups)])


def _complaint(topic: str, max_bytes: int, slowest: str) -> str:
    over = (
        f"topic {topic}: its unfinished events, including those set aside for a retry, would exceed "
        f"max_backlog_bytes={max_bytes:,}; "
    )
    if not slowest:
        return f"{over}no group reads it, so all of its events are kept; start its consumers, or raise the limit"
    return (
        f"{over}group {slowest} is the furthest behind; start, repair or speed up its consumers, drop it with `onward "
        f"groups drop {slowest} --topic {topic}`, or raise the limit"
    )
