"""Public test kit: the suites that every broker passes. Needs pytest.

class TestMyBroker(BrokerSuite):
    @pytest.fixture
    def harness(self, tmp_path): return MyHarness(tmp_path)
"""

import pytest

pytest.register_assert_rewrite(
    "onward.testing.aside",
    "onward.testing.delivery",
    "onward.testing.failure",
    "onward.testing.failure_shop",
    "onward.testing.groups",
    "onward.testing.ownership",
    "onward.testing.publishing",
)

from onward.testing.aside import AsideHarness, AsideSuite  # noqa: E402
from onward.testing.broker import BrokerSuite, BrokerSuiteUnderLoad  # noqa: E402
from onward.testing.failure import FailureSuite  # noqa: E402
from onward.testing.harness import Child, Harness, Member, Process  # noqa: E402

__all__ = [
    "AsideHarness",
    "AsideSuite",
    "BrokerSuite",
    "BrokerSuiteUnderLoad",
    "Child",
    "FailureSuite",
    "Harness",
    "Member",
    "Process",
]
