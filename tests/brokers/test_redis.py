"""The suites on a real Redis."""

import pytest

from onward.testing import AsideSuite, BrokerSuite, FailureSuite
from tests.brokers.redis_harness import harness

__all__ = ["harness"]

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


class TestRedis(BrokerSuite):
    pass


@pytest.mark.slow
class TestRedisAside(AsideSuite):
    pass


@pytest.mark.slow
class TestRedisFailure(FailureSuite):
    pass
