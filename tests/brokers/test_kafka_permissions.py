"""Which permissions a publisher needs on a cluster with access control lists, and the error without them."""

import asyncio
import time
from collections.abc import Iterator, Sequence

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from onward import settings
from onward.brokers import open_broker
from onward.brokers.kafka.key_counts import FOR_EVER
from onward.brokers.kafka.topics import COUNTS_TOPIC
from onward.errors import BrokerError
from onward.testing.scenario import event
from tests.servers.kafka import KafkaServer
from tests.servers.server import free_port

TOPIC = "orders"
GUARDED = """
listener.name.guarded.sasl.enabled.mechanisms=PLAIN
listener.name.guarded.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
user_ann="secret";
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
"""
EVERY = AclBindingFilter(
    ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
)
DESCRIBE, READ, WRITE = AclOperation.DESCRIBE, AclOperation.READ, AclOperation.WRITE


class GuardedKafka(KafkaServer):
    """A Kafka with one more listener, where user ann has only the permissions that a test gives her. The other
    listeners need no login and allow everything."""

    def __init__(self) -> None:
        super().__init__()
        self._guarded_port = free_port()

    @property
    def guarded(self) -> str:
        login = "client.security.protocol=SASL_PLAINTEXT&client.sasl.mechanism=PLAIN"
        return f"kafka://ann:secret@127.0.0.1:{self._guarded_port}?{login}"

    def properties(self) -> str:
        address = f"GUARDED://127.0.0.1:{self._guarded_port}"
        text = super().properties().replace("listeners=PLAINTEXT", f"listeners={address},PLAINTEXT")
        return text.replace("=CONTROLLER:PLAINTEXT,", "=GUARDED:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT,") + GUARDED


@pytest.fixture(scope="module")
def server(kafka_server: KafkaServer) -> Iterator[GuardedKafka]:  # kafka_server skips the test if there is no Kafka
    server = GuardedKafka()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def admin(server: GuardedKafka) -> Iterator[AdminClient]:
    """Creates topic orders, and allows ann to write to it and nothing else."""
    admin = AdminClient({"bootstrap.servers": server.bootstrap})
    admin.create_topics([NewTopic(TOPIC, 4, 1)])[TOPIC].result(30)
    allow(admin, TOPIC, [DESCRIBE, WRITE])
    yield admin
    admin.delete_acls([EVERY])[EVERY].result(30)
    names = [name for name in admin.list_topics(timeout=30).topics if not name.startswith("__")]
    for future in admin.delete_topics(names).values():
        future.result(30)


def allow(admin: AdminClient, topic: str, operations: Sequence[AclOperation]) -> None:
    allowed, pattern = AclPermissionType.ALLOW, ResourcePatternType.LITERAL
    rules = [AclBinding(ResourceType.TOPIC, topic, pattern, "User:ann", "*", each, allowed) for each in operations]
    for future in admin.create_acls(rules).values():
        future.result(30)
    end = time.monotonic() + 30
    while not set(rules) <= set(admin.describe_acls(EVERY).result(30)):  # the broker gets them from its controller
        assert time.monotonic() < end
        time.sleep(0.05)


def create_counts(admin: AdminClient) -> None:
    admin.create_topics([NewTopic(COUNTS_TOPIC, 1, 1, config=FOR_EVER)])[COUNTS_TOPIC].result(30)


def publish(url: str) -> None:
    async def scene() -> None:
        broker = await open_broker(settings.load(url))
        try:
            async with asyncio.timeout(60):
                await broker.publish([event(TOPIC, "a", 0)])
        finally:
            await broker.close()

    asyncio.run(scene())


def test_a_publisher_needs_describe_read_and_write_of_the_counts(server: GuardedKafka, admin: AdminClient) -> None:
    create_counts(admin)
    allow(admin, COUNTS_TOPIC, [DESCRIBE, READ, WRITE])
    publish(server.guarded)


def test_a_publisher_needs_no_write_permission_for_a_stored_count(server: GuardedKafka, admin: AdminClient) -> None:
    publish(server.url)
    allow(admin, COUNTS_TOPIC, [DESCRIBE, READ])
    publish(server.guarded)


@pytest.mark.parametrize("given", [[], [DESCRIBE], [DESCRIBE, READ], [DESCRIBE, WRITE]])
def test_without_a_permission_the_error_names_all_needed_ones(
    server: GuardedKafka, admin: AdminClient, given: list[AclOperation]
) -> None:
    create_counts(admin)
    if given:
        allow(admin, COUNTS_TOPIC, given)
    with pytest.raises(BrokerError, match=r"Describe, Read and Write on topic onward\.topics"):
        publish(server.guarded)


def test_the_error_says_how_to_create_the_topic_of_the_counts(server: GuardedKafka, admin: AdminClient) -> None:
    allow(admin, COUNTS_TOPIC, [DESCRIBE, READ, WRITE])
    with pytest.raises(BrokerError, match=r"onward topology apply.*kafka-topics.sh --create --topic onward.topics"):
        publish(server.guarded)
