"""The README's example is the one in examples/, and it runs."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.examples import ROOT, said_by, shown, source


def test_the_readmes_example_is_the_one_in_examples() -> None:
    assert shown("README.md") == source("first.py")


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    lines = said_by("first.py", tmp_path, lambda text: text.count("\n") >= 30).splitlines()
    for n in range(10):
        orders = [int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"customer-{n} ")]
        assert orders == [n, n + 10, n + 20]


def test_the_readmes_example_runs_under_the_command_line(tmp_path: Path) -> None:
    """Importing it must not run it."""
    shutil.copy(ROOT / "examples/first.py", tmp_path)
    publish = [
        sys.executable,
        "-m",
        "onward",
        "publish",
        "orders",
        "--key",
        "c",
        '{"id": 1, "total": 2}',
        "--app",
        "first:app",
    ]
    subprocess.run(publish, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    program = subprocess.Popen(
        [sys.executable, "-u", "-m", "onward", "run", "first:app"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "c pays 2.0 for order 1\n"
        program.terminate()
        assert program.wait(60) == 0
