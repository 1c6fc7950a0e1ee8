"""Reads the facts for a diagnosis from the cluster. Calls block, and change nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import ConfigResource, ResourceType

from onward.brokers.kafka import commit_metadata
from onward.brokers.kafka.client import REQUEST_S
from onward.brokers.kafka.commit_metadata import Committed
from onward.brokers.kafka.groups import Groups
from onward.brokers.kafka.key_counts import KeyCounts
from onward.brokers.kafka.topics import Cluster
from onward.errors import BrokerError

Config = Mapping[str, str]


class TopicFacts(NamedTuple):
    name: str
    partitions: int
    replicas: int  # of the partition that has the fewest
    in_sync: int  # of the partition that has the fewest
    config: Config | None  # None: this user may not read it
    key_partitions: int | None = None  # how many of them keys use; None: all, as far as we know


class GroupFacts(NamedTuple):
    """A group of Onward, and a topic in which it has progress."""

    group: str
    topic: str
    began_with: int  # partitions


class ClusterFacts(NamedTuple):
    servers: str
    brokers: int
    config: Config | None  # of one broker; None: this user may not read it
    topics: Sequence[TopicFacts]
    groups: Sequence[GroupFacts]


def gather(cluster: Cluster, groups: Groups) -> ClusterFacts:
    """BrokerError: the cluster cannot be reached."""
    metadata = cluster.admin.metadata("looking at the cluster")
    names = sorted(name for name in metadata.topics if not name.startswith("__"))
    broker = next(iter(metadata.brokers), None)
    asked = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    asked += [] if broker is None else [ConfigResource(ResourceType.BROKER, str(broker))]
    configs = _configs(cluster, asked)
    counts = {name: len(metadata.topics[name].partitions) for name in names}
    topics, key_partitions = [], _key_partitions(cluster, counts)
    for name in names:
        partitions = metadata.topics[name].partitions.values()
        topics.append(
            TopicFacts(
                name,
                counts[name],
                min((len(each.replicas) for each in partitions), default=0),
                min((len(each.isrs) for each in partitions), default=0),
                configs.get((ResourceType.TOPIC, name)),
                key_partitions.get(name),
            )
        )
    begun = [each for group in groups.names() for each in _begun(group, groups.progress_everywhere(group), counts)]
    own = configs.get((ResourceType.BROKER, str(broker)))
    return ClusterFacts(cluster.factory.servers, len(metadata.brokers), own, topics, begun)


def _key_partitions(cluster: Cluster, counts: Mapping[str, int]) -> dict[str, int]:
    """How many partitions keys use, for the topics that have grown since their first event was published."""
    try:
        records = KeyCounts(cluster.factory, cluster.topics).all()
    except BrokerError:
        return {}  # this user may not read them
    grown = {each.topic for each in records.values() if each.partitions < counts.get(each.topic, 0)}
    found = [cluster.topics.described(name) for name in sorted(grown)]  # the topic may have been created again
    return {each.name: records[each.log_id].partitions for each in found if each and each.log_id in records}


def _configs(cluster: Cluster, asked: Sequence[ConfigResource]) -> dict[tuple[ResourceType, str], Config]:
    found: dict[tuple[ResourceType, str], Config] = {}
    futures = cluster.admin.client.describe_configs(asked, request_timeout=REQUEST_S) if asked else {}
    for resource, future in futures.items():
        try:
            entries = cluster.admin.answer(future, f"reading the settings of {resource.name}")
        except KafkaException:
            continue  # this user may not read them, or the topic was deleted meanwhile
        found[resource.restype, resource.name] = {name: entry.value or "" for name, entry in entries.items()}
    return found


def _begun(group: str, progress: Iterable[TopicPartition], counts: Mapping[str, int]) -> list[GroupFacts]:
    commits: dict[str, dict[int, Committed]] = {}
    for place in progress:
        commit = Committed(place.offset, place.metadata or "")
        if commit_metadata.read(commit.text, place.offset).log_id:  # else it is not a commit of ours
            commits.setdefault(place.topic, {})[place.partition] = commit
    return [
        GroupFacts(group, topic, commit_metadata.partitions_at_start(mine, counts.get(topic, 0)))
        for topic, mine in commits.items()
    ]
