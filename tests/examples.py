"""The examples that the documentation shows: their text, and a way to run one until it has printed enough."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def shown(page: str) -> str:
    """The only Python block of a page."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def source(name: str) -> str:
    return (ROOT / "examples" / name).read_text(encoding="utf-8")


def said_by(name: str, folder: Path, enough: Callable[[str], bool], within_s: float = 40.0) -> str:
    """Run an example until `enough` accepts its output, end it with Ctrl-C, and return the output."""
    log = folder / "out"
    with log.open("wb") as out:
        program = subprocess.Popen([sys.executable, "-u", str(ROOT / "examples" / name)], cwd=folder, stdout=out)
    try:
        deadline = time.monotonic() + within_s
        while not enough(log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(30) == 0
    finally:
        program.kill()
        program.wait()
    return log.read_text()
