"""The suites on a real Kafka."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.testing import AsideSuite, BrokerSuite, FailureSuite
from tests.brokers.kafka import KafkaHarness
from tests.servers.kafka import KafkaServer


@pytest.fixture
def harness(kafka_server: KafkaServer, tmp_path: Path) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_server, tmp_path)
    yield harness
    harness.clear()


class TestKafka(BrokerSuite):
    pass


class TestKafkaAside(AsideSuite):
    pass


class TestKafkaFailure(FailureSuite):
    pass
