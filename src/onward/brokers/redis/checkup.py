"""What an operator should know about the server and the groups on it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from onward.brokers.base import PASSING, Finding, GroupInfo, TopicSpec
from onward.brokers.redis import figures, permissions, server_health
from onward.brokers.redis.foreign.scripts import CONSUMER
from onward.brokers.redis.link import Link, NoPermission
from onward.brokers.redis.log_scripts import RETAINED
from onward.brokers.redis.server_errors import code_of
from onward.brokers.redis.server_facts import ServerFacts
from onward.brokers.redis.topics import RedisTopics, listed
from onward.brokers.redis.trimmer import retention
from onward.settings import Settings


def missing_commands(link: Link) -> list[str]:
    """Those that the user has no permission for, as far as the server can tell. BrokerError: it may run no scripts."""
    (reply,) = link.call(permissions.PROBE)
    if isinstance(reply, ResponseError) and code_of(reply) == "NOPERM":
        link.ask(permissions.PROBE)
    return link.denied()


def findings(link: Link, topics: RedisTopics, settings: Settings, facts: ServerFacts) -> list[Finding]:
    found = [*facts.findings()]
    for name, info in link.infos(server_health.SECTIONS).items():
        prefix = f"{name}: " if name else ""
        found += [Finding(each.level, f"{prefix}{each.what}", each.cure) for each in server_health.findings(info)]
    for spec in listed(link, topics.keyspace):
        try:
            found += _topic(link, topics, spec, settings)
        except NoPermission as error:
            found.append(Finding("warning", f"topic {spec.name} is not checked: {error}"))
    return found


def _topic(link: Link, topics: RedisTopics, spec: TopicSpec, settings: Settings) -> list[Finding]:
    infos = figures.groups(link, topics, spec.name)
    names = [info.group for info in infos if not info.group.startswith(PASSING)]
    found = [_left_behind(info) for info in infos if _is_left_behind(info)]
    if topics.keyspace.streams(spec.name) is not None:
        return [*found, *_consumers(link, topics, spec, names, settings)]
    return [*found, *(_retained(link, topics, spec, names, settings) if names else [_unread(spec)])]


def _unread(spec: TopicSpec) -> Finding:
    what = f"no group reads topic {spec.name}, so all of its events are kept"
    return Finding("warning", what, "start its handlers; otherwise publishing to it is refused at max_backlog_bytes")


def _left_behind(info: GroupInfo) -> Finding:
    """A group without a member holds back trimming and counts as backlog."""
    what = f"group {info.group} of topic {info.topic} has unfinished events and no live member"
    cure = f"start its handlers, or drop it with `onward groups drop {info.group} --topic {info.topic}`"
    return Finding("warning", what, cure)


def _retained(
    link: Link, topics: RedisTopics, spec: TopicSpec, groups: Sequence[str], settings: Settings
) -> Iterator[Finding]:
    """What stays longer than the retention, and because of which group; and what went before a group had read it."""
    commands = [
        RETAINED([*keys.log, *map(keys.group, groups)], *retention(settings, spec.partitions))
        for keys in topics.keys(spec)
    ]
    kept, missing = Counter[str](), Counter[str]()
    for count, at, *lost in link.ask(*commands):
        kept += Counter({groups[at - 1]: count} if at else {})
        missing += Counter(dict(zip(groups, lost, strict=False)))
    for group, count in sorted(kept.items()):
        yield Finding(
            "warning",
            f"{count:,} events of topic {spec.name} stay beyond the retention: group {group} has not finished them",
            f"start, repair or speed up its handlers, or drop it with `onward groups drop {group} --topic {spec.name}`",
        )
    for group, count in sorted(missing.items()):
        yield Finding(
            "error",
            f"{count:,} events of topic {spec.name} were removed before group {group} had finished them",
            "stop the program that uses XTRIM, XDEL or MAXLEN on its streams; publish these events again",
        )


def _consumers(
    link: Link, topics: RedisTopics, spec: TopicSpec, groups: Sequence[str], settings: Settings
) -> Iterator[Finding]:
    """Consumers of other programs in our groups, on streams of other programs."""
    places = [(keys.stream, group) for keys in topics.keys(spec) for group in groups]
    replies = link.call(*[("XINFO", "CONSUMERS", stream, group) for stream, group in places])
    for (stream, group), reply in zip(places, replies, strict=True):
        for fields in [] if isinstance(reply, ResponseError) else reply:
            yield from _consumer(stream, group, ForeignConsumer.of(fields), settings.reclaim_idle_s)


class ForeignConsumer(NamedTuple):
    name: str
    pending: int
    idle_s: float

    @classmethod
    def of(cls, fields: Sequence[Any]) -> "ForeignConsumer":
        found = dict(zip(fields[::2], fields[1::2], strict=True))
        return cls(found[b"name"].decode(), found[b"pending"], found[b"idle"] / 1000)


def _consumer(stream: str, group: str, consumer: ForeignConsumer, idle_s: float) -> Iterator[Finding]:
    if consumer.name == CONSUMER:
        return
    what = f"consumer {consumer.name} of another program in group {group} of stream {stream}"
    if consumer.idle_s < idle_s:
        cure = "stop it, or give the handler a group of its own: two readers of a group cannot have an order"
        yield Finding("error", f"{what} is alive", cure)
    elif consumer.pending:
        pending = "1 pending entry" if consumer.pending == 1 else f"{consumer.pending:,} pending entries"
        cure = f"start the handler: it takes over what is idle for reclaim_idle_s ({idle_s:g} s)"
        yield Finding("warning", f"{what} has stopped with {pending}", cure)
    else:
        cure = f"remove it: XGROUP DELCONSUMER {stream} {group} {consumer.name}"
        yield Finding("warning", f"{what} has stopped, and has nothing pending", cure)


def _is_left_behind(info: GroupInfo) -> bool:
    if info.members or info.group.startswith(PASSING):
        return False
    return any(each.end is not None and each.watermark < each.end for each in info.partitions.values())
