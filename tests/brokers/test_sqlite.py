"""The public suites on SQLite: broker, aside, failure, and the broker suite again under load."""

from pathlib import Path

import pytest

from onward.testing import AsideSuite, BrokerSuite, BrokerSuiteUnderLoad, FailureSuite
from tests.brokers.sqlite_harness import SqliteHarness

pytestmark = pytest.mark.timeout(240)  # scenarios have their own limits


@pytest.fixture
def harness(tmp_path: Path) -> SqliteHarness:
    return SqliteHarness(tmp_path)


class TestSqlite(BrokerSuite):
    pass


@pytest.mark.slow
class TestSqliteAside(AsideSuite):
    pass


@pytest.mark.slow
class TestSqliteFailure(FailureSuite):
    pass


class TestSqliteUnderLoad(BrokerSuiteUnderLoad):
    pass
