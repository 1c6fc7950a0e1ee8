"""The suites of the failure path on SQLite."""

from pathlib import Path

import pytest

from onward.testing import AsideSuite, FailureSuite
from tests.failure.sqlite import SqliteHarness


@pytest.fixture
def harness(tmp_path: Path) -> SqliteHarness:
    return SqliteHarness(tmp_path)


class TestAside(AsideSuite):
    pass


class TestFailure(FailureSuite):
    pass
