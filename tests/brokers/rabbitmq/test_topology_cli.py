"""`onward topology` and `onward doctor` with exchanges and queues, each in a process of its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import Shell
from tests.servers.rabbitmq import RabbitMQServer

SHOP = """
from onward import Event, Onward
from onward.brokers.base import TopicSpec
from onward.brokers.rabbitmq import Binding, Exchange, Queue

app = Onward("{url}", {settings})
app.topology(
    TopicSpec("orders", 2),
    Exchange("abs.comparison", "direct"),
    Exchange("abs.comparison.dlx", "direct"),
    Queue(
        "abs.comparison.process",
        max_length={max_length},
        dead_letter_exchange="abs.comparison.dlx",
        dead_letter_key="comparison.failed",
    ),
    Queue("abs.comparison.dlq"),
    Binding("abs.comparison", "abs.comparison.process", "comparison.process"),
    {sink}
)


@app.handler("abs.comparison", group="abs.comparison.process", ordering="none")
async def compare(task: dict, event: Event) -> None:
    print("compared", task["id"], flush=True)
"""
SINK = 'Binding("abs.comparison.dlx", "abs.comparison.dlq", "comparison.failed"),'
CREATED = {
    "+ create exchange abs.comparison (direct)",
    "+ create exchange abs.comparison.dlx (direct)",
    "+ create queue abs.comparison.dlq (quorum, x-delivery-limit=1000000000)",
    "+ create binding of queue abs.comparison.process to exchange abs.comparison with key comparison.process",
    "+ create binding of queue abs.comparison.dlq to exchange abs.comparison.dlx with key comparison.failed",
    "+ create topic orders with 2 partitions",
    "+ create group abs.comparison.process of topic abs.comparison",
}


class Workshop:
    """A folder with an application that uses a virtual host of its own."""

    def __init__(self, shell: Shell, server: RabbitMQServer, vhost: str) -> None:
        self.shell = shell
        self.server = server
        self.vhost = vhost

    def write(self, *, max_length: int = 100_000, sink: str = SINK, settings: str = "") -> None:
        url = self.server.url_of(self.vhost)
        self.shell.write("shop.py", SHOP.format(url=url, max_length=max_length, sink=sink, settings=settings))

    @property
    def managed(self) -> str:
        """The setting with which the management API is used."""
        return f"client={{'management_url': '{self.server.management_url}'}}"

    def run(self, command: str, code: int = 0) -> str:
        done = self.shell.run(*command.split(), "--app", "shop:app")
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout


@pytest.fixture
def workshop(rabbitmq_server: RabbitMQServer, tmp_path: Path) -> Iterator[Workshop]:
    shell = Shell(tmp_path)
    with rabbitmq_server.vhost() as vhost:
        yield Workshop(shell, rabbitmq_server, vhost)
        shell.close()


@pytest.mark.parametrize("auto_declare", [True, False])
def test_plan_creates_nothing_and_apply_creates_everything(workshop: Workshop, auto_declare: bool) -> None:
    workshop.write(settings=f"auto_declare={auto_declare}")
    planned = workshop.run("topology plan")
    assert set(planned.splitlines()) > CREATED
    assert "create topic abs.comparison" not in planned, "the handler's topic is an exchange"
    assert "abs.comparison.process" not in workshop.server.queues(workshop.vhost)
    assert workshop.run("topology apply") == planned
    assert "abs.comparison.process" in workshop.server.queues(workshop.vhost)
    same = "the broker has everything that the application declares\n"
    assert workshop.run("topology apply") == same
    compared = workshop.run("topology plan")
    assert compared.startswith("the broker has everything that was compared: bindings were not compared")
    workshop.write(settings=f"auto_declare={auto_declare}, {workshop.managed}")
    assert workshop.run("topology plan") == same
    assert json.loads(workshop.run("topology plan --json")) == []


GROUPS = """
from onward import Onward

app = Onward("{url}", auto_declare=False)


@app.handler("orders", group="mail", ordering="none")
async def mail(order: dict) -> None:
    print("mailed", order["id"], flush=True)


@app.handler("orders", group="billing")
async def bill(order: dict) -> None:
    print("billed", order["id"], flush=True)
"""


def test_without_auto_declare_apply_creates_the_groups(workshop: Workshop) -> None:
    """They get what is published before their first members run. Without them, members do not start."""
    workshop.shell.write("shop.py", GROUPS.format(url=workshop.server.url_of(workshop.vhost)))
    refused = workshop.shell.run("run", "shop:app")
    assert refused.returncode == 3, refused.stderr
    assert "does not exist and auto_declare is off" in refused.stderr
    workshop.run("topology apply")
    for group in ("billing", "mail"):
        workshop.run(f"groups drop {group} --yes")
        refused = workshop.shell.run("run", "shop:app")
        assert refused.returncode == 3, refused.stderr
        assert f"group {group} of topic orders does not exist, and auto_declare is off" in refused.stderr
        assert "onward topology apply" in refused.stderr
        assert workshop.run("topology apply") == f"+ create group {group} of topic orders\n"
    assert "0 of 8 partitions" in next(line for line in workshop.run("groups list").splitlines() if "billing" in line)
    workshop.run('publish orders {"id":7}')
    running = workshop.shell.start("run", "shop:app")
    running.saw("billed 7")
    running.saw("mailed 7")


def test_a_handler_whose_ordering_changed_is_refused(workshop: Workshop) -> None:
    url = workshop.server.url_of(workshop.vhost)
    workshop.shell.write("shop.py", GROUPS.format(url=url))
    workshop.run("topology apply")
    workshop.shell.write("shop.py", GROUPS.format(url=url).replace(', ordering="none"', ""))
    printed = workshop.run("topology plan", code=1)
    assert "! group mail of topic orders reads without order, and this member does not" in printed


def test_drift_is_refused_and_names_the_argument(workshop: Workshop) -> None:
    workshop.write()
    workshop.run("topology apply")
    workshop.write(max_length=7, settings="auto_declare=False")
    for verb in ("plan", "apply"):
        printed = workshop.run(f"topology {verb}", code=1)
        assert "! queue abs.comparison.process: x-max-length is 100000 there and 7 here" in printed
    assert workshop.server.queues(workshop.vhost)["abs.comparison.process"]["arguments"]["x-max-length"] == 100_000
    found = json.loads(workshop.run("topology plan --json", code=1))
    assert [(each["what"], each["action"]) for each in found] == [("queue abs.comparison.process", "refuse")]


def test_a_missing_dead_letter_route_is_refused_by_plan_and_an_error_of_doctor(workshop: Workshop) -> None:
    workshop.write(sink="")
    why = "its dead-letter exchange abs.comparison.dlx routes dead letters with the key comparison.failed to no queue"
    assert f"! queue abs.comparison.process: {why}" in workshop.run("topology apply", code=1)
    assert "abs.comparison.process" not in workshop.server.queues(workshop.vhost)
    assert f"error    queue abs.comparison.process: {why}" in workshop.run("doctor", code=1)


def test_an_application_with_a_refused_topology_does_not_start(workshop: Workshop) -> None:
    workshop.write()
    workshop.run("topology apply")
    workshop.write(max_length=7)
    done = workshop.shell.run("run", "shop:app")
    assert done.returncode == 2
    assert "x-max-length is 100000 there and 7 here" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_knows_what_the_application_declares(workshop: Workshop) -> None:
    workshop.write(settings="auto_declare=False")
    printed = workshop.run("doctor", code=1)
    assert "error    queue abs.comparison.process does not exist" in printed
    assert "onward topology apply --app MODULE:APP" in printed
    assert "warning  policies, alarms of other nodes, replicas and dead-letter routes were not checked" in printed
    workshop.write(settings=workshop.managed)
    assert "ok       queue abs.comparison.process does not exist yet" in workshop.run("doctor")
    workshop.run("topology apply")
    printed = workshop.run("doctor")
    assert "error" not in printed
    assert "warning" not in printed


def test_doctor_finds_a_policy_on_a_declared_queue_and_a_lost_route(workshop: Workshop) -> None:
    workshop.write(settings=workshop.managed)
    workshop.run("topology apply")
    lower = {"pattern": "^abs", "definition": {"delivery-limit": 3}, "apply-to": "queues"}
    workshop.server.ask("PUT", f"/api/policies/{workshop.vhost}/lower", lower)
    workshop.server.delete_queue(workshop.vhost, "abs.comparison.dlq")
    printed = workshop.run("doctor", code=1)
    assert "error    policy lower sets delivery-limit=3" in printed
    assert "ok       queue abs.comparison.dlq does not exist yet; the application creates it" in printed
    assert "error    dead letters of queue abs.comparison.process with key comparison.failed are lost" in printed


def test_doctor_warns_of_a_missing_binding_between_objects_that_exist(workshop: Workshop) -> None:
    workshop.write(settings=workshop.managed)
    workshop.run("topology apply")
    place = "e/abs.comparison/q/abs.comparison.process/comparison.process"
    workshop.server.ask("DELETE", f"/api/bindings/{workshop.vhost}/{place}")
    binding = "binding of queue abs.comparison.process to exchange abs.comparison with key comparison.process"
    assert f"warning  {binding} does not exist, so its queue gets no events" in workshop.run("doctor")


def test_a_lost_work_queue_is_planned(workshop: Workshop) -> None:
    workshop.shell.write("shop.py", GROUPS.format(url=workshop.server.url_of(workshop.vhost)))
    workshop.run("topology apply")
    workshop.server.delete_queue(workshop.vhost, "onward.orders:mail:work")
    lost = "+ create queue onward.orders:mail:work again (the events of group mail of topic orders)"
    assert lost in workshop.run("topology plan")
    assert lost in workshop.run("topology apply")
    assert "everything" in workshop.run("topology plan")


def test_a_published_event_of_an_exchange_reaches_its_handler(workshop: Workshop) -> None:
    workshop.write()
    workshop.run("topology apply")
    running = workshop.shell.start("run", "shop:app")
    done = workshop.shell.run(
        *("publish", "abs.comparison", '{"id": 7}', "--type", "comparison.process", "--app", "shop:app")
    )
    assert done.returncode == 0, done.stderr
    running.saw("compared 7")
