"""Entries of other programs' streams, as they were read. One that does not fit the mapping is stored as a dead letter,
so that it stops nothing."""

import logging
import time

from redis.exceptions import ResponseError

from onward.brokers.base import AsideRecord, Failure, State, Tries, record_id
from onward.brokers.redis.aside_rows import stored
from onward.brokers.redis.foreign.anchors import anchor_of
from onward.brokers.redis.foreign.leftovers import LostEntry
from onward.brokers.redis.foreign.lost_entries import report, stub
from onward.brokers.redis.foreign.shard import DecodedEntries, StreamShard, UnfitEntry
from onward.brokers.redis.link import Link
from onward.brokers.redis.log_scripts import SETTLE
from onward.brokers.redis.member import RedisHold, RedisMember
from onward.brokers.redis.positions import id_of
from onward.brokers.redis.progress import ProgressFields
from onward.brokers.redis.server_errors import explained

log = logging.getLogger("onward")


def decoded(
    link: Link, member: RedisMember, hold: RedisHold, entries: list[tuple[bytes, list[bytes]]]
) -> DecodedEntries:
    """What can be passed on. An entry that does not fit is skipped once its dead letter is stored, and at once in a
    passing group."""
    shard = hold.own.shard
    assert shard is not None, "a stream of others"
    if entries:
        shard.anchor = anchor_of(*entries[-1])
    found = shard.decoded(entries, hold.ahead.position)
    lost = [LostEntry(id_of(each).encode(), each) for each in found.missing]
    letters = [] if member.is_passing else [_letter(member.group, shard, each) for each in found.unfit]
    letters += [stub(member.group, shard, each) for each in lost]
    if letters and (why := buried(link, member, hold, letters)):
        first = min(each.position for each in letters)
        return found.before(first, f"entry {id_of(first)}: its dead letter cannot be stored: {why}")
    for each in found.unfit:
        _report_unfit(member, hold, each)
    report(member, shard, lost)
    if shard.projection is not None:
        shard.projection.saw([each.position for each in found.deliveries])
        shard.projection.buried([each.position for each in letters])
    return found


def _report_unfit(member: RedisMember, hold: RedisHold, unfit: UnfitEntry) -> None:
    if member.is_passing:  # it has no dead letters
        log.warning("%s: %s; skipped", hold.partition, unfit.why)
    else:
        log.error("%s of group %s: %s; it is a dead letter now", hold.partition, member.group, unfit.why)


def buried(link: Link, member: RedisMember, hold: RedisHold, letters: list[AsideRecord]) -> str:
    """Store these dead letters. Returns why that failed, or ""."""
    keys = member.keyspace.of(hold.partition)
    records = [value for each in letters for value in stored(each)]
    fixed = (link.incarnation(keys.meta), hold.own.token, *ProgressFields(), len(letters))
    names = [keys.group(member.group), *keys.aside(member.group), keys.meta]
    (reply,) = link.call(SETTLE(names, *fixed, *records))
    if isinstance(reply, ResponseError):
        return explained(reply)
    return "" if reply == b"ok" else "ownership is being checked"


def _letter(group: str, shard: StreamShard, unfit: UnfitEntry) -> AsideRecord:
    partition, now = shard.assigned.partition, time.time()
    id_ = record_id(group, shard.assigned.log_id, partition, unfit.position)
    failure = Failure("undecodable", "Undecodable", unfit.why, "", "", 0, now, now)
    event = shard.entries.damaged(unfit.id, unfit.fields)
    return AsideRecord(id_, group, partition, unfit.position, State.DEAD, None, event, Tries(), failure)
