"""The aside suite on a real RabbitMQ."""

import pytest

from onward.testing import AsideSuite
from tests.brokers.rabbitmq.harness import harness

__all__ = ["harness"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # scenarios have a limit of their own


class TestRabbitMQAside(AsideSuite):
    pass
