"""The broker suite on a real RabbitMQ, without the scenarios in test_suite_owners.py."""

import pytest

from onward.testing import BrokerSuite
from onward.testing.delivery import DeliveryScenarios
from onward.testing.groups import GroupScenarios
from onward.testing.publishing import PublishScenarios
from onward.testing.shared import SharedScenarios
from tests.brokers.rabbitmq.harness import harness
from tests.brokers.rabbitmq.test_suite_owners import TestRabbitMQOwners as OwnersSuite

__all__ = ["harness"]

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


class TestRabbitMQ(PublishScenarios, DeliveryScenarios, GroupScenarios, SharedScenarios):
    pass


def test_both_files_together_have_every_scenario_of_the_suite() -> None:
    assert {*TestRabbitMQ.__bases__, *OwnersSuite.__bases__} == {*BrokerSuite.__bases__}
