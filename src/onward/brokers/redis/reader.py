"""Reading the log: an XRANGE for each partition, followed by the owner's token.

A read changes nothing, a token never comes back, and commands of one connection run in order. If the token is ours
after the read, it was ours during it.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import ResponseError

from onward import clock
from onward.brokers.core.holdings import Chunk
from onward.brokers.redis.foreign.anchors import verified
from onward.brokers.redis.foreign.reading import decoded
from onward.brokers.redis.foreign.shard import DecodedEntries
from onward.brokers.redis.link import Link
from onward.brokers.redis.member import LEAST_BATCH, RedisHold, RedisHoldings, RedisMember
from onward.brokers.redis.positions import id_of, position_of
from onward.brokers.redis.scripts import Command
from onward.brokers.redis.server_errors import explained, is_passing
from onward.event import Delivery, Event

log = logging.getLogger("onward")

_REST_S = 5.0  # between two attempts to read what cannot be read
_SHORT_REST_S = 0.2  # while the server cannot answer for now, or a slot is on its way to another node
_MOST = 1_000  # entries of one partition in one reply
_WORST = 4  # how many times its room a reply may take, if all of its entries are as large as the largest
_decode = msgspec.msgpack.Decoder(Event).decode


class Read(NamedTuple):
    """What the server answered for one partition."""

    hold: RedisHold
    entries: Sequence[Any]
    asked: int
    is_ours: bool
    error: str = ""
    is_passing: bool = False  # the keeper of the leases reports the error
    decoded: DecodedEntries | None = None  # of a stream of others

    @property
    def is_exhausted(self) -> bool:
        return len(self.entries) < self.asked


def wanted(holdings: RedisHoldings, limit: int, max_bytes: int) -> list[tuple[RedisHold, int]]:
    """The partitions to read from and how many entries of each: its share of a receive, at least one. A partition that
    had as many as were asked for gets a larger share the next time."""
    now = clock.now()
    flowing = [hold for hold in holdings.flowing() if hold.own.rests_until <= now]
    if not flowing:
        return []
    total = sum(hold.own.batch for hold in flowing)
    room = max(1, max_bytes // len(flowing))
    found = []
    for hold in flowing:
        own, ahead = hold.own, hold.ahead
        share = own.batch if total <= limit else max(1, limit * own.batch // total)
        fits = int((room - ahead.bytes) / own.mean_bytes) if own.mean_bytes else share
        if own.largest:
            fits = min(fits, (_WORST * room - ahead.bytes) // own.largest)
        count = min(share - ahead.events, fits)
        if count > 0 or not ahead.events:
            found.append((hold, max(1, count)))
    return found


def read(link: Link, member: RedisMember, wants: Sequence[tuple[RedisHold, int]]) -> list[Read]:
    commands: list[Command] = []
    link.connect()
    unsure = [Read(hold, (), count, False) for hold, count in wants if verified(link, member, hold) != b"ok"]
    wants = [(hold, count) for hold, count in wants if all(each.hold is not hold for each in unsure)]
    for hold, count in wants:
        keys = member.keyspace.of(hold.partition)
        commands.append(("XRANGE", keys.stream, id_of(hold.ahead.position), "+", "COUNT", count))
        commands.append(("HMGET", keys.group(member.group), "owner", "inc"))
        commands.append(("HGET", keys.meta, "largest"))
    replies = link.call(*commands)
    answers = zip(wants, replies[::3], replies[1::3], strict=True)
    for (hold, _), largest in zip(wants, replies[2::3], strict=True):
        _note_largest(hold, largest)
    found = [
        _answer(link.incarnation(member.key(hold.partition)), hold, count, entries, owner)
        for (hold, count), entries, owner in answers
    ]
    found = [each if each.hold.own.shard is None else _foreign(link, member, each) for each in found]
    return [*found, *unsure]


def _note_largest(hold: RedisHold, largest: Any) -> None:
    if isinstance(largest, bytes) and largest.isdigit():
        hold.own.largest = int(largest)


def _foreign(link: Link, member: RedisMember, found: Read) -> Read:
    return found._replace(decoded=decoded(link, member, found.hold, list(found.entries)))


def _answer(incarnation: str, hold: RedisHold, count: int, entries: Any, owner: Any) -> Read:
    for reply in (entries, owner):
        if isinstance(reply, ResponseError):
            return Read(hold, (), count, True, explained(reply), is_passing(reply))
    is_ours = owner == [hold.own.token.encode(), incarnation.encode()]
    return Read(hold, entries if is_ours else (), count, is_ours)


def stock(holdings: RedisHoldings, member: RedisMember, found: Read) -> None:
    """Decode what was read and keep it. An entry that cannot be decoded stops its partition, and only that one."""
    hold, own, reached = found.hold, found.hold.own, 0
    if own.shard is not None and own.shard.intruders:
        return
    if found.is_passing:
        own.rests_until = clock.now() + _SHORT_REST_S
        return
    if found.decoded is None:
        deliveries, size, damage = _deliveries(hold, member.keyspace.of(hold.partition).stream, found.entries)
    else:
        deliveries, size, damage, reached = found.decoded.passed_on
    if deliveries or reached:
        chunks = [(hold, Chunk(deliveries, size))] if deliveries else []
        holdings.stock(chunks, [(hold, reached)] if reached else ())
        own.mean_bytes = size / len(deliveries) if deliveries else own.mean_bytes
        own.count.add(found.decoded.positions if found.decoded else [delivery.position for delivery in deliveries])
        member.figures.batch(hold.partition, len(found.entries))
    if found.decoded is not None:  # only a read shows how large entries of others are
        own.largest = max([own.largest, *(sum(map(len, fields)) for _, fields in found.entries)])
    growth = 4 if found.decoded is None else 2
    own.batch = min(_MOST, max(LEAST_BATCH, 2 * len(found.entries) if found.is_exhausted else growth * own.batch))
    damage = damage or found.error
    if damage and damage != own.damage:
        log.error("%s of group %s stands still: %s", hold.partition, member.group, damage)
    own.damage = damage
    rest_s = _SHORT_REST_S if found.is_passing else _REST_S
    own.rests_until = clock.now() + rest_s if damage else 0.0


def _deliveries(hold: RedisHold, stream: str, entries: Sequence[Any]) -> tuple[list[Delivery], int, str]:
    """The deliveries, their bytes, and what is wrong with the entry behind them."""
    partition, epoch, fence, log_id = hold.partition, hold.epoch, hold.fence, hold.log_id
    deliveries: list[Delivery] = []
    size = 0
    for id_, fields in entries:
        try:
            (_, data), position = fields, position_of(id_)
            event = _decode(data)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            return deliveries, size, _unreadable(stream, id_, str(error))
        if position is None:
            return deliveries, size, _unreadable(stream, id_, "the id is too large for a position")
        deliveries.append(Delivery(event, partition, position, epoch, 1, fence, log_id))
        size += len(data)
    return deliveries, size, ""


def _unreadable(stream: str, id_: bytes, why: str) -> str:
    return (
        f"entry {id_.decode()} of stream {stream} is not Onward's ({why}); stop the program that wrote it, and remove "
        f"the entry: XDEL {stream} {id_.decode()}"
    )
