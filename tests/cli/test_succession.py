"""How soon the keys of a killed worker of `onward run --workers` go on."""

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from onward.app import Onward
from tests.cli.shell import Running, Shell, is_alive, until
from tests.cli.system import url
from tests.cli.test_workers import pids, started, stopped

pytestmark = pytest.mark.slow  # real processes, seconds each

LONG_S = 30.0  # lease and grace: a takeover that does not wait for them is much faster
SHORT_S = 4.0

SHOP = """
import os, subprocess
from onward import Onward

app = Onward("sqlite:///shop.db", lease_s={seconds}, takeover_grace_s={seconds})


@app.handler("orders", group="billing", {options})
def bill(order: dict) -> None:
    {first}
    line = f"billed {{order['id']}} {{os.getpid()}} {{os.getppid()}}\\n"
    os.write(1, line.encode())  # print would write the line and its end apart, and threads could mix them
"""


def fleet(shell: Shell, seconds: float, *, first: str = "pass", options: str = "") -> tuple[Running, dict[int, int]]:
    """Two workers that own half of the partitions each. Also returns which process bills each customer."""
    shell.write("shop.py", SHOP.format(seconds=seconds, first=first, options=options))
    running = started(shell)
    until(lambda: sorted(shares(shell.folder)) == [4, 4], "each has its share")
    publish(shell.folder, *range(16))
    running.saw("billed", times=16)
    return running, billed(running)


def shares(folder: Path) -> list[int]:
    """How many partitions each worker owns."""
    with contextlib.closing(sqlite3.connect(folder / "shop.db")) as db:
        return [
            count for (count,) in db.execute("SELECT count(*) FROM onward_group WHERE owner NOTNULL GROUP BY owner")
        ]


def publish(folder: Path, *ids: int) -> None:
    async def run() -> None:
        async with Onward(url(folder)) as app:
            await app.publish_many("orders", [(f"c-{number % 100}", {"id": number}) for number in ids])

    asyncio.run(run())


def billed(running: Running, column: int = 1) -> dict[int, int]:
    """The process that billed each order; with `column` 2, the parent of that process."""
    found = re.findall(r"^billed (\d+) (\d+) (\d+)$", running.out, re.MULTILINE)
    return {int(line[0]): int(line[column]) for line in found}


def killed(running: Running, pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def next_of(shell: Shell, running: Running, customer: int) -> None:
    """Publish the customer's next order and wait until it is billed."""
    publish(shell.folder, 100 + customer)
    running.saw(f"billed {100 + customer} ")


def test_the_keys_of_a_killed_worker_go_on_at_once(shell: Shell) -> None:
    running, owners = fleet(shell, LONG_S)
    killed_at = killed(running, owners[3])
    next_of(shell, running, 3)
    assert time.monotonic() - killed_at < LONG_S
    assert stopped(running) == 0
    assert "still run" not in running.err


def test_the_third_worker_takes_over_from_the_first(shell: Shell) -> None:
    """The second worker is killed before it has joined."""
    running, owners = fleet(shell, LONG_S)
    killed_at = killed(running, owners[3])
    until(lambda: len(pids(running)) == 3, "a replacement starts")
    os.kill(pids(running)[2], signal.SIGKILL)
    next_of(shell, running, 3)
    assert time.monotonic() - killed_at < LONG_S
    assert stopped(running) == 0


@pytest.mark.parametrize("stop", [False, True])
def test_engine_workers_end_with_their_process_and_its_keys_go_on(shell: Shell, stop: bool) -> None:
    """Also an engine worker that is stopped (SIGSTOP) and would go on later."""
    running, workers = fleet(shell, LONG_S, options="engine='processes', workers=1")
    parent = billed(running, 2)[3]
    if stop:
        os.kill(workers[3], signal.SIGSTOP)
    killed_at = killed(running, parent)
    next_of(shell, running, 3)
    assert time.monotonic() - killed_at < LONG_S
    assert not is_alive(workers[3])
    assert stopped(running) == 0


def test_keys_wait_for_the_grace_while_a_program_of_the_killed_worker_runs(shell: Shell) -> None:
    running, owners = fleet(shell, SHORT_S, first="subprocess.Popen(['sleep', '600'])")
    try:
        killed_at = killed(running, owners[3])
        next_of(shell, running, 3)
        assert time.monotonic() - killed_at > SHORT_S
        assert re.search(r"has left processes that still run: .*\d+ \(sleep\)", running.err)
        assert stopped(running) == 0
    finally:
        for worker in pids(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
