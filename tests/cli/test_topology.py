"""`onward topology` and app.topology(...), on a SQLite file."""

import asyncio
import json
from pathlib import Path

import pytest

from onward import Onward
from onward.brokers.base import TopicSpec
from onward.errors import BadSetting, PartitionsDiffer
from tests.cli.shell import Shell
from tests.cli.system import publish, url

SHOP = """
from onward import Onward
from onward.brokers.base import TopicSpec

app = Onward("sqlite:///shop.db", {settings})
app.topology(TopicSpec("orders", 3), TopicSpec("archive", 1))


@app.handler("orders", group="billing")
async def bill(order: dict) -> None: ...


@app.handler("payments", group="billing")
async def pay(order: dict) -> None: ...
"""


async def opened(app: Onward) -> dict[str, int]:
    """The topics that exist while the application is open, with their partition counts."""
    async with app:
        return {spec.name: spec.partitions for spec in await app.broker.topics()}


def counts(shell: Shell) -> dict[str, int]:
    return asyncio.run(opened(Onward(url(shell.folder))))


def topology(shell: Shell, *arguments: str, code: int = 0) -> str:
    done = shell.run("topology", *arguments, "--app", "shop:app")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_plan_creates_nothing_and_apply_creates_everything(shell: Shell) -> None:
    shell.write("shop.py", SHOP.format(settings="auto_declare=False"))
    lines = {
        "+ create topic orders with 3 partitions",
        "+ create topic payments with 8 partitions",
        "+ create topic archive with 1 partitions",
    }
    assert set(topology(shell, "plan").splitlines()) == lines
    assert not (shell.folder / "shop.db").exists()
    assert set(topology(shell, "apply").splitlines()) == lines
    assert counts(shell) == {"orders": 3, "payments": 8, "archive": 1}
    same = "the broker has everything that the application declares\n"
    assert topology(shell, "plan") == topology(shell, "apply") == same
    assert json.loads(topology(shell, "plan", "--json")) == []
    done = shell.run("publish", "payments", "{}", "--app", "shop:app")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_topic_that_differs_is_refused_and_the_others_are_created(shell: Shell) -> None:
    shell.write("shop.py", SHOP.format(settings="partitions=5"))
    publish(shell.folder, 1)
    planned = json.loads(topology(shell, "plan", "--json", code=1))
    assert {(change["what"], change["action"]) for change in planned} == {
        ("topic orders", "refuse"),
        ("topic payments", "create"),
        ("topic archive", "create"),
    }
    assert counts(shell) == {"orders": 8}
    assert "! topic orders has 8 partitions" in topology(shell, "apply", code=1)
    assert counts(shell) == {"orders": 8, "payments": 5, "archive": 1}


@pytest.mark.slow
def test_an_application_that_cannot_be_compared_is_reported_with_a_cure(shell: Shell) -> None:
    done = shell.run("topology", "plan")
    assert done.returncode == 2
    assert "no application given: write --app shop:app" in done.stderr
    shell.write("empty.py", "from onward import Onward\napp = Onward('sqlite:///shop.db')\n")
    done = shell.run("topology", "plan", "--app", "empty:app")
    assert done.returncode == 2
    assert "has no handler and declares no topology" in done.stderr
    shell.write("odd.py", "from onward import Onward\napp = Onward('sqlite:///shop.db')\napp.topology('exchange')\n")
    for verb in ("plan", "apply"):
        done = shell.run("topology", verb, "--app", "odd:app")
        assert done.returncode == 2
        assert "'exchange': this broker has topics only" in done.stderr


class TestOpening:
    def test_creates_the_declared_topics(self, tmp_path: Path) -> None:
        app = Onward(url(tmp_path))
        app.topology(TopicSpec("orders", 3))
        app.topology(TopicSpec("archive", 1))
        assert asyncio.run(opened(app)) == {"orders": 3, "archive": 1}

    def test_creates_them_for_publish_sync_too(self, tmp_path: Path) -> None:
        app = Onward(url(tmp_path))
        app.topology(TopicSpec("orders", 3))
        app.publish_sync("orders", {"id": 1})
        assert asyncio.run(opened(Onward(url(tmp_path)))) == {"orders": 3}

    def test_creates_nothing_if_auto_declare_is_off(self, tmp_path: Path) -> None:
        app = Onward(url(tmp_path), auto_declare=False)
        app.topology(TopicSpec("orders", 3))
        assert asyncio.run(opened(app)) == {}

    def test_is_refused_if_a_topic_differs_or_the_broker_does_not_know_an_object(self, tmp_path: Path) -> None:
        publish(tmp_path, 1)
        app = Onward(url(tmp_path))
        app.topology(TopicSpec("orders", 3))
        with pytest.raises(PartitionsDiffer, match="topic orders has 8 partitions, this process expects 3"):
            asyncio.run(opened(app))
        odd = Onward(url(tmp_path))
        odd.topology(object())
        with pytest.raises(BadSetting, match="this broker has topics only"):
            asyncio.run(opened(odd))


@pytest.mark.slow
def test_commands_that_only_read_do_not_create_declared_topics(shell: Shell) -> None:
    shell.write("shop.py", SHOP.format(settings=""))
    publish(shell.folder, 1, topic="others")
    for command in ("dead list", "groups list", "doctor"):
        assert shell.run(*command.split(), "--app", "shop:app").returncode == 0
    running = shell.start("tail", "orders", "--app", "shop:app")
    running.saw("topic orders does not exist yet")
    assert counts(shell) == {"others": 8}
