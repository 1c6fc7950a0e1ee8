"""`onward run` in one process."""

import signal
import time

import pytest

from onward.cli import exit_limit, policy
from onward.signals import ECHO_S
from tests.cli.shell import Running, Shell, is_alive, until
from tests.cli.system import owners, publish

SLEEPER = """
import asyncio
from onward import Onward

app = Onward("sqlite:///shop.db")


@app.handler("orders")
async def sleep(order: dict) -> None:
    print("sleeping", flush=True)
    await asyncio.sleep(60)
"""


LINGERER = """
import asyncio, atexit, os, threading, time
from onward import Onward
from onward.cli import exit_limit

exit_limit.SPARE_S = {spare_s}
app = Onward("sqlite:///shop.db", drain_timeout_s=0.5)
handler = app.handler("orders", group="g", timeout_s=None)
atexit.register(print, "at exit", flush=True)


def linger():
    print("lingering", os.getpid(), flush=True)
    threading.Event().wait()
"""

THREAD = """
@handler
async def leave(order: dict) -> None:
    threading.Thread(target=linger, name="left-behind").start()
"""

POOL = """
@handler
async def wait(order: dict) -> None:
    await asyncio.to_thread(linger)
"""

SWALLOWER = """
@handler
async def swallow(order: dict) -> None:
    print("lingering", flush=True)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
"""

BLOCKER = """
@handler
async def block(order: dict) -> None:
    linger()
"""

BUSY_THREAD = """
@handler
def wait(order: dict) -> None:
    linger()
"""

WORKERS = """
@app.handler("orders", group="p", engine="processes", workers=1, timeout_s=None)
def work(order: dict) -> None:
    linger()


@handler
async def block(order: dict) -> None:
    while not os.path.exists("go"):
        await asyncio.sleep(0.01)
    linger()
"""


def lingering(shell: Shell, handlers: str, *, spare_s: float = 1.0) -> Running:
    """Start an application that handles an event and has something that does not end."""
    shell.write("lingerer.py", LINGERER.format(spare_s=spare_s) + handlers)
    publish(shell.folder, 1)
    running = shell.start("run", "lingerer:app")
    running.saw("lingering")
    return running


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
    running.saw("a second signal ends the process at once")
    time.sleep(ECHO_S)  # sooner it would be taken for the same signal sent twice
    running.send(signal.SIGTERM)
    assert running.ended() == -signal.SIGTERM


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_is_sent_twice_counts_once(shell: Shell, first: signal.Signals) -> None:
    shell.write("napper.py", SLEEPER.replace("sleep(60)", "sleep(1)"))
    publish(shell.folder, 1)
    running = shell.start("run", "napper:app")
    running.saw("sleeping")
    running.send(first)
    time.sleep(0.05)
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    assert running.err.count("a second signal ends the process at once") == 1


def test_a_signal_that_is_sent_twice_does_not_cut_the_last_moments(shell: Shell) -> None:
    """When the second signal arrives, the handlers have ended, but the process has not."""
    shell.write("lazy.py", "import atexit, time\nfrom shop import app\natexit.register(time.sleep, 1)\n")
    running = shell.start("run", "lazy:app")
    running.saw("handles topic orders")
    for _ in range(2):
        running.send(signal.SIGTERM)
        time.sleep(0.05)
    assert running.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_is_sent_twice_does_not_cut_an_idle_process(shell: Shell, number: signal.Signals) -> None:
    """It ends so fast that the second signal arrives while Python shuts down."""
    codes = {}
    for gap_ms in (20, 50, 100):
        running = shell.start("run", "shop:app")
        running.saw("handles topic orders")
        running.send(number)
        time.sleep(gap_ms / 1000)
        running.send(number)
        codes[gap_ms] = running.ended()
    assert codes == {20: 0, 50: 0, 100: 0}


def test_a_later_signal_ends_a_process_that_waits_for_a_thread(shell: Shell) -> None:
    """The handlers have ended, and Python joins the thread that they left running."""
    running = lingering(shell, THREAD, spare_s=60.0)
    running.send(signal.SIGTERM)
    running.saw("stopped")
    time.sleep(ECHO_S)  # sooner it would be taken for the same signal sent twice
    running.send(signal.SIGTERM)
    assert running.ended(20.0) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("handlers", "culprit"),
    [
        (THREAD, "thread left-behind in linger at "),
        (POOL, " in linger at "),
        (SWALLOWER, " in swallow at "),
        (BLOCKER, "thread MainThread in linger at "),
    ],
)
def test_code_that_delays_the_exit_is_named_and_ended(shell: Shell, handlers: str, culprit: str) -> None:
    running = lingering(shell, handlers)
    running.send(signal.SIGTERM)
    assert running.ended(20.0) == policy.NO
    (line,) = [line for line in running.err.splitlines() if "still running: " in line]
    assert culprit in line
    assert "site-packages" not in line, "a frame of the command line was named"


@pytest.mark.slow
def test_the_process_ends_five_seconds_after_the_drain(shell: Shell) -> None:
    running = lingering(shell, SWALLOWER, spare_s=exit_limit.SPARE_S)
    asked_at = time.monotonic()
    running.send(signal.SIGTERM)
    assert running.ended(20.0) == policy.NO
    assert time.monotonic() - asked_at < 0.5 + 5.0 + 5.0  # the last for a busy machine
    assert not owners(shell.folder, "g"), "it left its group before it was ended"


def test_a_thread_of_the_engine_does_not_delay_the_exit(shell: Shell) -> None:
    running = lingering(shell, BUSY_THREAD, spare_s=30.0)
    running.send(signal.SIGTERM)
    assert running.ended(20.0) == policy.OK
    assert running.out.endswith("at exit\n"), "the application's atexit functions run"


def test_a_handler_that_is_cancelled_at_drain_timeout_s_is_not_a_failure(shell: Shell) -> None:
    shell.write("sleeper.py", SLEEPER.replace('shop.db"', 'shop.db", drain_timeout_s=0.1'))
    publish(shell.folder, 1)
    for _ in range(2):
        running = shell.start("run", "sleeper:app")
        running.saw("sleeping")  # the second time: the event runs again
        running.send(signal.SIGTERM)
        assert running.ended(20.0) == policy.OK


def test_engine_workers_end_with_a_process_that_does_not_exit_in_time(shell: Shell) -> None:
    running = lingering(shell, WORKERS)
    worker = int(running.out.split()[1])
    shell.write("go", "")
    running.saw("lingering", times=2)
    running.send(signal.SIGTERM)
    assert running.ended(20.0) == policy.NO
    assert worker != running.process.pid
    until(lambda: not is_alive(worker), "the worker has ended")


@pytest.mark.slow
def test_logs_one_line_with_time_and_level(shell: Shell) -> None:
    running = shell.start("run", "shop:app")
    running.saw("shop.bill handles topic orders")
    assert " INFO    shop.bill handles topic orders for group billing" in running.err
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
    running.saw("mine shop.bill handles topic orders")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_an_application_without_handlers_is_refused(shell: Shell) -> None:
    shell.write("idle.py", "from onward import Onward\napp = Onward('sqlite:///idle.db')\n")
    done = shell.run("run", "idle:app")
    assert done.returncode == policy.USAGE
    assert "\nerror: nothing to run" in done.stderr


@pytest.mark.parametrize("source", ["ONWARD_APP", "onward.toml"])
def test_the_application_is_found_without_an_argument(shell: Shell, source: str) -> None:
    if source == "ONWARD_APP":
        shell.environment["ONWARD_APP"] = "shop:app"
    else:
        shell.write("onward.toml", 'app = "shop:app"\n')
    running = shell.start("run")
    running.saw("handles topic orders")
    assert running.err.startswith(f"using shop:app ({source})\n")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_the_broker_is_logged_and_an_ignored_url_is_a_warning(shell: Shell) -> None:
    running = shell.start("run", "shop:app")
    running.saw("handles topic orders")
    assert running.err.count(" INFO    broker: sqlite:///shop.db\n") == 1
    assert "ONWARD_URL" not in running.err
    shell.environment["ONWARD_URL"] = "sqlite:///other.db"
    warned = shell.start("run", "shop:app")
    warned.saw("handles topic orders")
    assert warned.err.count(" WARNING ONWARD_URL is ignored: the application names its URL in the code") == 1
    for each in (running, warned):
        each.send(signal.SIGTERM)
        assert each.ended() == 0


def test_a_missing_application_is_reported(shell: Shell) -> None:
    done = shell.run("run")
    assert done.returncode == policy.USAGE
    assert "ONWARD_APP" in done.stderr


def test_a_consumer_that_dies_ends_the_run_and_is_reported_once(shell: Shell) -> None:
    broken = "from onward.flow.consumer import Consumer\ndef take(self, messages): raise RuntimeError('boom')\n"
    shell.write("broken.py", f"{broken}Consumer._take = take\nfrom shop import app\n")
    running = shell.start("run", "broken:app")
    assert running.ended() == policy.NO
    assert running.err.count("Traceback") == 1
    assert running.err.count("RuntimeError: boom") == 1
    assert "This ended the consumer of shop.bill." in running.err


FAILS = """
from onward.flow.consumer import Consumer


def take(self, messages):
    raise RuntimeError("boom")


Consumer._take = take
threading.Thread(target=linger, name="left-behind").start()
"""


def test_a_thread_does_not_delay_the_exit_of_an_application_that_ended_by_itself(shell: Shell) -> None:
    running = lingering(shell, THREAD + FAILS, spare_s=0.5)
    assert running.ended(40.0) == policy.NO
    (line,) = [line for line in running.err.splitlines() if "still running: " in line]
    assert "of the end of the application" in line
    assert "thread left-behind" in line
