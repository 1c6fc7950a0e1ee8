"""The page about RabbitMQ is true: its examples are those in examples/, and its commands work on a real server."""

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from onward.brokers.rabbitmq.address import RabbitClient
from tests.cli.shell import Shell
from tests.examples import ROOT, source
from tests.servers.rabbitmq import RabbitMQServer

PAGE = (ROOT / "docs/rabbitmq.md").read_text(encoding="utf-8")
URL = "amqp://guest:guest@localhost:5672"
PRINTS = {  # what each line of the page's shell blocks prints
    "publish": r"^[0-9a-f-]{36}$",
    "tail": r'"total":\s*-1',
    "dead list": r"GiveUp",
    "dead replay": r"1 ",
    "demo": r"verdict: OK published=2000 handled=2000 dead=0 lost=0 inverted=0",
    "topology plan": r"^\+ create queue shop.mail.critical \(quorum",
    "topology apply": r"\d+ created, 0 refused",
    "doctor": r"RabbitMQ 3",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_are_those_in_examples() -> None:
    assert blocks("python") == [source("on_rabbitmq.py"), source("rabbitmq_topology.py")]


def test_the_table_of_client_settings_is_complete() -> None:
    (table,) = re.findall(r"\| client setting \|.*?\n\|.*?\n(.*?)\n\n", PAGE, re.DOTALL)
    listed = {name: default for row in table.splitlines() for name, default in _settings(row)}
    assert sorted(listed) == sorted(RabbitClient.__struct_fields__)
    usual = RabbitClient()
    shown = {name: str(getattr(usual, name)) for name, default in listed.items() if default}
    assert {
        name: f"{float(default):g}" if default.isdigit() else default for name, default in listed.items() if default
    } == {name: f"{float(value):g}" if value[0].isdigit() else value.lower() for name, value in shown.items()}


def _settings(row: str) -> list[tuple[str, str]]:
    names, default = [cell.strip() for cell in row.split("|")[1:3]]
    return [(name, default) for name in re.findall(r"`client\.(\w+)`", names)]


@pytest.fixture
def url(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    """A virtual host of its own: the page uses fixed names."""
    with rabbitmq_server.vhost() as vhost:
        yield rabbitmq_server.url_of(vhost)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def ran(shell: Shell, words: list[str]) -> None:
    done = shell.run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    pattern = next(each for name, each in PRINTS.items() if " ".join(words).startswith(name))
    assert re.search(pattern, done.stdout + done.stderr, re.MULTILINE), done.stdout + done.stderr


@pytest.mark.slow
def test_the_commands_of_the_page_print_what_is_expected(url: str, shell: Shell) -> None:
    shell.write("on_rabbitmq.py", source("on_rabbitmq.py").replace(URL, url))
    first, *rest = [shlex.split(line.replace(URL, url))[1:] for line in blocks("sh")[0].splitlines()]
    running = shell.start(*first)
    running.saw("gets the events that are published from now on")  # the work queue exists
    for words in rest:
        if words[0] == "dead":
            running.saw("c-1 pays 9.5 for order 1")
            running.saw("c-1 gets a mail about order 2")
        ran(shell, words)
    running.send(signal.SIGTERM)
    assert running.ended() == 0


@pytest.mark.slow
def test_the_example_of_a_topology_is_planned_applied_and_handled(url: str, shell: Shell) -> None:
    shell.write("rabbitmq_topology.py", source("rabbitmq_topology.py").replace(URL, url))
    for line in blocks("sh")[1].splitlines():
        ran(shell, shlex.split(line)[1:])
    running = shell.start("run", "rabbitmq_topology:app")
    running.saw("by mail (notification.mail.critical): the shop is down")
    ran(
        shell,
        [
            "publish",
            "shop.notifications",
            "--app",
            "rabbitmq_topology:app",
            "--type",
            "notification.slack.info",
            "--text",
            "hi",
        ],
    )
    running.saw("to Slack (notification.slack.info): hi")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


@pytest.mark.slow
def test_the_permissions_of_the_page_are_enough(rabbitmq_server: RabbitMQServer, url: str, shell: Shell) -> None:
    vhost = urlsplit(url).path[1:]
    (line,) = re.findall(r"^rabbitmqctl set_permissions (.*)$", PAGE, re.MULTILINE)
    *_, configure, write, read = shlex.split(line)
    rabbitmq_server.ask("PUT", "/api/users/shop", {"password": "secret", "tags": ""})
    rabbitmq_server.ask("PUT", f"/api/permissions/{vhost}/shop", {"configure": configure, "write": write, "read": read})
    mine = url.replace("guest:guest", "shop:secret")
    shell.write("on_rabbitmq.py", source("on_rabbitmq.py").replace(URL, mine))
    running = shell.start("run", "on_rabbitmq:app")
    done = shell.run("publish", "shop-orders", '{"id": 1, "total": 9.5}', "--key", "c-1", "--app", "on_rabbitmq:app")
    assert done.returncode == 0, done.stderr
    running.saw("c-1 pays 9.5 for order 1")
    running.send(signal.SIGTERM)
    assert running.ended() == 0
