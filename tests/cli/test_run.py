"""`onward run` in one process."""

import signal

import pytest

from onward.cli import policy
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
    assert running.ended() == -signal.SIGTERM


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
    assert done.returncode == policy.USAGE
    assert done.stderr.startswith("error: nothing to run")


@pytest.mark.parametrize("source", ["ONWARD_APP", "onward.toml"])
def test_the_application_is_found_without_an_argument(shell: Shell, source: str) -> None:
    if source == "ONWARD_APP":
        shell.environment["ONWARD_APP"] = "shop:app"
    else:
        shell.write("onward.toml", 'app = "shop:app"\n')
    running = shell.start("run")
    running.saw("takes orders")
    assert running.err.startswith(f"using shop:app ({source})\n")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_no_application_at_all(shell: Shell) -> None:
    done = shell.run("run")
    assert done.returncode == policy.USAGE
    assert "ONWARD_APP" in done.stderr


def test_a_consumer_that_dies_ends_the_run_and_is_told_of_once(shell: Shell) -> None:
    broken = "from onward.flow.consumer import Consumer\ndef take(self, messages): raise RuntimeError('boom')\n"
    shell.write("broken.py", f"{broken}Consumer._take = take\nfrom shop import app\n")
    running = shell.start("run", "broken:app")
    assert running.ended() == policy.NO
    assert running.err.count("Traceback") == 1
    assert running.err.count("RuntimeError: boom") == 1
    assert "This ended the consumer of shop.bill." in running.err
