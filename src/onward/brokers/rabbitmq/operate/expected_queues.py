"""The queues that must exist: those of topics and groups, and those that the application declares. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.operate.policies import Role
from onward.brokers.rabbitmq.operate.server_facts import ExpectedQueue
from onward.brokers.rabbitmq.operate.topology import Declared, Queue
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry, TopicEntry


def expected_queues(
    topics: Sequence[TopicEntry], groups: Mapping[str, Iterable[GroupEntry]], declared: Declared
) -> list[ExpectedQueue]:
    """`groups`: by topic. A topic that is an exchange of another program has no entry in `topics`."""
    found = [ExpectedQueue(names.REGISTRY, "record", "the list of topics and groups")]
    partitions = {topic.name: topic.partitions if topic.state == "ready" else 0 for topic in topics}
    for topic, count in partitions.items():  # a topic that is not ready may lack a stream, which any process creates
        found += _streams(topic, count)
    for topic, entries in groups.items():
        found += [each for entry in entries for each in _of_group(entry, partitions.get(topic), declared)]
    found += [each for queue in declared.queues.values() for each in _declared(queue)]
    return list({each.name: each for each in found}.values())


def _streams(topic: str, partitions: int) -> Iterator[ExpectedQueue]:
    for index in range(partitions):
        yield ExpectedQueue(names.stream(topic, index), "log", f"a partition of topic {topic}")


def _of_group(group: GroupEntry, partitions: int | None, declared: Declared) -> Iterator[ExpectedQueue]:
    what = f"of group {group.group} of topic {group.topic}"
    if group.kind == "ordered":
        for index in range(partitions or 0):
            yield ExpectedQueue(names.token_queue(group.topic, index, group.group), "work", f"a token {what}")
    elif partitions != 0 and declared.queue(group.group) is None:
        yield ExpectedQueue(names.work_queue(group.topic, group.group), "work", f"the events {what}", keys=())


def _declared(queue: Queue) -> Iterator[ExpectedQueue]:
    """If it does not exist, that is a difference from the topology."""
    role: Role = "log" if queue.kind == "stream" else "work"
    for name in queue.tier_queues.values():
        yield ExpectedQueue(name, role, "declared", queue.consumers or 0, is_created=False)
