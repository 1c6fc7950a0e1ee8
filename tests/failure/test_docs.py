"""The page about failure is true: its example is the one in examples/, and does what the page says."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from onward import Retry
from onward.settings import Settings

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/failure.md").read_text(encoding="utf-8")


def test_the_example_is_the_one_in_examples() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block == (ROOT / "examples/failing.py").read_text(encoding="utf-8")


def test_the_defaults_are_those_of_the_code() -> None:
    (line,) = re.findall(r"`Retry\((.*?), on=", PAGE)
    retry = msgspec.structs.asdict(Retry())
    assert {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", line)} == {
        name: retry[name] for name in retry if name not in ("on", "give_up_on")
    }
    for name, value in re.findall(r"`(\w+)` \((\d+)\)", PAGE):
        assert getattr(Settings(), name) == float(value), name


def test_the_example_runs(tmp_path: Path) -> None:
    log = tmp_path / "out"
    with log.open("wb") as out:
        program = subprocess.Popen([sys.executable, "-u", str(ROOT / "examples/failing.py")], cwd=tmp_path, stdout=out)
    try:
        deadline = time.monotonic() + 40
        while not ("pays 2000" in log.read_text() and "Dropped" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(15) == 0
    finally:
        program.kill()
        program.wait()
    said = log.read_text()
    assert [line for line in said.splitlines() if "pays" in line] == ["c-1 pays 5", "c-1 pays 7", "c-1 pays 2000"]
    assert "Replayed(replayed=1, failed=0, left=0)" in said
    assert "Dropped(dropped=1, failed=0, left=0)" in said
