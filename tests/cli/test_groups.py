"""`onward groups`, on a SQLite file."""

import json
import signal

import pytest

from tests.cli.shell import Shell, until
from tests.cli.system import groups as group_names
from tests.cli.system import publish

URL = ("--url", "sqlite:///shop.db")


def groups(shell: Shell, *arguments: str, code: int = 0) -> str:
    done = shell.run("groups", *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def test_list_and_show_print_the_progress_and_the_members_of_a_group(shell: Shell) -> None:
    publish(shell.folder, *range(20))
    publish(shell.folder, 1, topic="others")
    assert groups(shell, "list", *URL) == "no groups\n"
    running = shell.start("run", "shop:app")
    for n in range(20):
        running.saw(f"billed {n}")
    until(lambda: "0 of 8 partitions" in groups(shell, "list", *URL), "all events are settled")
    (info,) = json.loads(groups(shell, "list", "--json", *URL))
    assert (info["group"], info["topic"], len(info["members"])) == ("billing", "orders", 1)
    (name,) = [member["name"] for member in info["members"]]
    assert json.loads(groups(shell, "show", "billing", "--json", "--app", "shop:app")) == [info]
    assert {place["owner"] for place in info["partitions"].values()} == {name}
    assert all(place["watermark"] == place["end"] for place in info["partitions"].values())
    assert sum(place["end"] for place in info["partitions"].values()) >= 20
    text = groups(shell, "show", "billing", "--topic", "orders", *URL)
    assert text.startswith(f"group billing of topic orders: {name}")
    rows = [line.split() for line in text.splitlines()[2:]]
    assert rows == [
        [index, str(place["watermark"]), str(place["end"]), name, str(place["fence"])]
        for index, place in sorted(info["partitions"].items())
    ]
    refused = groups(shell, "drop", "billing", "--topic", "orders", "--yes", *URL, code=1)
    assert f"is running: {name}" in refused
    assert "stop it first (a killed member counts as running until its lease ends" in refused
    running.send(signal.SIGTERM)
    assert running.ended() == 0


@pytest.mark.slow
def test_drop_asks_and_deletes_one_group_of_one_topic(shell: Shell) -> None:
    for topic in ("orders", "others"):
        publish(shell.folder, 1, topic=topic)
        shell.run("tail", topic, "--group", "mine", "--limit", "1", "--from", "earliest", *URL)
    name = "onward-tail.kept.mine"
    assert f"group {name} reads the topics orders, others" in groups(shell, "drop", name, "--yes", *URL, code=2)
    assert "add --yes" in groups(shell, "drop", name, "--topic", "orders", *URL, code=2)
    assert group_names(shell.folder) == [name]
    assert groups(shell, "drop", name, "--topic", "orders", "--yes", *URL) == f"dropped group {name} of topic orders\n"
    assert group_names(shell.folder) == []
    assert group_names(shell.folder, "others") == [name]
    assert json.loads(groups(shell, "drop", name, "--yes", "--json", *URL)) == {"group": name, "topic": "others"}


@pytest.mark.slow
def test_a_group_that_does_not_exist_is_reported_with_a_cure(shell: Shell) -> None:
    publish(shell.folder, 1)
    shell.run("tail", "orders", "--group", "mine", "--limit", "1", "--from", "earliest", *URL)
    assert "did you mean 'onward-tail.kept.mine'?" in groups(shell, "show", "onward-tail.kept.min", *URL, code=2)
    assert "no group 'x' has read topic orders" in groups(shell, "drop", "x", "--topic", "orders", *URL, code=2)
    assert "does not exist" in groups(shell, "list", "--url", "sqlite:///none.db", code=2)
    assert not (shell.folder / "none.db").exists()
