"""Figures for people, read from the server: how far groups are, and who is in them.

Here the server's clock says who is alive. It decides nothing about ownership."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from onward.brokers.base import PASSING, GroupInfo, MemberInfo, Standing
from onward.brokers.redis.foreign.groups import other_consumers
from onward.brokers.redis.group_watch import UNKNOWN, MemberList, member_of, owner_of
from onward.brokers.redis.keys import TOPICS, PartitionKeys, TopicKeys
from onward.brokers.redis.lease_scripts import DROP, STANDING
from onward.brokers.redis.link import Link
from onward.brokers.redis.positions import position_of
from onward.brokers.redis.topics import RedisTopics, find
from onward.errors import BrokerError

_SLACK_MS = 50


class GroupPlace(NamedTuple):
    """A group in a topic."""

    topic: str
    group: str
    keys: Sequence[PartitionKeys]  # by partition
    is_foreign: bool = False  # the streams belong to other programs, and have real groups

    @property
    def real_groups(self) -> list[tuple[str, str]]:
        """Streams of others, and the group in them."""
        return [(each.stream, self.group) for each in self.keys] if self.is_foreign else []


class OwnedPlace(NamedTuple):
    """A group's partition: how far it is, and its owner, with its unique suffix; "" if no live member owns it."""

    standing: Standing
    owner: str


def groups(link: Link, topics: RedisTopics, topic: str) -> list[GroupInfo]:
    found = [_read(link, place) for place in _places(link, topics, topic)]
    return [info for info, _ in found]


def owners(link: Link, topics: RedisTopics, topic: str, group: str) -> list[MemberInfo]:
    """The members whose leases on partitions count."""
    spec = find(link, topics.keyspace, topic)
    if spec is None:
        return []
    _, owned = _read(link, GroupPlace(topic, group, topics.keys(spec)))
    return [member_of(owner) for owner in sorted({each.owner for each in owned.values() if each.owner})]


def drop_group(link: Link, topics: RedisTopics, topic: str, group: str) -> None:
    spec = find(link, topics.keyspace, topic)
    if spec is not None:
        place = GroupPlace(topic, group, topics.keys(spec), topics.keyspace.streams(topic) is not None)
        _check_unused(link, place)
        _drop(link, place)


def drop_topic(link: Link, topics: RedisTopics, topic: str) -> None:
    """The topic's own entry goes first, so that no process finds half a topic. Streams of others stay, and so do their
    groups: the topic can be mapped again, in another way, and goes on where they are."""
    spec = find(link, topics.keyspace, topic)
    if spec is None:
        return
    places = _places(link, topics, topic)
    for place in places:
        _check_unused(link, place)
    link.ask(("DEL", TopicKeys(topic).topic), ("SREM", TOPICS, topic))
    for place in places:
        _drop(link, place._replace(is_foreign=False))
    keys, streams = topics.keys(spec), topics.keyspace.streams(topic)
    link.ask(*[("UNLINK", each.meta, each.marks, each.groups, each.passing, each.relays) for each in keys])
    if streams is None:
        link.ask(*[("UNLINK", each.stream) for each in keys])


def _places(link: Link, topics: RedisTopics, topic: str) -> list[GroupPlace]:
    spec = find(link, topics.keyspace, topic)
    if spec is None:
        return []
    keys = topics.keys(spec)
    groups = link.ask(*[("SMEMBERS", each.groups) for each in keys])
    passing = link.ask(*[("SMEMBERS", each.passing) for each in keys])
    names = {name.decode() for found in groups for name in found}
    names |= {name.decode() for found in _existing(link, keys, passing) for name in found}
    is_foreign = topics.keyspace.streams(topic) is not None
    return [GroupPlace(topic, name, keys, is_foreign) for name in sorted(names)]


def _existing(link: Link, keys: Sequence[PartitionKeys], passing: Sequence[Iterable[bytes]]) -> list[list[bytes]]:
    """Of the passing groups, those that have not expired; the others are taken off the list."""
    listed = [(each, name) for each, names in zip(keys, passing, strict=True) for name in names]
    if not listed:
        return []
    there = link.ask(*[("EXISTS", each.group(name.decode())) for each, name in listed])
    found = list(zip(listed, there, strict=True))
    gone = [("SREM", each.passing, name) for (each, name), exists in found if not exists]
    if gone:
        link.ask(*gone)
    return [[name] for (_, name), exists in found if exists]


def _read(link: Link, place: GroupPlace) -> tuple[GroupInfo, dict[int, OwnedPlace]]:
    commands = [STANDING([each.group(place.group), each.stream]) for each in place.keys]
    (seconds, micros), pairs, *replies = link.ask(
        ("TIME",), ("HGETALL", TopicKeys(place.topic).members(place.group)), *commands
    )
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    owned = {index: _owned(reply, now_ms) for index, reply in enumerate(replies) if reply[0] is not None}
    listed = MemberList.of(pairs).members
    alive = {name for name, each in listed.items() if now_ms < each.at_ms + each.lease_s * 1000 + _SLACK_MS}
    alive |= {each.owner for each in owned.values() if each.owner}
    members = [member_of(owner) for owner in sorted(alive)]
    standings = {index: each.standing for index, each in owned.items()}
    return GroupInfo(place.group, place.topic, members, standings), owned


def _owned(reply: Sequence[Any], now_ms: int) -> OwnedPlace:
    watermark, token, fence, at_ms, lease_ms, *rest = reply
    counts = token not in (b"", UNKNOWN.encode()) and now_ms < int(at_ms) + int(lease_ms) + _SLACK_MS
    owner = owner_of(token.decode()) if counts else ""
    name = member_of(owner).name if owner else None
    done = int(watermark, 16)
    return OwnedPlace(Standing(done, _end(done, rest), name, int(fence)), owner)


def _end(watermark: int, last: Sequence[bytes]) -> int | None:
    """`last`: the id of the last entry; empty if the watermark is above it; nothing if there is no stream."""
    if not last:
        return None
    position = position_of(last[0]) if last[0] else None
    return watermark if position is None else position + 1


def _set(keys: PartitionKeys, group: str) -> str:
    return keys.passing if group.startswith(PASSING) else keys.groups


def _check_unused(link: Link, place: GroupPlace) -> None:
    info, _ = _read(link, place)
    names = [member.name for member in info.members] or other_consumers(link, place.real_groups)
    if names:
        raise _in_use(place, names)


def _in_use(place: GroupPlace, names: Sequence[str]) -> BrokerError:
    return BrokerError(f"group {place.group} of topic {place.topic} is in use by {', '.join(names)}; stop them first")


def _drop(link: Link, place: GroupPlace) -> None:
    group = place.group
    commands = [
        DROP(
            [key.group(group), key.meta, _set(key, group), *key.aside(group), key.moves(group)],
            *(group, int(group.startswith(PASSING))),
        )
        for key in place.keys
    ]
    left = [owner.decode() for owner in link.ask(*commands) if owner]
    if left:  # it has claimed since we looked
        raise _in_use(place, sorted({member_of(owner_of(owner)).name for owner in left}))
    if place.real_groups:
        link.call(*[("XGROUP", "DESTROY", *each) for each in place.real_groups])
    names = TopicKeys(place.topic)
    link.ask(("DEL", names.members(group), names.news(group)))
