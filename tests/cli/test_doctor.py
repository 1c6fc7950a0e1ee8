"""`onward doctor`, on a SQLite file."""

import asyncio
import json
import sqlite3
from contextlib import closing

import pytest

from onward import Onward
from tests.cli.shell import Shell
from tests.cli.system import publish, url


def test_a_healthy_store_has_only_ok_findings(shell: Shell) -> None:
    leave_behind(shell, events=0)
    done = shell.run("doctor", "sqlite:///shop.db")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines
    assert all(line.startswith("ok ") for line in lines), done.stdout
    assert "shop.db is intact" in done.stdout
    findings = json.loads(shell.run("doctor", "--app", "shop:app", "--json").stdout)
    assert {finding["level"] for finding in findings} == {"ok"}


@pytest.mark.slow
def test_a_warning_has_a_cure_and_the_exit_code_is_0(shell: Shell) -> None:
    """A group without members: the cure is a command, and the command works."""
    leave_behind(shell)
    done = shell.run("doctor", "sqlite:///shop.db")
    assert done.returncode == 0, done.stderr
    assert "warning  group billing of topic orders has unfinished events" in done.stdout
    (cure,) = [line for line in done.stdout.splitlines() if "onward groups drop" in line]
    assert cure.startswith("         ")
    command = cure.split("`")[1].split()[1:]
    assert shell.run(*command, "--yes").returncode == 0
    after = shell.run("doctor", "sqlite:///shop.db").stdout
    assert "warning  group" not in after
    assert "warning  no group reads topic orders" in after, "events that it had not read stay for the next group"


def leave_behind(shell: Shell, events: int = 1) -> None:
    """Leave a group that has joined, read nothing and left."""

    async def join() -> None:
        async with Onward(url(shell.folder)) as app:
            how = {"group": "billing", "member": "m", "ordering": "key", "start": "earliest"}
            subscription = await app.broker.subscribe(["orders"], **how)  # type: ignore[arg-type]
            await subscription.close()

    publish(shell.folder, *range(events))
    asyncio.run(join())


@pytest.mark.slow
def test_an_error_exits_with_1(shell: Shell) -> None:
    publish(shell.folder, *range(2_000))
    path = shell.folder / "shop.db"
    with path.open("r+b") as file:  # a page of the log
        file.seek(path.stat().st_size - 4096)
        file.write(b"\xff" * 4096)
    done = shell.run("doctor", "sqlite:///shop.db", "--json")
    assert done.returncode == 1, done.stderr
    assert [finding for finding in json.loads(done.stdout) if finding["level"] == "error"]


def test_a_missing_file_is_not_created_and_a_file_that_cannot_be_opened_exits_with_3(shell: Shell) -> None:
    done = shell.run("doctor", "sqlite:///none.db")
    assert done.returncode == 2
    assert "none.db does not exist: nothing was ever published there" in done.stderr
    assert not (shell.folder / "none.db").exists()
    shell.write("diary.db", "Dear diary, " * 100)
    done = shell.run("doctor", "sqlite:///diary.db")
    assert done.returncode == 3
    assert "not a SQLite database" in done.stderr


def test_the_url_is_an_argument_or_an_option(shell: Shell) -> None:
    publish(shell.folder, 1)
    done = shell.run("doctor", "--url", "sqlite:///shop.db")
    assert done.returncode == 0, done.stderr
    assert "shop.db is intact" in done.stdout
    done = shell.run("doctor", "sqlite:///shop.db", "--url", "sqlite:///shop.db")
    assert (done.returncode, done.stderr) == (2, "error: URL and --url cannot be used together; give one of them\n")
    for given in (("sqlite:///shop.db",), ("--url", "sqlite:///shop.db")):
        done = shell.run("doctor", *given, "--app", "shop:app")
        assert done.returncode == 2
        assert "--app and --url cannot be used together" in done.stderr


@pytest.mark.parametrize("command", [("doctor",), ("groups", "list", "--url"), ("dead", "list", "--url")])
def test_a_file_of_another_program_is_left_as_it_is(shell: Shell, command: tuple[str, ...]) -> None:
    path = shell.folder / "foreign.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    done = shell.run(*command, "sqlite:///foreign.db")
    assert done.returncode == 2
    assert "has no tables of Onward" in done.stderr
    assert path.read_bytes() == before
