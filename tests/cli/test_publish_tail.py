"""`onward publish` and `onward tail`, end to end on a SQLite file."""

import json
import signal
import subprocess

import pytest

from tests.cli.shell import Running, Shell, until
from tests.cli.system import groups, owners, publish


def tailing(shell: Shell, *options: str) -> Running:
    running = shell.start("tail", "orders", "--app", "shop:app", *options)
    running.saw("showing orders")
    return running


def shown(text: str) -> list[object]:
    return [json.loads(line)["value"]["id"] for line in text.splitlines()]


def tail(shell: Shell, *options: str) -> list[object]:
    done = shell.run("tail", "orders", "--json", "--app", "shop:app", *options)
    assert done.returncode == 0, done.stderr
    return shown(done.stdout)


def test_tail_shows_published_events(shell: Shell) -> None:
    publish(shell.folder, "before")
    running = tailing(shell, "--json", "--limit", "3")
    ids = [
        shell.run("publish", "orders", "--key", "c-1", "--header", "a=b=c", '{ "id": 1.10 }', "--app", "shop:app"),
        shell.run("publish", "orders", "-", "--url", "sqlite:///shop.db", stdin='{"id": 2}\n'),
        shell.run("publish", "orders", "--text", "plain \udcff", "--url", "sqlite:///shop.db"),
    ]
    assert running.ended() == 0
    events = {line["id"]: line for line in map(json.loads, running.out.splitlines())}
    first, second, third = (events[done.stdout.strip()] for done in ids)
    assert (first["key"], first["headers"], first["value"]) == ("c-1", {"a": "b=c"}, {"id": 1.10})
    assert second["value"] == {"id": 2}
    assert third["value_base64"] == "cGxhaW4g/w=="
    assert groups(shell.folder) == []


@pytest.mark.slow
def test_publish_prints_which_broker_it_uses(shell: Shell) -> None:
    shell.environment["ONWARD_APP"] = "shop:app"
    done = shell.run("publish", "orders", "{}")
    assert done.stderr == "using sqlite:///shop.db (ONWARD_APP=shop:app)\n"


def test_publish_to_a_file_that_cannot_be_created_is_reported(shell: Shell) -> None:
    done = shell.run("publish", "orders", "{}", "--url", "sqlite:////proc/x.db")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("error: /proc/x.db cannot be opened or created")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_tail_cleanly(shell: Shell, number: signal.Signals) -> None:
    publish(shell.folder, 1)
    running = tailing(shell)
    assert len(groups(shell.folder)) == 1
    running.send(number)
    assert running.ended() == 0
    assert groups(shell.folder) == []
    assert "Traceback" not in running.err


def test_tail_ends_quietly_when_its_reader_closes_the_pipe(shell: Shell) -> None:
    publish(shell.folder, *range(50))
    command = f"{shell.command} tail orders --from earliest --app shop:app 2> err | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert (shell.folder / "err").read_text().splitlines()[1:] == ["showing orders; stop with Ctrl-C"]
    assert groups(shell.folder) == []


@pytest.mark.slow
def test_options_select_the_start_and_the_key(shell: Shell) -> None:
    publish(shell.folder, 1, 2, 3)
    assert sorted(map(str, tail(shell, "--from", "earliest", "--limit", "3"))) == ["1", "2", "3"]
    assert tail(shell, "--from", "2001-01-01", "--key", "c-2", "--limit", "1") == [2]


@pytest.mark.slow
def test_a_named_tail_continues_where_the_last_one_stopped(shell: Shell) -> None:
    publish(shell.folder, 1, 2)
    first = tail(shell, "--group", "mine", "--from", "earliest", "--limit", "1")
    second = tail(shell, "--group", "mine", "--from", "earliest", "--limit", "1")
    assert {*first, *second} == {1, 2}
    assert groups(shell.folder) == ["onward-tail.kept.mine"]


@pytest.mark.slow
def test_two_tails_of_one_name_share_the_events(shell: Shell) -> None:
    publish(shell.folder, "before")
    both = [tailing(shell, "--json", "--group", "ours") for _ in range(2)]
    until(lambda: len(owners(shell.folder, "onward-tail.kept.ours")) == 2, "both own partitions")
    publish(shell.folder, *range(40))
    until(lambda: sum(len(shown(each.out)) for each in both) >= 40, "all were shown")
    for each in both:
        each.send(signal.SIGINT)
        assert each.ended() == 0
    assert sorted(map(str, shown(both[0].out) + shown(both[1].out))) == sorted(map(str, range(40)))
    assert all(each.out for each in both)


@pytest.mark.slow
def test_tail_waits_for_a_missing_topic_and_does_not_create_it(shell: Shell) -> None:
    running = shell.start("tail", "orders", "--json", "--limit", "1", "--app", "shop:app")
    running.saw("shop.db does not exist; waiting for it")
    assert not (shell.folder / "shop.db").exists()
    publish(shell.folder, 1, topic="others")
    running.saw("topic orders does not exist yet")
    publish(shell.folder, 1)
    assert running.ended() == 0
    assert shown(running.out) == [1]


@pytest.mark.slow
def test_ctrl_c_while_waiting(shell: Shell) -> None:
    running = shell.start("tail", "orders", "--app", "shop:app")
    running.saw("does not exist; waiting")
    running.send(signal.SIGINT)
    assert running.ended() == 0
    assert not (shell.folder / "shop.db").exists()


@pytest.mark.slow
def test_the_next_tail_drops_the_group_of_a_killed_one(shell: Shell) -> None:
    publish(shell.folder, 1)
    running = tailing(shell)
    running.send(signal.SIGKILL)
    running.ended()
    assert len(groups(shell.folder)) == 1

    def swept() -> bool:
        tail(shell, "--from", "earliest", "--limit", "1")
        return groups(shell.folder) == []

    until(swept, "the group is dropped when its lease has ended")
