"""The broker suite on a real Redis."""

import pytest

from onward.testing import BrokerSuite
from tests.brokers.redis_harness import harness

__all__ = ["harness"]

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


class TestRedis(BrokerSuite):
    pass
