"""The harness that runs the suites on a real Kafka."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from onward.brokers.core.cloudevents import Header, headers_of
from onward.brokers.kafka import publisher
from onward.event import Event
from tests.servers.kafka import KafkaServer


class KafkaHarness:
    """Runs the suites on a real Kafka."""

    def __init__(self, server: KafkaServer, folder: Path) -> None:
        self.folder = folder
        self.url = server.url
        self.bootstrap = server.bootstrap
        self.admin = AdminClient({"bootstrap.servers": server.bootstrap})

    @contextmanager
    def refuse(self, event: Event) -> Iterator[None]:
        """Let the broker refuse this one event: a header makes it longer than the topic allows.

        It is also longer than a batch, so it is sent alone, and no other event is refused with it.
        """
        self.limit(event.topic, "1000000")
        padding = ("padding", b"x" * 1_040_000)

        def padded(each: Event) -> list[Header]:
            return [*headers_of(each), *([padding] if each.id == event.id else [])]

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(publisher, "headers_of", padded)
                yield
        finally:
            self.limit(event.topic, "1048588")

    @contextmanager
    def refuse_aside(self, larger_than: int = 0) -> Iterator[None]:
        self._limit_asides(str(max(10, larger_than)))
        try:
            yield
        finally:
            self._limit_asides("1400000")

    def _limit_asides(self, size: str) -> None:
        for name in self.admin.list_topics(timeout=30).topics:
            if name.startswith("onward.aside."):
                self.limit(name, size)

    def clear(self) -> None:
        """Delete every topic, and with it the progress of groups, so that the next test finds an empty cluster."""
        deadline = time.monotonic() + 60
        while names := [name for name in self.admin.list_topics(timeout=30).topics if not name.startswith("__")]:
            assert time.monotonic() < deadline, f"still listed: {names}"
            for future in self.admin.delete_topics(names).values():
                if (error := future.exception(30)) and error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise error  # a topic that was just deleted may still be listed

    def limit(self, topic: str, size: str) -> None:
        change = ConfigEntry("max.message.bytes", size, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
        self.admin.incremental_alter_configs([resource])[resource].result(30)
        asked = ConfigResource(ResourceType.TOPIC, topic)
        deadline = time.monotonic() + 30
        while self.admin.describe_configs([asked])[asked].result(30)["max.message.bytes"].value != size:
            assert time.monotonic() < deadline
        time.sleep(0.5)  # the broker shows the new value a moment before its logs use it

    def warm_up(self) -> None:
        """Wait until the server shows a topic that was created. On a busy machine a new server needs longer for this
        than publish waits."""
        name, deadline = f"first-{uuid4().hex[:8]}", time.monotonic() + 60
        self.admin.create_topics([NewTopic(name, 1, 1)])[name].result(30)
        while name not in self.admin.list_topics(timeout=30).topics:
            assert time.monotonic() < deadline, "the server does not show a topic that it has created"
            time.sleep(0.05)
        self.admin.delete_topics([name])[name].result(30)


_warm: set[int] = set()  # servers, by their process


@pytest.fixture
def harness(kafka_server: KafkaServer, tmp_path: Path) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_server, tmp_path)
    if kafka_server.pid not in _warm:
        harness.warm_up()
        _warm.add(kafka_server.pid)
    harness.clear()  # a thread of an earlier test may have created a topic after the test's end
    yield harness
    harness.clear()
