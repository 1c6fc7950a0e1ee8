"""The failure suite on a real RabbitMQ, with order and without."""

import pytest

from onward.testing import FailureSuite
from tests.brokers.rabbitmq.harness import harness
from tests.brokers.shared_failure import UnorderedFailureSuite

__all__ = ["harness"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # scenarios have a limit of their own


class TestRabbitMQFailure(FailureSuite):
    pass


class TestRabbitMQWorkFailure(UnorderedFailureSuite):
    pass
