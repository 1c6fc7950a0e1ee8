"""`onward demo` as a new user runs it: real processes, a real SIGKILL."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from onward import Onward, brokers
from onward.demo.check import Check, CheckScreen
from onward.demo.shop import Work
from tests.demo.running import ONWARD, Running


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ONWARD, "demo", *arguments], capture_output=True, text=True, timeout=100, env=os.environ | environment
    )


@pytest.mark.slow
def test_the_check_succeeds_and_removes_its_data(tmp_path: Path) -> None:
    done = run("--check", "--events", "2000", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"verdict: OK published=2000 handled=2000 dead=0 lost=0 inverted=0 duplicates=\d+"
    assert re.fullmatch(pattern, done.stdout.splitlines()[-1])
    assert re.search(r"killed worker \d \(pid \d+\) with SIGKILL after [\d,]+ orders", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_check_removes_what_it_created_on_a_shared_broker(tmp_path: Path) -> None:
    url = brokers.embedded(tmp_path / "ours.db")
    done = run("--check", "--events", "300", "--workers", "2", "--url", url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers, SQLite with fsync" in done.stderr
    assert "may still be there" not in done.stderr

    async def topics() -> list[str]:
        async with Onward(url) as app:
            return [spec.name for spec in await app.broker.topics()]

    assert asyncio.run(topics()) == []


@pytest.mark.slow
def test_the_verdict_as_json_with_the_data_kept(tmp_path: Path) -> None:
    done = run("--check", "--events", "300", "--workers", "2", "--json", "--keep", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["verdict"] == "OK"
    assert {verdict[name] for name in ("published", "handled")} == {300}
    (folder,) = tmp_path.iterdir()
    assert str(folder) in done.stderr
    assert {"effects.db", "events.db"} <= {file.name for file in folder.iterdir()}
    assert not (folder / "orders.db").exists(), "the orders are in the file of the broker"


@pytest.mark.slow
def test_the_check_fails_without_key_order(tmp_path: Path) -> None:
    """Without key order the same run must fail. Otherwise a good verdict would prove nothing."""
    work = Work(ordering="none", longest_s=0.02)
    verdict = asyncio.run(Check(tmp_path, events=3000, workers=2, reader=CheckScreen(), work=work).run())
    assert verdict.balance.inverted > 0
    assert verdict.line().startswith("verdict: FAILED")


def test_the_demo_on_its_own_file_needs_no_extra(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
for name in ("sqlalchemy", "psycopg", "pymysql", "asyncpg", "redis", "confluent_kafka"):
    sys.modules[name] = None  # as if it were not installed
from pathlib import Path
from onward.demo import check, live, worker
folder = Path("{tmp_path}")
verdict = asyncio.run(check.Check(folder, events=50, workers=1, reader=check.CheckScreen()).run())
print(verdict.line())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("verdict: OK published=50 handled=50"), done.stdout + done.stderr


def gone(pid: int, within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_the_buttons_of_the_page_do_what_they_say(demo: Running) -> None:
    demo.until(lambda now: now["balance"]["handled"] > 20)
    assert demo.post("/burst") == 202
    victim = demo.workers()[1]
    assert demo.post("/kill?worker=2") == 202
    assert gone(victim)
    assert demo.post("/poison") == 202
    (letter,) = demo.until(lambda now: now["dead"] and now["balance"]["dead"] == 1)["dead"]
    assert "the card was declined" in letter["error"]
    assert letter["attempts"] == 3
    failure = demo.letter(letter["number"])["failure"]
    first, last = (datetime.fromisoformat(failure[name]) for name in ("first", "last"))
    assert (last - first).total_seconds() >= 5  # long enough to watch
    for wrong in ("", "?order=0", "?order=-1", "?order=x", f"?order={'9' * 5_000}"):
        assert demo.status("GET", f"/letter{wrong}") == 404
    assert demo.post("/replay?order=0") == 409
    assert demo.post(f"/replay?order={letter['number']}") == 202
    demo.until(lambda now: not now["dead"] and now["balance"]["dead"] == 0)
    settled = demo.until(lambda now: now["balance"]["handled"] > 500 and now["balance"]["in_flight"] < 20)
    balance = settled["balance"]
    assert balance["lost"] == balance["inverted"] == 0
    assert balance["published"] == balance["handled"] + balance["dead"] + balance["in_flight"]
    replaced = demo.until(lambda now: all(worker["alive"] for worker in now["workers"]))
    assert replaced["workers"][1]["pid"] != victim


@pytest.mark.slow
def test_a_poison_order_keeps_its_attempts_when_its_worker_is_killed(demo: Running) -> None:
    demo.until(lambda now: now["balance"]["handled"] > 20)
    assert demo.post("/poison") == 202
    seen = demo.until(lambda now: now["waiting"] and now["waiting"][0]["failed"] > 0)
    (customer,) = seen["waiting"]
    assert demo.post(f"/kill?worker={seen['partitions'][customer['partition']]['worker']}") == 202
    (letter,) = demo.until(lambda now: bool(now["dead"]))["dead"]
    assert (letter["number"], letter["attempts"]) == (customer["number"], 3)
    rest = demo.until(lambda now: now["waiting"] and now["waiting"][0]["state"] == "over")
    assert rest["waiting"][0]["ran"] >= 3
    assert rest["balance"]["lost"] == rest["balance"]["inverted"] == 0


def test_ctrl_c_ends_everything_without_a_traceback(demo: Running, tmp_path: Path) -> None:
    workers = demo.workers()
    out, err = demo.end(signal.SIGINT)
    assert demo.process.returncode == 0
    assert "lost=0 inverted=0" in out
    assert "Traceback" not in out + err
    assert all(gone(pid) for pid in workers)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_demo_leaves_no_worker_behind(demo: Running) -> None:
    workers = demo.workers()
    demo.end(signal.SIGKILL)
    assert all(gone(pid) for pid in workers)


def test_a_taken_port_is_reported_and_the_next_free_one_is_used(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        demo = Running(tmp_path, port)
        demo.end(signal.SIGTERM)
    assert demo.port > port
    assert f"port {port} is taken, using {demo.port}" in "".join(demo.printed)
