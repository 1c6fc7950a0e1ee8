"""Entries that were removed from a stream before their group had finished them. Each leaves a dead letter, a stub."""

import logging
import time
from collections.abc import Sequence

from onward.brokers.base import AsideRecord, Failure, State, Tries, record_id
from onward.brokers.redis.foreign.leftovers import LostEntry
from onward.brokers.redis.foreign.shard import StreamShard
from onward.brokers.redis.member import RedisMember
from onward.event import Partition

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
    partition, first, last = shard.assigned.partition, lost[0].id.decode(), lost[-1].id.decode()
    member.figures.lost(partition, len(lost))
    log.error(
        "%s: %s of stream %s removed before group %s had finished %s, %s; the stubs are in the dead letters. Let the "
        "program that trims the stream keep more",
        *(partition, entries(len(lost)), f"{shard.stream} {'was' if len(lost) == 1 else 'were'}", member.group),
        "it" if len(lost) == 1 else "them",
        first if len(lost) == 1 else f"from {first} to {last}",
    )


def report_unread(member: RedisMember, partition: Partition, missing: int) -> None:
    """So many entries were removed that no consumer of the group was given. Their ids are unknown."""
    if not missing or member.is_passing:  # a passing group has no claim to them
        return
    member.figures.lost(partition, missing)
    log.error(
        "%s: %s of stream %s removed before group %s had read %s; the content is lost. Let the program that trims the "
        "stream keep more",
        *(partition, entries(missing), f"{member.keyspace.of(partition).stream} {'was' if missing == 1 else 'were'}"),
        *(member.group, "it" if missing == 1 else "them"),
    )


def entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count:,} entries"
