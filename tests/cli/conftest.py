"""A folder with an application, a shell in it, and the command line within this process."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import Shell

SHOP = """
from onward import Onward

app = Onward("sqlite:///shop.db", lease_s=1.0, takeover_grace_s=0.1)


@app.handler("orders", group="billing")
async def bill(order: dict) -> None:
    print("billed", order["id"], flush=True)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    shell.write("shop.py", SHOP)
    yield shell
    shell.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, without settings from the environment. Modules that a test imports are removed again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in os.environ:
        if name.startswith("ONWARD_"):
            monkeypatch.delenv(name)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
