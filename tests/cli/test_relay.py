"""`onward relay`, and the relay inside `onward run`."""

import signal
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing

from onward.outbox.schema import init
from tests.cli.shell import Shell, until
from tests.servers.server import free_port

SHOP = """
from onward import Onward
from onward.outbox import Outbox

app = Onward("sqlite:///events.db", lease_s=1.0, takeover_grace_s=0.1)
outbox = Outbox(app, "sqlite:///shop.db")


@app.handler("orders", group="billing")
async def bill(order: dict) -> None:
    print("billed", order["id"], flush=True)
"""

WRITER = """
import sqlite3
from shop import outbox

with sqlite3.connect("shop.db") as db:
    outbox.add(db, "orders", {"id": %d}, key="c-1")
"""


def place(shell: Shell, number: int) -> None:
    """Place an order in a process of its own."""
    script = shell.write(f"place_{number}.py", WRITER % number)
    subprocess.run([sys.executable, script], cwd=shell.folder, env=shell.environment, check=True, timeout=60)


def prepared(shell: Shell) -> Shell:
    shell.write("shop.py", SHOP)
    init(f"sqlite:///{shell.folder}/shop.db")
    return shell


def test_run_publishes_the_outbox_and_handles_its_events(shell: Shell) -> None:
    place(prepared(shell), 1)
    running = shell.start("run", "shop:app")
    running.saw("billed 1")
    place(shell, 2)
    running.saw("billed 2")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_relay_publishes_without_running_handlers_and_ends_with_a_signal(shell: Shell) -> None:
    place(prepared(shell), 1)
    port = free_port()
    relay = shell.start("relay", "shop:app", "--metrics", str(port))
    with closing(sqlite3.connect(shell.folder / "shop.db")) as db:
        until(lambda: db.execute("SELECT count(*) FROM onward_outbox").fetchone() == (0,), "the row is published")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert 'onward_outbox_published_total{topic="orders"} 1' in answer.read().decode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=10) as answer:
        assert answer.status == 200
    relay.send(signal.SIGTERM)
    assert relay.ended() == 0
    assert "billed" not in relay.out
    assert "outbox onward_outbox: stopped, 1 event published" in relay.err


def test_run_leaves_the_outbox_to_others_if_outbox_relay_is_off(shell: Shell) -> None:
    place(prepared(shell), 1)
    shell.environment["ONWARD_OUTBOX_RELAY"] = "false"
    running = shell.start("run", "shop:app")
    running.saw("bill handles topic orders")
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    assert "billed" not in running.out


def test_an_application_without_an_outbox_has_nothing_to_relay(shell: Shell) -> None:
    done = shell.run("relay", "shop:app")
    assert done.returncode == 2
    assert "nothing to relay" in done.stderr


def test_missing_tables_name_the_command_that_creates_them(shell: Shell) -> None:
    shell.write("shop.py", SHOP)
    with closing(sqlite3.connect(shell.folder / "shop.db")) as db:
        db.execute("CREATE TABLE mine (id)")
    done = shell.run("relay", "shop:app")
    assert done.returncode == 3
    assert "onward outbox init" in done.stderr


def test_an_outbox_in_the_brokers_own_file_needs_no_relay(shell: Shell) -> None:
    shell.write("shop.py", SHOP.replace("events.db", "shop.db"))
    place(shell, 1)
    running = shell.start("run", "shop:app")
    running.saw("billed 1")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_relay_says_that_there_is_nothing_to_relay_in_the_brokers_own_file(shell: Shell) -> None:
    shell.write("shop.py", SHOP.replace("events.db", "shop.db"))
    place(shell, 1)
    relay = shell.start("relay", "shop:app")
    relay.saw("nothing to relay: the outbox is in the broker's own file")
    relay.send(signal.SIGTERM)
    assert relay.ended() == 0
    status = shell.run("outbox", "status", "--app", "shop:app")
    assert "needs no tables and no relay" in status.stderr
