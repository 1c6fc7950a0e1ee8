"""Shared partitions: the suite on the reference broker, the suite on the same broker with a defect, applications."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.testing import SharedScenarios
from tests.brokers.shared_reference import Store, served, stored
from tests.examples import ROOT

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own


class ReferenceHarness:
    def __init__(self, url: str, folder: Path, *, in_process: bool) -> None:
        self.url = url
        self.folder = folder
        self.in_process = in_process


@pytest.fixture(autouse=True)
def scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme reference:// exists, in this process and in its children."""
    package = tmp_path / "installed/reference-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: reference\nVersion: 1.0\n")
    opener = "tests.brokers.shared_reference:open_broker"
    (package / "entry_points.txt").write_text(f"[onward.brokers]\nreference = {opener}\n")
    for path in (package.parent, ROOT):
        monkeypatch.syspath_prepend(str(path))
        monkeypatch.setenv("PYTHONPATH", str(path), prepend=":")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ReferenceHarness]:
    with stored(Store()) as url:
        yield ReferenceHarness(url, tmp_path, in_process=True)


class TestShared(SharedScenarios):
    pass


class TestSharedInProcesses(SharedScenarios):
    """The same broker, each member through a connection of its own."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[ReferenceHarness]:
        with served(Store()) as url:
            yield ReferenceHarness(url, tmp_path, in_process=False)
