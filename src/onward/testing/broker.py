"""The broker suite: every sentence of onward.brokers.base as a scenario, the same for all brokers.

A subclass provides the fixture `harness`. What a broker cannot do is told by its `features` alone.
"""

from onward.testing.delivery import DeliveryScenarios
from onward.testing.groups import GroupScenarios
from onward.testing.ownership import OwnershipScenarios
from onward.testing.publishing import PublishScenarios


class BrokerSuite(PublishScenarios, DeliveryScenarios, OwnershipScenarios, GroupScenarios):
    pass
