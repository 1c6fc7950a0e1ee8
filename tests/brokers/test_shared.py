"""Shared partitions: the suite on the reference broker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.testing import SharedScenarios
from onward.testing.shared import SharedProcessScenarios
from tests.brokers.shared_harness import ReferenceHarness, scheme, served, stored
from tests.brokers.shared_reference import Store

__all__ = ["scheme"]

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


class TestShared(SharedScenarios):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[ReferenceHarness]:
        with stored(Store()) as url:
            yield ReferenceHarness(url, tmp_path, in_process=True)


class TestSharedInProcesses(SharedProcessScenarios):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[ReferenceHarness]:
        with served(Store()) as url:
            yield ReferenceHarness(url, tmp_path, in_process=False)
