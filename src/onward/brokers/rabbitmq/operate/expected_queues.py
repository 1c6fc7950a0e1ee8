"""The queues that must exist: those of topics and groups, and those that the application declares. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.operate.policies import Role
from onward.brokers.rabbitmq.operate.server_facts import ExpectedQueue
from onward.brokers.rabbitmq.operate.topology import Declared, Queue
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry, TopicEntry
from onward.brokers.rabbitmq.work.tiers import WorkRoute
from onward.brokers.rabbitmq.work.work_objects import bindings_of


def expected_queues(
    topics: Sequence[TopicEntry], groups: Mapping[str, Iterable[GroupEntry]], declared: Declared, now: float
) -> list[ExpectedQueue]:
    """`groups`: by topic. A topic that is an exchange of another program has no entry in `topics`. `now`: Unix time.

    A topic that is created at this moment may lack a stream, which any process creates."""
    found = [ExpectedQueue(names.REGISTRY, "record", "the list of topics and groups")]
    partitions = {topic.name: topic.partitions if topic.is_settled(now) else 0 for topic in topics}
    for topic in topics:
        found += _streams(topic, partitions[topic.name])
    entries = [entry for of_topic in groups.values() for entry in of_topic]
    for entry in entries:
        found += _of_group(entry, partitions.get(entry.topic), declared)
    used = {entry.group: entry.topic for entry in entries if entry.kind == "work"}
    found += [each for queue in declared.queues.values() for each in _declared(queue, used.get(queue.name))]
    return list({each.name: each for each in found}.values())


def _streams(topic: TopicEntry, partitions: int) -> Iterator[ExpectedQueue]:
    for index in range(partitions):
        name, what = names.stream(topic.name, index), f"a partition of topic {topic.name}"
        yield ExpectedQueue(name, "log", what, topic=topic.name, arguments=topic.arguments)


def _of_group(group: GroupEntry, partitions: int | None, declared: Declared) -> Iterator[ExpectedQueue]:
    what = f"of group {group.group} of topic {group.topic}"
    if group.kind == "ordered":
        for index in range(partitions or 0):
            name = names.token_queue(group.topic, index, group.group)
            yield ExpectedQueue(name, "work", f"a token {what}", arguments=names.TOKEN_ARGUMENTS)
    elif partitions != 0:
        if declared.queue(group.group) is None and group.routes:  # without routes it is a queue of another program
            name = names.work_queue(group.topic, group.group)
            yield ExpectedQueue(name, "work", f"the events {what}", keys=(), arguments=names.WORK_ARGUMENTS)
            yield from _tiers(group, what)
        name, which = names.suspects_queue(group.topic, group.group), "the events that may have killed their process"
        yield ExpectedQueue(name, "work", f"{which}, {what}", arguments=names.WORK_ARGUMENTS)


def _tiers(group: GroupEntry, what: str) -> Iterator[ExpectedQueue]:
    """The queues of the tiers that the group has, and of those that it has had, which have no binding any more."""
    bindings = bindings_of(group)
    bound = {WorkRoute.parse(each).target for each in bindings}
    for mark in sorted(set(group.routes) - bindings):  # such as "tier:bulk"
        tier = mark.partition(":")[2]
        name = names.work_queue(group.topic, group.group, tier)
        keys = () if name in bound else None
        yield ExpectedQueue(name, "work", f"the {tier} events {what}", keys=keys, arguments=names.WORK_ARGUMENTS)


def _declared(queue: Queue, topic: str | None) -> Iterator[ExpectedQueue]:
    """`topic`: of a group on the queue. Without one, a missing queue is only a difference from the topology."""
    role: Role = "log" if queue.kind == "stream" else "work"
    what = "declared" if topic is None else f"declared, with group {queue.name} of topic {topic}"
    for name in queue.tier_queues.values():
        used = topic is not None
        yield ExpectedQueue(name, role, what, queue.consumers or 0, is_created=used, is_declared=True)
