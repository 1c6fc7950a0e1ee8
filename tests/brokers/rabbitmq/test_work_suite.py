"""The scenarios of shared partitions on the work queues of a real RabbitMQ."""

import pytest

from onward.testing import SharedScenarios
from tests.brokers.rabbitmq.harness import harness

__all__ = ["harness"]

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


class TestRabbitMQWork(SharedScenarios):
    pass
