"""The first steps of the README and of docs/start.md do what the pages say."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import Running, Shell, until
from tests.examples import shown, source


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    try:
        yield shell
    finally:
        shell.close()


def test_the_first_handler_gets_the_published_event(shell: Shell) -> None:
    assert shown("docs/start.md") == source("start.py")
    shell.write("shop.py", source("start.py"))
    running = shell.start("run", "shop:app")
    published = shell.run("publish", "orders", "--app", "shop:app", "--key", "anna", '{"total": 9.5}')
    assert published.returncode == 0, published.stderr
    running.saw("anna pays 9.5")
    running.send(signal.SIGINT)
    assert running.ended() == 0


def test_the_program_of_the_readme_can_be_imported_without_running(shell: Shell) -> None:
    assert shown("README.md") == source("first.py")
    shell.write("first.py", source("first.py"))
    order = '{"id": 1, "customer": "anna"}'
    assert shell.run("publish", "orders", "--app", "first:app", "--key", "anna", order).returncode == 0
    running = shell.start("run", "first:app")
    running.saw("anna pays for order 1")
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    assert running.out == "anna pays for order 1\n"


@pytest.mark.slow
def test_two_processes_share_the_stream_and_one_takes_over_after_a_kill(shell: Shell) -> None:
    shell.write("first.py", source("first.py").replace("sleep(0.2)", "sleep(0.02)"))
    with (shell.folder / "first.out").open("wb") as out:
        first = subprocess.Popen([sys.executable, "first.py"], cwd=shell.folder, env=shell.environment, stdout=out)
    try:
        until(lambda: _orders(shell.folder), "the first process handles orders")
        second = shell.start("run", "first:app")
        until(lambda: len(_customers(second)) > 1, "the second process handles some customers")
        second.process.kill()
        lost = _customers(second)
        handled = max(order for orders in lost.values() for order in orders)
        until(lambda: lost.keys() <= _orders(shell.folder, after=handled).keys(), "the first process has all customers")
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 0
    finally:
        first.kill()
        first.wait()
    for customer, orders in _orders(shell.folder).items():
        assert orders == sorted(orders), customer
        assert sorted({*orders, *lost.get(customer, [])}) == list(range(orders[0] % 10 or 10, orders[-1] + 1, 10))


def _customers(running: Running) -> dict[str, list[int]]:
    return _parsed(running.out, 0)


def _orders(folder: Path, after: int = 0) -> dict[str, list[int]]:
    return _parsed((folder / "first.out").read_text(), after)


def _parsed(text: str, after: int) -> dict[str, list[int]]:
    """Each customer's orders with a higher number, as they were handled."""
    found: dict[str, list[int]] = {}
    for customer, order in re.findall(r"^(customer-\d) pays for order (\d+)\n", text, re.MULTILINE):
        if int(order) > after:
            found.setdefault(customer, []).append(int(order))
    return found
