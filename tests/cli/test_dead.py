"""`onward dead`, end to end on a SQLite file."""

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from onward import Event, GiveUp, Onward
from tests.cli.shell import Shell, until
from tests.cli.system import publish, set_times, url

pytestmark = pytest.mark.slow  # real processes, seconds each


def bury(folder: Path, count: int, topic: str = "orders", times: dict[str, float] | None = None) -> list[str]:
    """Make dead letters of orders in group billing. Returns the ids of their events. `times`: by key, as other programs
    could have set them."""
    app = Onward(url(folder), lease_s=1.0, takeover_grace_s=0.1)
    seen: list[str] = []

    @app.handler(topic, group="billing")
    async def bill(order: dict[str, Any], event: Event) -> None:
        seen.append(event.id)
        if order["id"] % 2:
            raise GiveUp(f"no stock for {order['id']}")
        raise GiveUp("\x1b[2J no such customer")

    async def main() -> list[str]:
        async with app:
            events = await app.publish_many(topic, [(f"c-{n}", {"id": n}) for n in range(count)])
            set_times(folder, times or {})
            running = asyncio.create_task(app.run())
            deadline = time.monotonic() + 30
            while await app.dead.count() < count:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            app.stop()
            await running
            return [event.id for event in events]

    return asyncio.run(main())


def dead(shell: Shell, *arguments: str, code: int = 0) -> str:
    done = shell.run("dead", *arguments, "--app", "shop:app")
    assert done.returncode == code, done.stderr
    assert "Traceback (most" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def test_list_shows_a_table_and_one_array(shell: Shell) -> None:
    ids = bury(shell.folder, 4)
    table = dead(shell, "list")
    assert all(name in table for name in ids)
    assert "no stock for 1" in table
    assert "\x1b" not in table, "a control character reached the terminal"
    letters = json.loads(dead(shell, "list", "--json"))
    assert {letter["event"]["id"] for letter in letters} == set(ids)
    (letter,) = json.loads(dead(shell, "list", "--json", "--key", "c-1"))
    assert (letter["group"], letter["topic"], letter["event"]["value"]) == ("billing", "orders", {"id": 1})
    assert (letter["failure"]["reason"], letter["failure"]["error"]) == ("refused", "GiveUp")
    assert "Traceback" in letter["failure"]["traceback"]
    assert json.loads(dead(shell, "list", "--json", "--error", "OSError")) == []
    assert json.loads(dead(shell, "list", "--json", "--until", "1h")) == []
    assert len(json.loads(dead(shell, "list", "--json", "--since", "1h", "--text", "no stock"))) == 2
    assert dead(shell, "list", "--key", "c-9") == "no dead letters\n"
    assert "no group has ever read topic payments" in dead(shell, "list", "--topic", "payments", code=2)


def test_a_misspelled_group_is_an_error(shell: Shell) -> None:
    bury(shell.folder, 1)
    for command in ("list", "replay", "drop"):
        assert "no topic has a group biling" in dead(shell, command, "--group", "biling", code=2)
    assert dead(shell, "replay", "--group", "billing", "--dry-run").startswith("1 would be replayed")


@pytest.mark.slow
def test_every_command_works_with_times_outside_the_calendar(shell: Shell) -> None:
    edges = [253402300800.0, 1e300, -62135596801.0, float("nan"), float("inf"), -float("inf")]
    ids = bury(shell.folder, 8, times={f"c-{n}": time for n, time in enumerate(edges)})
    for text in (dead(shell, "list"), dead(shell, "list", "--json"), dead(shell, "export")):
        assert all(name in text for name in ids)
    exported = [json.loads(line)["event"] for line in dead(shell, "export").splitlines()]
    times = {event["key"]: event["time"] for event in exported}
    assert [times[f"c-{n}"] for n in range(6)] == [None] * 6
    assert times["c-6"].endswith("Z")
    assert "--:--:--" in dead(shell, "show", ids[3])
    for options in ((), ("--json",)):
        shown = shell.run("tail", "orders", "--from", "earliest", "--limit", "8", "--app", "shop:app", *options)
        assert (shown.returncode, len(shown.stdout.splitlines())) == (0, 8), shown.stderr
    assert "8" in dead(shell, "send", "--topic", "sick", "--from", "orders")
    assert shell.run("tail", "sick", "--from", "earliest", "--limit", "8", "--app", "shop:app").returncode == 0


def test_pages_follow_the_cursor(shell: Shell) -> None:
    ids = bury(shell.folder, 5)
    found: list[str] = []
    after: tuple[str, ...] = ()
    for _ in range(5):
        done = shell.run("dead", "list", "--json", "--limit", "2", "--app", "shop:app", *after)
        page = json.loads(done.stdout)
        assert len(page) <= 2
        found += [letter["event"]["id"] for letter in page]
        if "--after" not in done.stderr:
            break
        after = ("--after", done.stderr.split("--after ")[1].strip())
    assert sorted(found) == sorted(ids)


def test_show_prints_the_whole_letter(shell: Shell) -> None:
    ids = bury(shell.folder, 2)
    text = dead(shell, "show", ids[1])
    assert "GiveUp: no stock for 1" in text
    assert "raise GiveUp" in text
    assert "refused after 1 attempt\n" in text
    letter = json.loads(dead(shell, "show", ids[1], "--json"))
    assert dead(shell, "show", letter["id"]) == text
    assert "no dead letter 'missing'" in dead(shell, "show", "missing", code=1)


def test_the_help_of_replay_states_the_order(shell: Shell) -> None:
    text = " ".join(shell.run("dead", "replay", "--help").stdout.split())
    assert "before the events of its key that have not run yet" in text
    assert "Later events that ran while it was dead stay done" in text


def test_replay_from_the_shell_runs_in_the_group(shell: Shell) -> None:
    ids = bury(shell.folder, 4)
    assert (
        dead(shell, "replay", "--dry-run")
        == "4 would be replayed, 0 were no longer dead, 0 matching dead letters left\n"
    )
    assert json.loads(dead(shell, "replay", ids[0], "--json")) == {"replayed": 1, "failed": 0, "left": 0}
    running = shell.start("run", "shop:app")
    running.saw("billed 0")
    assert dead(shell, "replay") == "3 replayed, 0 were no longer dead, 0 matching dead letters left\n"
    for n in range(1, 4):
        running.saw(f"billed {n}")
    until(lambda: dead(shell, "list") == "no dead letters\n", "the letters are removed")
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    assert running.out.count("billed") == 4


@pytest.mark.slow
def test_ctrl_c_stops_a_replay_and_prints_how_far_it_got(shell: Shell) -> None:
    bury(shell.folder, 20)
    running = shell.start("dead", "replay", "--rate", "1", "--app", "shop:app")

    def begun() -> bool:
        return len(json.loads(dead(shell, "list", "--json"))) < 20

    until(begun, "it has begun")
    running.send(signal.SIGINT)
    assert running.ended() == 130
    moved = int(running.out.split()[0])
    assert 0 < moved < 20
    assert f"{20 - moved} matching dead letter" in running.out
    assert "stopped; run the command again" in running.err
    assert len(json.loads(dead(shell, "list", "--json"))) == 20 - moved


@pytest.mark.slow
def test_drop_asks_and_export_and_send_leave_the_letters(shell: Shell) -> None:
    bury(shell.folder, 4)
    lines = [json.loads(line) for line in dead(shell, "export").splitlines()]
    assert len(lines) == 4
    assert dead(shell, "send", "--topic", "sick", "--key", "c-1") == "1 copy sent to sick\n"
    tail = shell.run("tail", "sick", "--json", "--from", "earliest", "--limit", "1", "--app", "shop:app")
    copy = json.loads(tail.stdout)
    assert (copy["key"], copy["value"]) == ("c-1", {"id": 1})
    assert copy["headers"]["onward-dead-message"] == "no stock for 1"
    assert "add --yes" in dead(shell, "drop", code=2)
    assert "this would drop 1 dead letter for good" in dead(shell, "drop", "--key", "c-1", code=2)
    assert dead(shell, "drop", "--key", "c-1", "--dry-run").endswith("0 matching dead letters left\n")
    assert dead(shell, "drop", "--limit", "3", "--dry-run").endswith("1 matching dead letter left\n")
    assert dead(shell, "drop", "--key", "c-9") == "0 dropped, 0 were no longer dead, 0 matching dead letters left\n"
    answer = json.loads(dead(shell, "drop", "--text", "no stock", "--yes", "--json"))
    assert answer == {"dropped": 2, "failed": 0, "left": 0}
    assert len(json.loads(dead(shell, "list", "--json"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--url", "sqlite:///none.db", "--topic", "orders"], "does not exist: nothing was ever published"),
        (["list", "--since", "yesterday", "--app", "shop:app"], "neither an ISO time nor an age"),
        (["lst"], "No such command"),
    ],
)
def test_misuse_is_reported_with_its_cure(shell: Shell, arguments: list[str], message: str) -> None:
    done = shell.run("dead", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (shell.folder / "none.db").exists()


@pytest.mark.slow
def test_a_url_alone_lists_every_topic_and_changes_none(shell: Shell) -> None:
    ids = bury(shell.folder, 1) + bury(shell.folder, 2, topic="payments")
    url = ("--url", "sqlite:///shop.db")
    letters = json.loads(shell.run("dead", "list", "--json", *url).stdout)
    assert {letter["event"]["id"] for letter in letters} == set(ids)
    assert {letter["topic"] for letter in letters} == {"orders", "payments"}
    for option, count in (("--topic", "payments"), 2), (("--group", "billing"), 3), (("--topic", "orders"), 1):
        done = shell.run("dead", "list", "--json", *url, *option)
        assert len(json.loads(done.stdout)) == count
    for change in (["replay"], ["drop", "--yes"], ["send", "--topic", "copies"]):
        done = shell.run("dead", *change, *url)
        assert done.returncode == 2
        assert "give a topic, a group" in done.stderr
    assert len(json.loads(shell.run("dead", "list", "--json", *url).stdout)) == 3


def test_a_system_without_groups_has_no_dead_letters(shell: Shell) -> None:
    publish(shell.folder, 1)
    done = shell.run("dead", "list", "--url", "sqlite:///shop.db")
    assert (done.returncode, done.stdout) == (0, "no dead letters\n")


@pytest.mark.parametrize("command", ["replay", "drop"])
def test_an_id_of_no_letter_is_an_error_and_nothing_is_done(shell: Shell, command: str) -> None:
    (id_,) = bury(shell.folder, 1)
    yes = ["--yes"] if command == "drop" else []
    done = shell.run("dead", command, id_, "nosuch", "--app", "shop:app", *yes)
    assert done.returncode == 1
    assert "no dead letter nosuch" in done.stderr
    assert len(json.loads(dead(shell, "list", "--json"))) == 1
