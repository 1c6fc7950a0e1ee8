"""The suites on a real Kafka."""

from onward.testing import AsideSuite, BrokerSuite, FailureSuite
from tests.brokers.kafka import harness

__all__ = ["harness"]


class TestKafka(BrokerSuite):
    pass


class TestKafkaAside(AsideSuite):
    pass


class TestKafkaFailure(FailureSuite):
    pass
