"""The page's example is the one in examples/, and it runs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_pages_example_is_the_one_in_examples() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/inbox.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block == (ROOT / "examples/inbox.py").read_text(encoding="utf-8")


def test_the_pages_example_runs(tmp_path: Path) -> None:
    log = tmp_path / "out"
    with log.open("wb") as out:
        program = subprocess.Popen([sys.executable, "-u", str(ROOT / "examples/inbox.py")], cwd=tmp_path, stdout=out)
    try:
        deadline = time.monotonic() + 30
        while log.read_text().count("\n") < 10 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(30) == 0
    finally:
        program.kill()
        program.wait()
    assert sorted(log.read_text().splitlines()) == [f"billed order {n}" for n in range(10)]
