"""Topics: their partition counts and log ids, as the cluster has them. Calls block."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import NewPartitions, NewTopic

from onward import clock
from onward.brokers.base import TopicSpec
from onward.brokers.kafka.admin import Admin
from onward.brokers.kafka.client import REQUEST_S, ClientFactory, explained
from onward.errors import BrokerError
from onward.settings import Settings

ASIDE_PREFIX = "onward.aside."
COUNTS_TOPIC = "onward.topics"  # see key_counts.py
_OVERHEAD_BYTES = 65_536  # of headers and framing, beside what max_event_bytes counts
_LOOK_S = 0.05
_LEAST_RETENTION_S = 3_600.0  # Kafka removes events by age alone, even if no group has handled them
FORBIDDEN = frozenset(
    {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.POLICY_VIOLATION}
)


class KafkaTopic(NamedTuple):
    name: str
    log_id: str
    partitions: int


class KafkaTopics:
    def __init__(self, admin: Admin, settings: Settings) -> None:
        self._admin = admin
        self._settings = settings

    def described(self, name: str) -> KafkaTopic | None:
        """The topic as the cluster has it now. None: it does not exist."""
        try:
            futures = self._admin.client.describe_topics(TopicCollection([name]), request_timeout=REQUEST_S)
            found = self._admin.answer(futures[name], f"looking up topic {name}")
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise explained(error, f"looking up topic {name}") from error
        return KafkaTopic(name, str(found.topic_id), len(found.partitions))

    def counts(self) -> dict[str, int]:
        """How many partitions each topic of the cluster has, internal ones included."""
        topics = self._admin.metadata("listing topics").topics
        return {name: len(topic.partitions) for name, topic in topics.items()}

    def specs(self) -> list[TopicSpec]:
        """The topics that events can be published to, by name."""
        return [TopicSpec(name, count) for name, count in sorted(self.counts().items()) if not is_internal(name)]

    def create(self, name: str, partitions: int, config: Mapping[str, str] | None = None) -> KafkaTopic:
        """Create the topic, unless another process has created it meanwhile."""
        settings = self._settings
        if config is None:
            config = {
                "retention.ms": str(int(asked_retention_s(settings) * 1000)),
                "max.message.bytes": str(max(1_048_588, settings.max_event_bytes + _OVERHEAD_BYTES)),
            }
        new = NewTopic(name, partitions, settings.replication or -1, config=dict(config))
        try:
            future = self._admin.client.create_topics([new], request_timeout=REQUEST_S)[name]
            self._admin.answer(future, f"creating topic {name}")
        except KafkaException as error:
            if error.args[0].code() in FORBIDDEN:
                raise explained(error, _not_allowed(name)) from error
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise explained(error, f"creating topic {name}") from error
        return self.appeared(name)

    def grow(self, name: str, partitions: int) -> KafkaTopic:
        """Add partitions up to this count; another process may have done so already."""
        doing = f"adding partitions to topic {name}"
        try:
            new = NewPartitions(name, partitions)
            self._admin.answer(self._admin.client.create_partitions([new], request_timeout=REQUEST_S)[name], doing)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.INVALID_PARTITIONS:
                raise explained(error, doing) from error
        end = clock.now() + REQUEST_S
        while (topic := self.appeared(name)).partitions < partitions and clock.now() < end:
            time.sleep(_LOOK_S)
        return topic

    def delete(self, name: str) -> None:
        """Delete the topic, and wait until the cluster no longer shows it."""
        doing = f"deleting topic {name}"
        try:
            self._admin.answer(self._admin.client.delete_topics([name], request_timeout=REQUEST_S)[name], doing)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise explained(error, doing) from error
        end = clock.now() + REQUEST_S
        while self.described(name) is not None and clock.now() < end:
            time.sleep(_LOOK_S)

    def appeared(self, name: str) -> KafkaTopic:
        """Wait until a node shows the topic. The controller creates it, and the other nodes show it a moment later.

        BrokerError: no node shows it."""
        end = clock.now() + REQUEST_S
        while (topic := self.described(name)) is None:
            if clock.now() > end:
                raise BrokerError(f"Kafka: topic {name} was created but does not appear; was it deleted?")
            time.sleep(_LOOK_S)
        return topic


def is_internal(name: str) -> bool:
    """Whether Kafka or this broker uses the topic for its own purposes."""
    return name == COUNTS_TOPIC or name.startswith(("__", ASIDE_PREFIX))


def asked_retention_s(settings: Settings) -> float:
    """How long a new topic keeps events."""
    return max(settings.retention_s, _LEAST_RETENTION_S)


def _not_allowed(name: str) -> str:
    return f"creating topic {name}, which does not exist (create it as another user, or allow this user to create it)"


class Cluster(NamedTuple):
    """The cluster, as all parts of this broker use it."""

    factory: ClientFactory
    admin: Admin
    topics: KafkaTopics
    settings: Settings

    @classmethod
    def at(cls, url: str, settings: Settings) -> "Cluster":
        factory = ClientFactory(url, settings)
        admin = Admin(factory)
        return cls(factory, admin, KafkaTopics(admin, settings), settings)
