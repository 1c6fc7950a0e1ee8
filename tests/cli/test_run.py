"""`onward run` in one process."""

import signal

import pytest

from tests.cli.shell import Shell
from tests.cli.system import publish

SLEEPER = """
import asyncio
from onward import Onward

app = Onward("sqlite:///shop.db")


@app.handler("orders")
async def sleep(order: dict) -> None:
    print("sleeping", flush=True)
    await asyncio.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_it_with_everything_settled(shell: Shell, number: signal.Signals) -> None:
    publish(shell.folder, *range(20))
    first = shell.start("run", "shop:app")
    first.saw("billed", times=20)
    first.send(number)
    assert first.ended() == 0
    publish(shell.folder, "last")
    second = shell.start("run", "shop:app")
    second.saw("billed last")
    second.send(number)
    assert second.ended() == 0
    assert second.out == "billed last\n"


def test_a_second_signal_ends_it_at_once(shell: Shell) -> None:
    shell.write("sleeper.py", SLEEPER)
    publish(shell.folder, 1)
    running = shell.start("run", "sleeper:app")
    running.saw("sleeping")
    running.send(signal.SIGTERM)
    running.saw("once more ends at once")
    running.send(signal.SIGTERM)
    assert running.ended(patience_s=5.0) == -signal.SIGTERM


@pytest.mark.slow
def test_logs_one_line_with_time_and_level(shell: Shell) -> None:
    running = shell.start("run", "shop:app")
    running.saw("shop.bill takes orders")
    assert " INFO    shop.bill takes orders for group billing" in running.err
    quiet = shell.start("run", "shop:app", "--log-level", "error")
    publish(shell.folder, *range(20))
    for each in (running, quiet):
        each.send(signal.SIGTERM)
        each.ended()
    assert quiet.err == ""


@pytest.mark.slow
def test_an_application_that_sets_up_logging_is_left_alone(shell: Shell) -> None:
    shell.write(
        "loud.py", "import logging\nlogging.basicConfig(level=10, format='mine %(message)s')\nfrom shop import app\n"
    )
    running = shell.start("run", "loud:app")
    running.saw("mine shop.bill takes orders")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_nothing_to_run(shell: Shell) -> None:
    shell.write("idle.py", "from onward import Onward\napp = Onward('sqlite:///idle.db')\n")
    done = shell.run("run", "idle:app")
    assert done.returncode == 1
    assert done.stderr.startswith("error: nothing to run")
