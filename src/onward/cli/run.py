"""`onward run`: the handlers of an application, in this process or in several."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli import find, leash, policy
from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.app import Onward

_MOST_PORT = 65_000  # each of the workers has its own


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def run(
    context: typer.Context,
    application: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:APP]",
            help="shop:app for app = Onward(...) in shop.py; else ONWARD_APP, or the app of onward.toml.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="How many processes share the work.")] = 1,
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when a .py file below this folder changes.")
    ] = False,
    log_level: Annotated[
        Level, typer.Option(case_sensitive=False, help="The least level of what is logged.")
    ] = Level.INFO,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve /metrics for Prometheus; each of --workers at the next port."),
    ] = None,
) -> None:
    """Run an application's handlers until SIGTERM or Ctrl-C.

    It then takes nothing more, lets what runs finish, and exits with 0. A second signal ends it at once.
    With --workers, a process that dies is replaced.

    \b
    Example:
      onward run shop:app
      onward run shop:app --workers 4
      onward run shop:app --reload
      onward run shop:app --metrics 9464
    """
    application = application or find.application("`onward run shop:app`")
    place = None if metrics is None else _place(metrics)
    held = leash.take()
    if held is None and (workers > 1 or reload):
        debug = bool(context.find_root().params["debug"])
        raise typer.Exit(_supervise(_child_command(application, log_level, debug, metrics), workers, reload, log_level))
    app = find.load(application)
    # After the import: an application that configured logging itself is left alone.
    _log_to_stderr(log_level, "" if held is None else f"[{held.number}] ")
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_run(app, place) if held is None else _run_supervised(app, held, place))
    except OnwardError:
        raise
    except Exception:  # a bug of ours or of the application: told once, with its traceback
        logging.getLogger("onward").exception("the application ended with an error")
        raise typer.Exit(policy.NO) from None


async def _run_supervised(app: "Onward", held: leash.Leash, place: tuple[str, int] | None) -> None:
    """Say hello only when the broker is open: what cannot be opened is said once, and not by every worker."""
    async with app:
        held.greet(leash.Hello(app.settings.drain_timeout_s, app.settings.url))
        await _run(app, place, held.number)


async def _run(app: "Onward", place: tuple[str, int] | None, number: int = 1) -> None:
    if place is None:
        await app.run()
        return
    from onward.observe.endpoint import serving

    host, port = place
    async with serving(app.metrics, host, port + number - 1 if port else 0) as port:
        logging.getLogger("onward").info("metrics at http://%s:%d/metrics", host, port)
        await app.run()


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > _MOST_PORT:
        raise typer.BadParameter(f"{text!r} is no [HOST:]PORT", param_hint="--metrics")
    return host or "127.0.0.1", int(port)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: the same, with less processor time."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _supervise(command: list[str], workers: int, reload: bool, log_level: Level) -> int:
    from onward.cli.supervisor import Supervisor
    from onward.cli.watch import Watch

    _log_to_stderr(log_level)
    watch = Watch(Path.cwd()) if reload else None
    if reload:
        logging.getLogger("onward").info("watching the .py files below %s", Path.cwd())
    return Supervisor(command, workers, watch=watch).run()


def _child_command(application: str, log_level: Level, debug: bool, metrics: str | None) -> list[str]:
    # -P unless we ourselves were found in the current folder: the application's queue.py must not be imported as ours.
    isolate = [] if os.getcwd() in sys.path else ["-P"]
    options = ["--debug"] if debug else []
    command = [sys.executable, *isolate, "-m", "onward", *options, "run", application, "--log-level", log_level.value]
    return command if metrics is None else [*command, "--metrics", metrics]


def _log_to_stderr(level: Level, who: str = "") -> None:
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s %(levelname)-7s {who}%(message)s")
