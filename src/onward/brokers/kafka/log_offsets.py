"""The offsets of partitions: their beginnings, their ends, or their first events at a time. Calls block."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicPartition

from onward import clock
from onward.brokers.kafka.client import explained
from onward.event import Partition

ASK_S = 2.0  # short compared with a session, because the member's thread waits for the answer
_REFRESH_S = 1.0
_AGAIN_S = 0.05
_PASSING = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.FENCED_LEADER_EPOCH,  # a leader that has restarted
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._NOENT,  # the client has found no leader
        KafkaError._TIMED_OUT,  # the leader that it has found is dead
    }
)


def offsets(admin: Any, partitions: Sequence[Partition], spec: Any, *, within_s: float = ASK_S) -> dict[Partition, int]:
    """The offset of each partition; while a leader is being replaced, the request is repeated.

    KafkaException or BrokerError: a leader did not answer; ask again later."""
    end = clock.now() + within_s
    while True:
        try:
            return _offsets(admin, partitions, spec)
        except (KafkaException, TimeoutError) as error:
            if isinstance(error, KafkaException) and error.args[0].code() not in _PASSING:
                raise
            time.sleep(_AGAIN_S)
            with contextlib.suppress(KafkaException):
                # The client keeps its list of leaders until metadata is requested, so later requests would fail too.
                admin.list_topics(timeout=_REFRESH_S)
            if clock.now() > end:
                raise explained(error, f"reading the offsets of {partitions[0].topic}") from error


def _offsets(admin: Any, partitions: Sequence[Partition], spec: Any) -> dict[Partition, int]:
    asked = {TopicPartition(*each): spec for each in partitions}
    futures = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=ASK_S)
    found = {Partition(each.topic, each.partition): future.result(ASK_S).offset for each, future in futures.items()}
    for partition, offset in found.items():
        if offset == OFFSET_INVALID:  # librdkafka reports this, and no error, for a leader that did not answer
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"the leader of {partition} does not answer"))
    return found
