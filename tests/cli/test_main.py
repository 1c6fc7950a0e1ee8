"""The root of the command line: help, version, errors and exit codes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onward import __version__
from onward.cli import COMMANDS, app, policy

ANSWER_S = 0.3
EXTRAS = {
    "aio_pika",
    "confluent_kafka",
    "jwt",
    "opentelemetry",
    "psycopg",
    "redis",
    "sqlalchemy",
    "starlette",
    "uvicorn",
}


def onward(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, prog_name="onward")


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_is_listed_and_has_its_own_help(self, command: str) -> None:
        assert f"\n  {command} " in onward("--help").stdout
        done = onward(command, "--help")
        assert done.exit_code == 0
        if command != "demo":
            assert f"Example:\n    onward {command} " in done.stdout

    def test_appears_quickly(self) -> None:
        """In CPU time. On a busy processor this takes longer, and so does the import of typer."""
        times: list[float] = []
        while not times or (min(times) > ANSWER_S and len(times) < 10):
            times.append(cpu_s("-m", "onward", "--help"))
        typer_s = min(cpu_s("-c", "import typer") for _ in times)
        assert min(times) <= max(ANSWER_S, 3 * typer_s)

    def test_imports_no_extra(self) -> None:
        code = "import sys; from onward.cli import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        imported = set(done.stdout.split())
        assert EXTRAS.isdisjoint(imported)
        assert {name for name in imported if name.startswith("onward.cli.")} == {"onward.cli.say"}


def cpu_s(*arguments: str) -> float:
    """The processor time of a Python process."""
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return used.ru_utime + used.ru_stime


def test_version() -> None:
    assert onward("--version").stdout == f"onward {__version__}\n"


def test_suggests_the_command_that_was_meant() -> None:
    done = onward("publsh")
    assert done.exit_code == 2
    assert "did you mean 'publish'?" in done.stderr


class TestErrors:
    def test_an_error_of_onward_is_one_line(self, here: Path) -> None:
        done = onward("publish", "orders", "{}", "--url", "ftp://host")
        assert done.exit_code == policy.USAGE
        assert done.stderr.splitlines()[1].startswith("error: no broker for 'ftp://host'")
        assert len(done.stderr.splitlines()) == 2

    def test_an_unknown_setting(self, here: Path) -> None:
        (here / "onward.toml").write_text('urll = "sqlite:///a.db"\n')
        done = onward("tail", "orders")
        assert done.exit_code == policy.USAGE
        assert "onward.toml sets 'urll', which is not a setting; did you mean 'url'?" in done.stderr

    def test_debug_shows_the_traceback(self, here: Path) -> None:
        done = onward("--debug", "publish", "orders", "{}", "--url", "ftp://host")
        assert done.exit_code == policy.USAGE
        assert "Traceback" in done.stderr

    @pytest.mark.parametrize(
        "arguments",
        [
            ("run", "no_such_module:app"),
            ("publish", "orders", "{", "--url", "sqlite:///a.db"),
            ("publish", "orders", "{}", "--header", "x"),
            ("publish", "orders", "{}", "--app", "a:b", "--url", "sqlite:///a.db"),
            ("publish", "orders"),
            ("tail", "orders", "--from", "yesterday"),
            ("run", "shop:app", "--workers", "0"),
        ],
    )
    def test_misuse_exits_with_2(self, here: Path, arguments: tuple[str, ...]) -> None:
        done = onward(*arguments)
        assert done.exit_code == 2
        assert "Traceback" not in done.stderr
        assert not list(here.glob("*.db"))

    def test_stdin_is_bounded(self, here: Path) -> None:
        done = CliRunner().invoke(
            app, ["publish", "orders", "-", "--url", "sqlite:///a.db?max_event_bytes=10"], input="x" * 11
        )
        assert done.exit_code == policy.USAGE
        assert "more than max_event_bytes=10" in done.stderr

    def test_a_broker_that_cannot_be_used_exits_with_3(self, here: Path) -> None:
        (here / "a.db").write_text("Dear diary, " * 100)
        done = onward("publish", "orders", "{}", "--url", "sqlite:///a.db")
        assert done.exit_code == policy.UNREACHABLE
        assert "not a SQLite database" in done.stderr

    def test_a_refused_publish_exits_with_1(self, here: Path) -> None:
        done = onward("publish", "orders", "{}", "--url", "sqlite:///a.db?max_backlog_bytes=1")
        assert done.exit_code == policy.NO
        assert "max_backlog_bytes=1" in done.stderr

    def test_ctrl_c_exits_with_130(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("onward.cli.find.system", interrupt)
        done = onward("publish", "orders", "{}")
        assert done.exit_code == policy.INTERRUPTED
        assert "Traceback" not in done.output
