"""Settling in other programs' streams: the progress is stored, and the real group is made to show it."""

import logging
from typing import Any

from redis.exceptions import ResponseError

from onward.brokers.redis.foreign.other_consumers import beside_us
from onward.brokers.redis.foreign.projection import ListChange, Plan, Projection
from onward.brokers.redis.foreign.scripts import CONSUMER
from onward.brokers.redis.link import Link
from onward.brokers.redis.member import RedisHold, RedisMember
from onward.brokers.redis.positions import position_of

log = logging.getLogger("onward")

_PAGE = 1_000  # pending entries looked at together


def planned(link: Link, member: RedisMember, hold: RedisHold, change: ListChange) -> Plan | None:
    """What must change in the pending list; None: the partition has no real group, or another consumer reads it."""
    shard = hold.own.shard
    if shard is None or shard.projection is None or shard.intruders:
        return None
    if not shard.projection.is_loaded:
        _load(link, member.group, shard.stream, shard.projection)
    appended, ahead = hold.own.count.appended, hold.ahead
    added = None if appended is None else appended - ahead.events
    return shard.projection.plan(change, ahead.next_out)._replace(added=added)


def noted(member: RedisMember, hold: RedisHold, plan: Plan, reply: Any) -> Any:
    """The answer to SETTLE_STREAM, as one to SETTLE."""
    shard = hold.own.shard
    assert shard is not None, "a stream of others"
    assert shard.projection is not None, "a real group"
    if isinstance(reply, ResponseError):
        return reply
    answer, *rest = reply
    if answer == b"foreign":
        names = sorted(name.decode(errors="backslashreplace") for name in rest)
        shard.intruders = ", ".join(names) or "an unknown consumer"  # the reclaimer writes it to the log
        hold.own.damage = beside_us(shard.stream, member.group, names)
        return b"ok"
    if answer in (b"ok", b"created"):
        if answer == b"created":
            log.warning("group %s of stream %s was removed; it is created again", member.group, shard.stream)
        kept = [position for id_ in rest if (position := position_of(id_)) is not None]
        shard.projection.projected(plan, kept, is_new=answer == b"created")
        return b"ok"
    return answer


def _load(link: Link, group: str, stream: str, projection: Projection) -> None:
    """The pending list under our name. A group that is missing has none."""
    pending: dict[int, int] = {}
    start = "-"
    while True:
        (rows,) = link.call(("XPENDING", stream, group, start, "+", _PAGE, CONSUMER))
        if isinstance(rows, ResponseError) or not rows:
            break
        found = {position_of(id_): count for id_, _, _, count in rows}
        pending |= {position: count for position, count in found.items() if position is not None}
        start = f"({rows[-1][0].decode()}"
    projection.load(pending)
