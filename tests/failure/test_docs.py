"""The page about failures: its example is the file in examples/ and works, and its defaults are those of the code."""

import re
from pathlib import Path

import msgspec

from onward import Retry
from onward.settings import Settings
from tests.examples import ROOT, said_by, shown, source

PAGE = (ROOT / "docs/failure.md").read_text(encoding="utf-8")


def test_the_example_is_the_one_in_examples() -> None:
    assert shown("docs/failure.md") == source("failing.py")


def test_the_defaults_are_those_of_the_code() -> None:
    (line,) = re.findall(r"`Retry\((.*?), on=", PAGE)
    retry = msgspec.structs.asdict(Retry())
    assert {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", line)} == {
        name: retry[name] for name in retry if name not in ("on", "give_up_on")
    }
    for name, value in re.findall(r"`(\w+)` \((\d+)\)", PAGE):
        assert getattr(Settings(), name) == float(value), name


def test_the_example_runs(tmp_path: Path) -> None:
    output = said_by("failing.py", tmp_path, lambda text: "pays 2000" in text and "is fine again" in text)
    assert [line for line in output.splitlines() if "pays" in line] == ["c-1 pays 5", "c-1 pays 7", "c-1 pays 2000"]
    assert "Replayed(replayed=1, failed=0, left=0)" in output
    assert "Dropped(dropped=1, failed=0, left=0)" in output
    assert "to the operator: orders: 1 dead letters of group billing" in output
