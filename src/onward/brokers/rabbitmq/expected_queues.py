"""The queues that must exist: those of topics and groups, and those that the application declares. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.registry_fold import GroupEntry, TopicEntry
from onward.brokers.rabbitmq.server_facts import ExpectedQueue
from onward.brokers.rabbitmq.topology import Declared, Queue


def expected_queues(
    topics: Iterable[TopicEntry], groups: Mapping[str, Iterable[GroupEntry]], declared: Declared
) -> list[ExpectedQueue]:
    """`groups`: by topic."""
    found = [ExpectedQueue(names.REGISTRY, "record", "the list of topics and groups")]
    for topic in topics:
        if topic.state == "ready":  # else it may lack a stream, which any process creates
            found += _streams(topic)
            found += [each for group in groups.get(topic.name, ()) for each in _of_group(topic, group, declared)]
    found += [each for queue in declared.queues.values() for each in _declared(queue)]
    return list({each.name: each for each in found}.values())


def _streams(topic: TopicEntry) -> Iterator[ExpectedQueue]:
    for index in range(topic.partitions):
        yield ExpectedQueue(names.stream(topic.name, index), "log", f"a partition of topic {topic.name}")


def _of_group(topic: TopicEntry, group: GroupEntry, declared: Declared) -> Iterator[ExpectedQueue]:
    what = f"of group {group.group} of topic {topic.name}"
    if group.kind == "ordered":
        for index in range(topic.partitions):
            yield ExpectedQueue(names.token_queue(topic.name, index, group.group), "work", f"a token {what}")
    elif declared.queue(group.group) is None:
        yield ExpectedQueue(names.work_queue(topic.name, group.group), "work", f"the events {what}")


def _declared(queue: Queue) -> Iterator[ExpectedQueue]:
    for name in queue.tier_queues.values():
        yield ExpectedQueue(name, "work" if queue.kind != "stream" else "log", "declared", queue.consumers or 0)
