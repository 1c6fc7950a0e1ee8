"""The scenarios of the broker suite about owners, on a real RabbitMQ. In a file of its own, because `make test` shares
out whole files and these take long."""

import pytest

from onward.testing.ownership import OwnershipScenarios
from onward.testing.succession import SuccessionScenarios
from tests.brokers.rabbitmq.harness import harness

__all__ = ["harness"]

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


class TestRabbitMQOwners(OwnershipScenarios, SuccessionScenarios):
    pass
