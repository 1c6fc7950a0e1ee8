"""A shop that is killed right after a commit: its orders are promised, so all of them are handled."""

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from onward import brokers
from onward.demo import effects
from onward.demo.check import judged
from onward.demo.fleet import Fleet
from onward.demo.judge import Balance, Judge
from onward.demo.shop import Work, dead_letters, open_app, open_shop, shop_file, use_broker

CUSTOMERS = 7
SHOP = f"""
import asyncio, os, signal, sys
from pathlib import Path
from onward.demo.shop import Shop, open_app
from onward.outbox import Outbox

folder, when, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
calls = 0

def counting(method):
    def call(self, *arguments, **options):
        global calls
        calls += 1
        if calls == count and when == "before":
            method(self, *arguments, **options)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *arguments, **options)
    return call

# `add` is the last step before the commit, `ring` is the first step after it.
name = {{"before": "add", "after": "ring"}}[when]
setattr(Outbox, name, counting(getattr(Outbox, name)))

async def main():
    async with open_app(folder) as app:
        shop = Shop(folder, app)  # without a relay
        for n in range(count):
            await shop.place([f"c-{{n % {CUSTOMERS}}}"])

asyncio.run(main())
"""


def killed_shop(folder: Path, when: str, count: int) -> None:
    """A shop in its own process that dies around the commit of this order."""
    done = subprocess.run([sys.executable, "-c", SHOP, str(folder), when, str(count)], timeout=60)
    assert done.returncode == -signal.SIGKILL


def orders(folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(shop_file(folder))) as db:
        return int(db.execute("SELECT count(*) FROM orders").fetchone()[0])


async def finished(folder: Path, more: int) -> tuple[Balance, list[str]]:
    """Run workers, and a shop that places more orders, until every order is handled. Then ask the judge."""
    effects.create(folder)
    async with open_app(folder) as app:
        async with open_shop(folder, app) as shop:
            await shop.place([f"c-{n % CUSTOMERS}" for n in range(more)])
            fleet = Fleet(folder, 2, Work(), lambda kind, text: None)
            try:
                await handled(folder)
                await fleet.stop()
            finally:
                fleet.end_now()
        return judged(folder, await dead_letters(app, folder))


async def handled(folder: Path) -> None:
    with contextlib.closing(Judge(folder)) as judge:
        async with asyncio.timeout(60):
            while judge.balance().handled < orders(folder):
                await asyncio.sleep(0.05)
                judge.read()


@pytest.mark.parametrize("is_own_file", [True, False], ids=["own file", "other broker"])
@pytest.mark.parametrize(("when", "committed"), [("before", 29), ("after", 30)])
def test_no_committed_order_is_lost_and_no_other_is_handled(
    tmp_path: Path, is_own_file: bool, when: str, committed: int
) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    if not is_own_file:
        use_broker(folder, brokers.embedded(tmp_path / "broker.db"))
    killed_shop(folder, when, 30)
    assert orders(folder) == committed
    balance, faults = asyncio.run(finished(folder, more=20))
    assert not faults
    assert (balance.published, balance.handled, balance.lost) == (committed + 20, committed + 20, 0)
