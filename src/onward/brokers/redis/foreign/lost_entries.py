"""Entries that were removed from a stream before their group had finished them. Each leaves a dead letter, a stub."""

import logging
import time
from collections.abc import Sequence

from onward.brokers.base import AsideRecord, Failure, State, Tries, record_id
from onward.brokers.redis.foreign.leftovers import LostEntry
from onward.brokers.redis.foreign.shard import StreamShard
from onward.brokers.redis.member import RedisMember

log = logging.getLogger("onward")


def stub(group: str, shard: StreamShard, entry: LostEntry) -> AsideRecord:
    """A dead letter without a value."""
    partition, now = shard.assigned.partition, time.time()
    message = (
        f"entry {entry.id.decode()} of stream {shard.stream} was removed before group {group} had finished it; its "
        "content is lost. Let the program that trims the stream keep more"
    )
    failure = Failure(
        reason="lost",
        error="TrimmedUnread",
        message=message,
        traceback="",
        handler=group,
        attempts=entry.deliveries,
        first=now,
        last=now,
    )
    id_ = record_id(group, shard.assigned.log_id, partition, entry.position)
    event, tries = shard.entries.lost(entry.id), Tries(entry.deliveries)
    return AsideRecord(id_, group, partition, entry.position, State.DEAD, None, event, tries, failure)


def report(member: RedisMember, shard: StreamShard, lost: Sequence[LostEntry]) -> None:
    """When their stubs are stored."""
    if not lost:
        return
    partition = shard.assigned.partition
    member.figures.lost(partition, len(lost))
    log.error(
        "%s: %d entries of stream %s were removed before group %s had finished them, from %s to %s; their stubs are in "
        "the dead letters. Let the program that trims the stream keep more",
        partition,
        len(lost),
        shard.stream,
        member.group,
        lost[0].id.decode(),
        lost[-1].id.decode(),
    )
