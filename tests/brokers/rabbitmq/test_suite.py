"""The broker suite on a real RabbitMQ."""

import pytest

from onward.testing import BrokerSuite
from tests.brokers.rabbitmq.harness import harness

__all__ = ["harness"]

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


class TestRabbitMQ(BrokerSuite):
    pass
