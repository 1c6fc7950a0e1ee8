"""What an operator should know about the server and the groups on it."""

from collections.abc import Iterator

from redis.exceptions import ResponseError

from onward.brokers.base import PASSING, Finding, GroupInfo
from onward.brokers.redis import figures, permissions
from onward.brokers.redis.link import Link
from onward.brokers.redis.server_errors import code_of
from onward.brokers.redis.server_facts import ServerFacts
from onward.brokers.redis.topics import RedisTopics, listed


def missing_commands(link: Link) -> list[str]:
    """Those that the user has no permission for, as far as the server can tell. BrokerError: it may run no scripts."""
    (reply,) = link.call(permissions.PROBE)
    if isinstance(reply, ResponseError) and code_of(reply) == "NOPERM":
        link.ask(permissions.PROBE)
    return link.denied()


def findings(link: Link, topics: RedisTopics, facts: ServerFacts) -> list[Finding]:
    return [*facts.findings(), *_groups(link, topics)]


def _groups(link: Link, topics: RedisTopics) -> Iterator[Finding]:
    """Groups without a member hold back trimming and count as backlog."""
    for spec in listed(link):
        infos = figures.groups(link, topics, spec.name)
        if not infos:
            what = f"no group reads topic {spec.name}, so all of its events are kept"
            yield Finding(
                "warning", what, "start its handlers; otherwise publishing to it is refused at max_backlog_bytes"
            )
        for info in infos:
            if not info.members and _is_behind(info) and not info.group.startswith(PASSING):
                yield Finding(
                    "warning",
                    f"group {info.group} of topic {spec.name} has unfinished events and no live member",
                    f"start its handlers, or drop it with `onward groups drop {info.group} --topic {spec.name}`",
                )


def _is_behind(info: GroupInfo) -> bool:
    return any(each.end is not None and each.watermark < each.end for each in info.partitions.values())
