"""How many messages a producer has sent, from its statistics. These separate events that were never sent from events
that may be stored."""

import time
from collections.abc import Callable, Mapping

import msgspec

from onward import clock

INTERVAL_S = 1.0


class _PartitionCounts(msgspec.Struct):
    txmsgs: int  # a message that is sent twice counts twice
    acked_msgid: int  # messages are numbered from 1 and accepted in order


class _TopicCounts(msgspec.Struct):
    partitions: dict[str, _PartitionCounts]


class _Statistics(msgspec.Struct):
    ts: int
    topics: dict[str, _TopicCounts]


class SentCounts:
    """Without these counts, events that were never sent would be reported as `unknown`: events of other calls and
    partitions when the broker refuses one event, and all events that are published during an outage."""

    def __init__(self) -> None:
        self._latest = ""

    def update(self, statistics: str) -> None:
        """Called by the producer every INTERVAL_S, within a poll."""
        self._latest = statistics

    def unaccepted(self, poll: Callable[[], object]) -> Mapping[tuple[str, int], int] | None:
        """By partition: how many messages were sent, once or more often, beyond those that were accepted. None: the
        producer does not report. `poll` serves the producer, which has no message left."""
        since_us = int(time.monotonic() * 1_000_000)  # librdkafka's clock
        end = clock.now() + 3 * INTERVAL_S
        self._latest = ""
        while clock.now() < end:
            poll()
            if self._latest and (found := msgspec.json.decode(self._latest, type=_Statistics)).ts >= since_us:
                return {
                    (topic, int(index)): counts.txmsgs - counts.acked_msgid
                    for topic, each in found.topics.items()
                    for index, counts in each.partitions.items()
                }
        return None
