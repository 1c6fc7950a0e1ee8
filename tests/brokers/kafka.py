"""Kafka under the suites."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from onward.event import Event
from tests.servers.kafka import KafkaServer


class KafkaHarness:
    """A real Kafka under the suites."""

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

    @contextmanager
    def refuse_aside(self) -> Iterator[None]:
        asides = [name for name in self._admin.list_topics(timeout=10).topics if name.startswith("onward.aside.")]
        for name in asides:
            self._limit(name, "10")
        try:
            yield
        finally:
            for name in asides:
                self._limit(name, "1400000")

    def clear(self) -> None:
        """Delete every topic, and with it what groups know of it: the next test finds an empty cluster."""
        names = [name for name in self._admin.list_topics(timeout=10).topics if not name.startswith("__")]
        if names:
            for future in self._admin.delete_topics(names).values():
                future.result(30)

    def _limit(self, topic: str, size: str) -> None:
        change = ConfigEntry("max.message.bytes", size, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
        self._admin.incremental_alter_configs([resource])[resource].result(10)
        asked = ConfigResource(ResourceType.TOPIC, topic)
        deadline = time.monotonic() + 10
        while self._admin.describe_configs([asked])[asked].result(10)["max.message.bytes"].value != size:
            assert time.monotonic() < deadline
        time.sleep(0.1)  # told by the broker a moment before its logs follow it
