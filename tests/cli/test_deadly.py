"""An event that kills its process is named in the log."""

import asyncio
import signal

import pytest

from onward.app import Onward
from tests.cli.shell import Shell
from tests.cli.system import url
from tests.cli.test_workers import started, stopped

pytestmark = pytest.mark.slow  # real processes, seconds each

DEADLY = """
import os, signal
from onward import Onward, Retry

app = Onward("sqlite:///shop.db", lease_s=30.0, crash_limit=1, retry=Retry(attempts=1))


@app.handler("orders", group="billing", {options})
def bill(order: dict) -> None:
    if order["id"] == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    print("billed", order["id"], flush=True)
"""


def publish(shell: Shell, other: str = "c-1", partitions: int = 8) -> str:
    """Publish a deadly order of c-1, then another order of `other`. Returns the id of the deadly event."""

    async def run() -> str:
        async with Onward(url(shell.folder), partitions=partitions) as app:
            events = await app.publish_many("orders", [("c-1", {"id": "deadly"}), (other, {"id": "next"})])
            return events[0].id

    return asyncio.run(run())


def test_the_event_that_killed_a_supervised_worker_is_named(shell: Shell) -> None:
    shell.write("deadly.py", DEADLY.format(options=""))
    running = started(shell, application="deadly:app")
    deadly = publish(shell)
    running.saw("billed next")
    name = f"deadly.bill: event {deadly} of orders/"
    assert [
        line
        for line in running.err.splitlines()
        if name in line and "may have been running when its process died" in line
    ]
    (line,) = [
        line
        for line in running.err.splitlines()
        if name in line and " is dead: it killed its process (crash 1 of crash_limit=1)" in line
    ]
    assert "key 'c-1'" in line
    assert stopped(running) == 0


def test_a_single_worker_goes_on_after_an_event_that_kills_it(shell: Shell) -> None:
    shell.write(
        "deadly.py", DEADLY.format(options="").replace("crash_limit=1, retry=Retry(attempts=1)", "partitions=1")
    )
    running = started(shell, application="deadly:app", workers=1)
    publish(shell, other="c-2", partitions=1)
    running.saw("billed next")
    running.saw("is dead: it killed its process")
    assert "giving up" not in running.err
    (letter,) = shell.run("dead", "list", "--url", "sqlite:///shop.db", "--json").stdout.splitlines()
    assert '"crashed"' in letter
    assert stopped(running) == 0


def test_the_event_that_killed_an_engine_worker_is_named(shell: Shell) -> None:
    shell.write("deadly.py", DEADLY.format(options="engine='processes', workers=1"))
    running = shell.start("run", "deadly:app")
    running.saw("handles topic orders")
    deadly = publish(shell)
    running.saw("billed next")
    (line,) = [
        line
        for line in running.err.splitlines()
        if f"was killed by SIGKILL (out of memory?) while it ran event {deadly}" in line
    ]
    assert "deadly.bill: orders/" in line
    assert "key 'c-1'" in line
    running.send(signal.SIGTERM)
    assert running.ended() == 0
