"""Settling: one script for each partition stores its records and its progress, or nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import ResponseError

from onward.brokers.base import AsideRecord, Progress, record_log
from onward.brokers.redis import log_scripts
from onward.brokers.redis.aside_rows import index_of, is_id, place_of, stored
from onward.brokers.redis.foreign import settling as foreign_settling
from onward.brokers.redis.foreign.anchors import verified
from onward.brokers.redis.foreign.projection import ListChange, Plan
from onward.brokers.redis.foreign.scripts import SETTLE_STREAM
from onward.brokers.redis.link import Link
from onward.brokers.redis.member import RedisHold, RedisMember
from onward.brokers.redis.progress import ProgressFields, encoded
from onward.brokers.redis.scripts import Command
from onward.brokers.redis.server_errors import explained, is_passing
from onward.event import Partition

Stored = tuple[str, bytes, bytes]


class PartitionSettle(NamedTuple):
    """What one partition gets."""

    hold: RedisHold
    progress: ProgressFields
    records: Sequence[Stored]
    gone: Sequence[str]  # places
    change: ListChange = ListChange()  # in a stream of others


class Settled(NamedTuple):
    lost: list[Partition]
    refused: dict[Partition, str]  # whose records could not be stored
    failed: dict[Partition, str]  # in which nothing was done for now, so that the call must be repeated


def parts(
    holds: Mapping[Partition, RedisHold],
    progress: Sequence[Progress],
    aside: Sequence[AsideRecord],
    gone: Sequence[str],
) -> tuple[list[PartitionSettle], dict[Partition, str]]:
    """By partition, and the partitions whose records cannot be encoded."""
    fields = {
        each.partition: encoded(each, holds[each.partition].own.count.before(each.watermark))
        for each in progress
        if each.partition in holds
    }
    records: dict[Partition, list[Stored]] = {}
    refused: dict[Partition, str] = {}
    for record in aside:
        if record.partition in holds:
            try:
                records.setdefault(record.partition, []).append(stored(record))
            except (msgspec.MsgspecError, TypeError, ValueError) as error:
                refused[record.partition] = str(error)
    places: dict[Partition, list[str]] = {}
    for id_ in filter(is_id, gone):
        for partition in _homes(holds.values(), id_):
            places.setdefault(partition, []).append(place_of(id_))
    touched = dict.fromkeys([*fields, *records, *places])
    found = [
        PartitionSettle(
            *(holds[each], fields.get(each, ProgressFields()), records.get(each, ()), places.get(each, ())),
            ListChange()
            if holds[each].own.shard is None
            else ListChange.of(each, progress, aside, places.get(each, ())),
        )
        for each in touched
        if each not in refused
    ]
    return found, refused


def _homes(holds: Iterable[RedisHold], id_: str) -> list[Partition]:
    """Where a record may be: in the partition with its log; one of a former log in any with its index."""
    holds = [hold for hold in holds if hold.partition.index == index_of(id_)]
    return [hold.partition for hold in holds if hold.log_id == record_log(id_)] or [hold.partition for hold in holds]


def settle(link: Link, member: RedisMember, settled: Sequence[PartitionSettle]) -> Settled:
    link.connect()
    checks = [verified(link, member, part.hold) for part in settled]
    answer = Settled([], {}, {})
    for part, check in zip(settled, checks, strict=True):
        _note(answer, part, check)
    settled = [part for part, check in zip(settled, checks, strict=True) if check == b"ok"]
    plans = [foreign_settling.planned(link, member, part.hold, part.change) for part in settled]
    replies = link.call(*[_command(link, member, part, plan) for part, plan in zip(settled, plans, strict=True)])
    for part, plan, reply in zip(settled, plans, replies, strict=True):
        plain = reply if plan is None else foreign_settling.noted(member, part.hold, plan, reply)
        _note(answer, part, plain)
    if answer.failed:
        link.refresh()  # the incarnation may have changed under this connection
    return answer


def _note(answer: Settled, part: PartitionSettle, reply: Any) -> None:
    partition = part.hold.partition
    if isinstance(reply, ResponseError):
        refuses = part.records and not is_passing(reply)
        (answer.refused if refuses else answer.failed)[partition] = explained(reply)
    elif reply == b"void":
        answer.failed[partition] = "the server was restarted or replaced; ownership is being checked"
    elif reply != b"ok":
        answer.lost.append(partition)


def _command(link: Link, member: RedisMember, part: PartitionSettle, plan: Plan | None) -> Command:
    keys, group = member.keyspace.of(part.hold.partition), member.group
    has_aside = part.records or part.gone or (plan and plan.acks)
    names = [keys.group(group), *((*keys.aside(group), keys.meta) if has_aside else ())]
    records = [value for record in part.records for value in record]
    fixed = (link.incarnation(keys.meta), part.hold.own.token, *part.progress, len(part.records))
    if plan is None:
        return log_scripts.SETTLE(names, *fixed, *records, *part.gone)
    return SETTLE_STREAM([keys.stream, *names], group, *plan.arguments(), *fixed, *records, *part.gone)


def projection_of(hold: RedisHold) -> PartitionSettle:
    """Nothing is settled, but the real group is made to show what was handed out."""
    return PartitionSettle(hold, ProgressFields(), (), ())
