"""The suites on a real Kafka."""

import pytest

from onward.testing import AsideSuite, BrokerSuite, FailureSuite
from tests.brokers.kafka import harness

__all__ = ["harness"]

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


class TestKafka(BrokerSuite):
    pass


class TestKafkaAside(AsideSuite):
    pass


class TestKafkaFailure(FailureSuite):
    pass
