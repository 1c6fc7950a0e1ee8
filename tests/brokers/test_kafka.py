"""The broker suite on a real Kafka: the whole of it at once, and again under load."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from tests.servers.kafka import KafkaServer

from onward.event import Event
from onward.testing import BrokerSuite


class KafkaHarness:
    def __init__(self, server: KafkaServer, folder: Path) -> None:
        self.folder = folder
        self.url = server.url
        self._admin = AdminClient({"bootstrap.servers": server.bootstrap})

    @contextmanager
    def refuse(self, event: Event) -> Iterator[None]:
        """The topic takes nothing as long as this event, which is all that the call brings."""
        self._limit(event.topic, "10")
        try:
            yield
        finally:
            self._limit(event.topic, "1048588")

    def _limit(self, topic: str, size: str) -> None:
        change = ConfigEntry("max.message.bytes", size, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
        self._admin.incremental_alter_configs([resource])[resource].result(10)
        asked = ConfigResource(ResourceType.TOPIC, topic)
        deadline = time.monotonic() + 10
        while self._admin.describe_configs([asked])[asked].result(10)["max.message.bytes"].value != size:
            assert time.monotonic() < deadline
        time.sleep(0.1)  # told by the broker a moment before its logs follow it


@pytest.fixture
def harness(kafka_server: KafkaServer, tmp_path: Path) -> KafkaHarness:
    return KafkaHarness(kafka_server, tmp_path)


class TestKafka(BrokerSuite):
    pass
