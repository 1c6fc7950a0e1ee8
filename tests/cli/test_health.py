"""`onward health`, and the endpoint of several workers."""

import asyncio
import http.server
import os
import re
import signal
import socket
import threading
from pathlib import Path

import pytest

from onward import Onward
from onward.brokers.sqlite import lock_holder
from onward.cli import policy
from tests.cli.shell import Running, Shell, until
from tests.cli.system import publish, url
from tests.cli.test_workers import pids, stopped
from tests.observe.test_endpoint import fetch

STUCK = """
import time
from onward import Onward, Retry
from onward.observe import standstill

standstill.LEAST_S = 0.5
app = Onward("sqlite:///shop.db", lease_s=1.0, drain_timeout_s=0.5)


@app.handler("orders", group="billing", timeout_s=0.2, retry=Retry(attempts=1, first_delay_s=0.1, max_delay_s=0.1))
def bill(order: dict) -> None:
    time.sleep(30)
"""

HICCUPS = """
from onward.observe.metrics import Family, Sample

scrapes = 0
readings = app.readings


def hiccup():
    global scrapes
    scrapes += 1
    if scrapes in (2, 3):
        raise RuntimeError("hiccup")
    return [Family("scrapes", "gauge", "", ("status",), (Sample(("later" if scrapes > 5 else "first",), scrapes),))]


def broken():
    if scrapes in (4, 5):
        hiccup()
        raise RuntimeError("no readings")
    return readings()


app.readings = broken
app.registry.collect_from(hiccup)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def address(running: Running) -> str:
    """The address where it serves."""
    running.saw("metrics at http://")
    found = re.search(r"metrics at http://(\S+)/metrics", running.err)
    assert found is not None
    return found[1]


def endpoints(shell: Shell) -> list[str | None]:
    """The endpoints of the group's members."""

    async def ask() -> list[str | None]:
        async with Onward(url(shell.folder)) as app:
            (group,) = await app.broker.groups("orders")
            return [member.endpoint for member in group.members]

    return asyncio.run(ask())


def asked(shell: Shell, *options: str) -> tuple[int, str]:
    done = shell.run("health", *options)
    return done.returncode, (done.stdout + done.stderr).strip()


def test_a_probe_answers_yes_or_no_with_the_reason(shell: Shell) -> None:
    shell.write("stuck.py", STUCK)
    running = shell.start("run", "stuck:app", "--metrics", "0")
    place = address(running)
    until(lambda: asked(shell, "--ready", "--metrics", place) == (policy.OK, "ready"), "it is ready")
    assert asked(shell, "--live", "--metrics", place) == (policy.OK, "live")
    publish(shell.folder, 1)
    until(lambda: asked(shell, "--metrics", place)[0] == policy.NO, "it is not ready")
    code, text = asked(shell, "--metrics", place)
    assert code == policy.NO
    assert re.fullmatch(r"not ready: stuck\.bill: orders/\d is stuck at position \d+: running for .*", text)
    assert asked(shell, "--live", "--metrics", place) == (policy.OK, "live")


def test_a_probe_without_a_server_answers_no(shell: Shell) -> None:
    port = free_port()
    code, text = asked(shell, "--live", "--metrics", str(port))
    assert code == policy.NO
    assert text.startswith(f"not live: nothing answers at 127.0.0.1:{port}")


def test_a_probe_that_reaches_another_program_answers_no(shell: Shell) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request).start()
        code, text = asked(shell, "--metrics", str(other.server_port))
    assert code == policy.NO
    assert text == f"not ready: the server at 127.0.0.1:{other.server_port} is not Onward"


def test_a_probe_without_a_valid_address_is_a_misuse(shell: Shell) -> None:
    for options in ((), ("--metrics", "here")):
        code, text = asked(shell, *options)
        assert code == policy.USAGE
        assert "--metrics" in text


def test_the_environment_sets_the_address_to_serve_and_to_ask(shell: Shell) -> None:
    shell.environment["ONWARD_METRICS"] = str(free_port())
    running = shell.start("run", "shop:app")
    assert address(running) == f"127.0.0.1:{shell.environment['ONWARD_METRICS']}"
    until(lambda: asked(shell, "--ready") == (policy.OK, "ready"), "it is ready")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_a_member_shows_the_endpoint_of_its_process(shell: Shell) -> None:
    running = shell.start("run", "shop:app", "--metrics", "0")
    place = address(running)
    until(lambda: fetch(f"http://{place}/health/ready")[0] == 200, "it is ready")
    assert endpoints(shell) == [place]
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def stop_between_writes(pid: int, database: Path) -> None:
    """Stop the process while it does not hold the write lock. Otherwise it would block the others too, until the
    supervisor kills it."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        holder = lock_holder(database)
        if holder is None or holder.pid != pid:
            return
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
class TestWorkers:
    def started(self, shell: Shell, *options: str, metrics: str = "0") -> tuple[Running, str]:
        running = shell.start("run", "shop:app", "--workers", "2", "--metrics", metrics, *options)
        return running, f"http://{address(running)}"

    def test_one_endpoint_serves_all_workers(self, shell: Shell) -> None:
        running, where = self.started(shell)
        until(lambda: fetch(f"{where}/health/ready")[0] == 200, "both are ready")
        assert fetch(f"{where}/health/live")[0] == 200
        publish(shell.folder, *range(40))
        running.saw("billed", times=40)
        done = 'onward_events_done_total{group="billing",topic="orders"} 40.0'
        until(lambda: done in fetch(f"{where}/metrics")[1], "the counts add up")
        assert fetch(f"{where}/readings")[1].count('"worker":') == 2
        assert endpoints(shell) == [where.removeprefix("http://")] * 2, "both name the endpoint of the supervisor"
        assert stopped(running) == 0

    def test_a_worker_that_hangs_is_not_ready_and_the_others_go_on(self, shell: Shell) -> None:
        running, where = self.started(shell)
        until(lambda: fetch(f"{where}/health/ready")[0] == 200, "both are ready")
        hung = pids(running)[1]
        stop_between_writes(hung, shell.folder / "shop.db")
        silent = re.compile(r"worker \d has not reported for \d+ s")
        until(lambda: silent.search(fetch(f"{where}/health/ready")[1]) is not None, "it is noticed")
        assert fetch(f"{where}/health/ready")[0] == 503
        assert fetch(f"{where}/health/live")[0] == 200
        assert fetch(f"{where}/metrics")[0] == 200
        running.saw("not ready: worker 2 has not reported")
        os.kill(hung, signal.SIGCONT)
        until(lambda: fetch(f"{where}/health/ready")[0] == 200, "it reports again")
        running.saw("worker 2 reports again")
        assert running.err.count("not ready: worker 2 has not reported") == 1
        os.kill(hung, signal.SIGSTOP)
        os.kill(hung, signal.SIGKILL)
        running.saw("starting another")
        until(lambda: fetch(f"{where}/health/ready")[0] == 200, "its replacement is ready")
        assert stopped(running) == 0

    def test_a_worker_that_cannot_start_is_not_ready(self, shell: Shell) -> None:
        good = (shell.folder / "shop.py").read_text()
        running, where = self.started(shell, "--reload")
        until(lambda: fetch(f"{where}/health/ready")[0] == 200, "both are ready")
        shell.write("shop.py", "1 / 0")
        running.saw("waiting for a file to change")
        assert "is not running; another one will be started" in fetch(f"{where}/health/ready")[1]
        shell.write("shop.py", good)
        until(lambda: fetch(f"{where}/health/ready")[0] == 200, "both are ready again")
        assert stopped(running) == 0

    def test_reporting_survives_an_error_in_a_collector_and_in_a_report(self, shell: Shell) -> None:
        shell.write("shop.py", (shell.folder / "shop.py").read_text() + HICCUPS)
        running, where = self.started(shell)
        running.saw("collector hiccup raised", times=2)
        running.saw("a report to the supervisor failed", times=2)
        scrapes = 'onward_scrapes{status="later"}'
        until(lambda: scrapes in fetch(f"{where}/metrics")[1], "they report again")
        assert fetch(f"{where}/health/ready")[0] == 200
        assert running.err.count("hiccup raised") == running.err.count("supervisor failed") == 2
        assert stopped(running) == 0

    def test_every_float_of_a_gauge_arrives(self, shell: Shell) -> None:
        odd = "import math\n\nodd = app.registry.gauge('odd', 'Odd.', ['status'], fold='max')\n"
        odd += "for value in (math.nan, math.inf, -math.inf):\n    odd.set((str(value),), value)\n"
        shell.write("shop.py", (shell.folder / "shop.py").read_text() + odd)
        running, where = self.started(shell)
        until(lambda: fetch(f"{where}/health/ready")[0] == 200, "both are ready")
        text = fetch(f"{where}/metrics")[1]
        for status, value in (("nan", "NaN"), ("inf", "+Inf"), ("-inf", "-Inf")):
            assert f'onward_odd{{status="{status}"}} {value}\n' in text
        assert stopped(running) == 0

    def test_an_address_in_use_is_reported_once(self, shell: Shell) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            running = shell.start("run", "shop:app", "--workers", "2", "--metrics", str(port))
            assert running.ended() == policy.USAGE
        assert running.err.count("the port is in use; choose another address for --metrics") == 1
        assert not pids(running)

    def test_counters_do_not_fall_when_workers_are_replaced(self, shell: Shell) -> None:
        publish(shell.folder, *range(20))
        running, where = self.started(shell)
        done = 'onward_events_done_total{group="billing",topic="orders"} 20.0'
        until(lambda: done in fetch(f"{where}/metrics")[1], "all are counted")
        for pid in pids(running):
            os.kill(pid, signal.SIGKILL)
        running.saw("starting another", times=2)
        until(lambda: fetch(f"{where}/health/ready")[0] == 200, "they are replaced")
        assert done in fetch(f"{where}/metrics")[1]
        assert stopped(running) == 0
