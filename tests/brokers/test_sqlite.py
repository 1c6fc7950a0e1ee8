"""The suites on SQLite: broker, aside and failure, and the broker's again under load."""

from pathlib import Path

import pytest

from onward.testing import AsideSuite, BrokerSuite, BrokerSuiteUnderLoad, FailureSuite
from tests.brokers.sqlite_harness import SqliteHarness

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


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
