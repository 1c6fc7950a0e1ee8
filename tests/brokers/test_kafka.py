"""The suites on a real Kafka."""

import pytest

from onward.testing import AsideSuite, BrokerSuite, FailureSuite
from tests.brokers.kafka import harness

__all__ = ["harness"]

pytestmark = pytest.mark.timeout(240)  # scenarios have their own limit


class TestKafka(BrokerSuite):
    pass


class TestKafkaAside(AsideSuite):
    pass


class TestKafkaFailure(FailureSuite):
    pass
