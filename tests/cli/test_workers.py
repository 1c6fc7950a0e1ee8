"""`onward run` with several processes, and with --reload."""

import os
import re
import signal
import sys
import time

import pytest

from onward.cli import policy, supervisor
from onward.cli.supervisor import Supervisor
from onward.observe.workers import Workers
from onward.signals import ECHO_S
from tests.cli.shell import Running, Shell, is_alive, until
from tests.cli.system import owners, publish
from tests.cli.test_run import LINGERER, SLEEPER, SWALLOWER

pytestmark = pytest.mark.slow  # real processes, seconds each

FREEZER = """
import os, signal
from onward import Onward
from onward.brokers.sqlite.gate import Gate, lock_path
from pathlib import Path

app = Onward("sqlite:///shop.db", lease_s=2.0, takeover_grace_s=0.1)


@app.handler("orders", group="billing")
async def bill(order: dict) -> None:
    if order["id"] == "freeze" and not os.path.exists("frozen"):
        open("frozen", "w").close()
        with Gate(lock_path(Path("shop.db"))).held():
            os.kill(os.getpid(), signal.SIGSTOP)
    print("billed", order["id"], flush=True)
"""

GARBLED = """
import os, time
from onward.cli import leash
from onward.observe.health import Health
from onward.observe.workers import Report

link = os.dup(0)
os.write(link, b"not a hello\\n")
held = leash.take()
held.greet(leash.Hello(0.0))
os.write(link, b"not a report\\n" + bytes([255, 254]) + b"\\n" + b"gQ==\\n" + b"kQ==" * 100_000 + b"\\n")
while not held.report(lambda: Report(Health(True), (), (), "shop")):  # the socket is full
    time.sleep(0.01)
time.sleep(60)
"""

GREETS_AND_DIES = """
import os, signal
from onward.cli import leash

leash.take().greet(leash.Hello(0.0))
os.kill(os.getpid(), signal.SIGKILL)
"""

LATE_MISTAKE = f"""
import sys, time
from onward.cli import leash

leash.take().greet(leash.Hello(0.0))
time.sleep({policy.WORKS_S + 0.5})
sys.exit({policy.USAGE})
"""


def pids(running: Running) -> list[int]:
    """The process ids of all workers that were started, in order."""
    return [int(pid) for pid in re.findall(r"worker \d+ \(pid (\d+)\) started", running.err)]


def started(shell: Shell, *options: str, application: str = "shop:app", workers: int = 2) -> Running:
    running = shell.start("run", application, "--workers", str(workers), *options)
    running.saw("handles topic orders", times=workers)
    return running


def stopped(running: Running) -> int:
    running.send(signal.SIGTERM)
    return running.ended()


def tend_until_done(fleet: Supervisor) -> None:
    def tended() -> bool:
        fleet.tend()
        return fleet.done

    until(tended, "the fleet ends")


def test_a_killed_worker_is_replaced(shell: Shell) -> None:
    running = started(shell)
    os.kill(pids(running)[0], signal.SIGKILL)
    running.saw("handles topic orders", times=3)
    assert "was killed by SIGKILL; starting another" in running.err
    publish(shell.folder, *range(10))
    running.saw("billed", times=10)
    assert stopped(running) == 0
    assert running.err.endswith(" INFO    all workers have stopped\n")
    assert not any(map(is_alive, pids(running)))
    assert running.out.count("billed") == 10


def test_a_single_worker_is_replaced_too(shell: Shell) -> None:
    running = started(shell, workers=1)
    os.kill(pids(running)[0], signal.SIGKILL)
    running.saw("handles topic orders", times=2)
    assert stopped(running) == 0


def test_workers_die_with_a_killed_supervisor(shell: Shell) -> None:
    running = started(shell)
    running.send(signal.SIGKILL)
    running.ended()
    until(lambda: not any(map(is_alive, pids(running))), "the workers have ended")


def test_a_second_signal_ends_all_at_once(shell: Shell) -> None:
    shell.write("sleeper.py", SLEEPER)
    publish(shell.folder, 1)
    running = started(shell, application="sleeper:app")
    running.saw("sleeping")
    running.send(signal.SIGTERM)
    running.saw("SIGTERM: stopping")
    time.sleep(ECHO_S)  # sooner it would be taken for the same signal sent twice
    running.send(signal.SIGTERM)
    assert running.ended() == 128 + signal.SIGTERM
    assert not any(map(is_alive, pids(running)))


def test_code_that_delays_the_exit_of_a_worker_is_named_and_ended(shell: Shell) -> None:
    shell.write("lingerer.py", LINGERER.format(spare_s=1.0) + SWALLOWER)
    publish(shell.folder, 1)
    running = started(shell, application="lingerer:app")
    running.saw("lingering")
    assert stopped(running) == policy.NO
    assert running.err.count("still running: ") == 1
    assert " in swallow at " in running.err


def test_a_crash_loop_gives_up(shell: Shell) -> None:
    shell.write("crash.py", "import os\nos._exit(7)\n")
    running = shell.start("run", "crash:app", "--workers", "2")
    assert running.ended() == 1
    assert len(pids(running)) == supervisor.START_LIMIT
    assert "ended with exit code 7; giving up" in running.err


def test_a_bad_module_is_reported_once(shell: Shell) -> None:
    done = shell.run("run", "no_such_module:app", "--workers", "2")
    assert done.returncode == policy.USAGE
    assert done.stderr.count("no module 'no_such_module'") == 1
    assert "giving up" in done.stderr


def test_an_unknown_setting_in_the_environment_is_reported_once(shell: Shell) -> None:
    shell.environment["ONWARD_SERVICE_HOST"] = "10.0.0.1"
    running = started(shell)
    os.kill(pids(running)[0], signal.SIGKILL)
    running.saw("handles topic orders", times=3)
    assert stopped(running) == 0
    (line,) = [line for line in running.err.splitlines() if "ONWARD_SERVICE_HOST" in line]
    assert " WARNING ignored these environment variables" in line


def test_the_supervisor_logs_the_broker_and_an_ignored_url_once(shell: Shell) -> None:
    shell.environment["ONWARD_URL"] = "sqlite:///other.db"
    running = started(shell)
    os.kill(pids(running)[0], signal.SIGKILL)
    running.saw("handles topic orders", times=3)
    assert stopped(running) == 0
    assert running.err.count(" INFO    broker: sqlite:///shop.db\n") == 1
    assert running.err.count(" WARNING ONWARD_URL is ignored") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("app = Onward('sqlite:///shop.db', partitionss=2)", "did you mean 'partitions'?"),
        (
            "app = Onward('nats://host')\n@app.handler('t')\nasync def f(value: dict): ...",
            "no broker for 'nats://host'",
        ),
    ],
)
def test_a_wrong_setting_is_reported_once_and_not_tried_again(shell: Shell, line: str, message: str) -> None:
    shell.write("wrong.py", f"from onward import Onward\n{line}\n")
    running = shell.start("run", "wrong:app", "--workers", "2")
    assert running.ended() == policy.USAGE
    assert running.err.count(message) == 1
    assert len(pids(running)) == 1


def test_a_topic_that_does_not_fit_is_not_tried_again(shell: Shell) -> None:
    publish(shell.folder, 1)
    shell.write("wrong.py", (shell.folder / "shop.py").read_text().replace('shop.db"', 'shop.db", partitions=3'))
    running = shell.start("run", "wrong:app", "--workers", "2")
    assert running.ended() == policy.USAGE
    assert "topic orders has 8 partitions, this process expects 3" in running.err
    assert "ended with exit code 2; giving up\n" in running.err, "it had started"
    assert len(pids(running)) <= 2


def test_reload_restarts_on_an_edit(shell: Shell) -> None:
    running = shell.start("run", "shop:app", "--reload")
    running.saw("handles topic orders")
    good = (shell.folder / "shop.py").read_text()
    shell.write("shop.py", "1 / 0")
    running.saw("shop.py changed: restarting")
    running.saw("ZeroDivisionError")
    running.saw("waiting for a file to change")
    shell.write("shop.py", good.replace("billed", "charged"))
    running.saw("handles topic orders", times=2)
    publish(shell.folder, 1)
    running.saw("charged 1")
    assert stopped(running) == 0


def test_reload_waits_for_an_edit_when_the_application_cannot_subscribe(shell: Shell) -> None:
    publish(shell.folder, 1)
    good = (shell.folder / "shop.py").read_text()
    shell.write("shop.py", good.replace('shop.db"', 'shop.db", partitions=3'))
    running = shell.start("run", "shop:app", "--reload")
    running.saw("waiting for a file to change")
    shell.write("shop.py", good)
    running.saw("billed 1")
    assert stopped(running) == 0


def test_a_stopped_worker_that_holds_the_lock_is_killed(shell: Shell) -> None:
    shell.write("freezer.py", FREEZER)
    running = started(shell, application="freezer:app")
    publish(shell.folder, "freeze")
    running.saw("has held the lock of")
    running.saw("handles topic orders", times=3)
    running.saw("billed freeze")
    assert stopped(running) == 0


def test_a_child_that_does_not_end_in_time_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    fleet = Supervisor([sys.executable, "-c", stubborn], 1)
    fleet.tend()
    child = fleet.slots[0].child
    assert child is not None
    # The test proves something only if the child ignores the signal.
    until(lambda: _ignores_sigterm(child.pid), "the child ignores SIGTERM")
    fleet.stop()
    tend_until_done(fleet)
    assert fleet.code == 1
    assert "did not end in time" in caplog.text


def _ignores_sigterm(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as status:
        (mask,) = [int(line.split()[1], 16) for line in status if line.startswith("SigIgn:")]
    return bool(mask >> (signal.SIGTERM - 1) & 1)


def test_a_program_that_cannot_be_started_is_given_up() -> None:
    fleet = Supervisor(["/no/such/program"], 1)
    tend_until_done(fleet)
    assert fleet.code == 1


def test_a_program_that_dies_right_after_its_hello_is_not_given_up(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Supervisor([sys.executable, "-c", GREETS_AND_DIES], 1)

    def replaced() -> bool:
        fleet.tend()
        return fleet.done or caplog.text.count("starting another") > supervisor.START_LIMIT

    until(replaced, "it is started again and again")
    assert not fleet.done
    fleet.stop()
    tend_until_done(fleet)


def test_a_mistake_that_is_noticed_before_the_handlers_join_is_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    fleet = Supervisor([sys.executable, "-c", LATE_MISTAKE], 2)
    tend_until_done(fleet)
    assert fleet.code == policy.USAGE
    assert caplog.text.count(" started") == 2
    assert "starting another" not in caplog.text


def test_a_worker_that_cannot_be_replaced_does_not_end_one_that_works(shell: Shell) -> None:
    running = started(shell)
    until(lambda: len(owners(shell.folder, "billing")) == 2, "both workers have joined")
    time.sleep(policy.WORKS_S + 0.5)
    shell.write("shop.py", "1 / 0")
    os.kill(pids(running)[0], signal.SIGKILL)
    running.saw(f"ended with exit code {policy.USAGE}; starting another", times=supervisor.START_LIMIT + 1)
    publish(shell.folder, 1)
    running.saw("billed 1")
    running.send(signal.SIGTERM)
    running.ended()


def test_a_message_that_cannot_be_read_is_dropped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    board = Workers(1)
    fleet = Supervisor([sys.executable, "-c", GARBLED], 1, board=board)

    def ready() -> bool:
        fleet.tend()
        return board.health().ready

    until(ready, "the report after the garbage arrives")
    assert caplog.text.count("cannot be read") == 1
    assert caplog.text.count("started") == 1, "the worker is not replaced"
    fleet.stop()
    tend_until_done(fleet)


@pytest.mark.parametrize("what", ["b'x' * 65_536", "b'\\n' * 65_536"])
def test_a_worker_that_floods_its_supervisor_does_not_block_it(what: str) -> None:
    fleet = Supervisor([sys.executable, "-c", f"import os\nwhile True: os.write(0, {what})"], 1)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        fleet.tend()
    fleet.stop()
    tend_until_done(fleet)


def test_a_worker_that_never_completes_a_message_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fleet = Supervisor([sys.executable, "-c", "import os\nwhile True: os.write(0, b'x' * 65_536)"], 1)

    def replaced() -> bool:
        fleet.tend()
        return caplog.text.count("started") == 2

    until(replaced, "another worker is started")
    assert caplog.text.count("without a complete message: killed") == 1
    fleet.stop()
    tend_until_done(fleet)
