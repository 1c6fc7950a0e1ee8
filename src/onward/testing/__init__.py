"""The public test kit: the suites that every broker and every engine must pass. They need pytest.

class TestMyBroker(BrokerSuite):
    @pytest.fixture
    def harness(self, tmp_path): return MyBrokerUnderTest(tmp_path)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.testing.aside import AsideSuite, AsideUnderTest
    from onward.testing.broker import BrokerSuite, BrokerSuiteUnderLoad
    from onward.testing.engine import EngineSuite
    from onward.testing.failure import FailureSuite
    from onward.testing.scenario import BrokerUnderTest, Member, MemberProcess, Process
    from onward.testing.shared import SharedScenarios, SharedUnderTest

__all__ = [
    "AsideSuite",
    "AsideUnderTest",
    "BrokerSuite",
    "BrokerSuiteUnderLoad",
    "BrokerUnderTest",
    "EngineSuite",
    "FailureSuite",
    "Member",
    "MemberProcess",
    "Process",
    "SharedScenarios",
    "SharedUnderTest",
]

_HOMES = {
    "AsideUnderTest": "aside",
    "AsideSuite": "aside",
    "BrokerSuite": "broker",
    "BrokerSuiteUnderLoad": "broker",
    "EngineSuite": "engine",
    "FailureSuite": "failure",
    "SharedScenarios": "shared",
    "SharedUnderTest": "shared",
}  # all other names are in `scenario`
_ASSERTING = (
    "aside",
    "delivery",
    "engine",
    "failure",
    "failure_shop",
    "groups",
    "ownership",
    "publishing",
    "shared",
    "shared_members",
    "shared_records",
)

if "pytest" in sys.modules:  # it is not in the processes that a suite starts
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{module}" for module in _ASSERTING))


def __getattr__(name: str) -> Any:
    """Import a suite on first use, because the processes that a suite starts need none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'scenario')}"), name)
