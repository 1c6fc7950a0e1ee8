"""`onward run`: runs an application's handlers, in this process or in several."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward import settings, signals
from onward.cli import find, leash, policy
from onward.cli.exit_limit import limit_exit
from onward.cli.health import METRICS, place_of
from onward.errors import OnwardError
from onward.loops import new_loop

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.observe.endpoint import Address

log = logging.getLogger("onward")


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ApplicationArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:APP",
        help="shop:app for app = Onward(...) in shop.py. Default: ONWARD_APP, or app in onward.toml.",
    ),
]
LogLevelOption = Annotated[Level, typer.Option(case_sensitive=False, help="The lowest level to log.")]


def run(
    context: typer.Context,
    application: ApplicationArgument = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=256,
            help="Run N worker processes that share the work, and replace each one that dies, also with N = 1. "
            "Default: one process that is not replaced.",
        ),
    ] = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when a .py file below this folder changes.")
    ] = False,
    log_level: LogLevelOption = Level.INFO,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            envvar=METRICS,
            help="Serve /metrics, /health/live, /health/ready and /readings at this address, for all workers together.",
        ),
    ] = None,
) -> None:
    """Run an application's handlers until SIGTERM or Ctrl-C.

    It then takes no more events, lets the running ones finish, and exits with 0. A second signal ends it at once.
    If it does not finish within drain_timeout_s plus 5 s, it stops anyway and exits with 1.

    \b
    Example:
      onward run shop:app
      onward run shop:app --workers 4
      onward run shop:app --reload
      onward run shop:app --metrics 9464
    """
    signals.ignore_at_exit()
    held = leash.take()
    supervises = held is None and (workers is not None or reload)
    if supervises:
        log_to_stderr(log_level)
        settings.check_environment()
    elif held is not None:
        settings.trust_environment()
    application = application or find.application("`onward run shop:app`")
    place = None if metrics is None else place_of(metrics)
    if supervises:
        debug = bool(context.find_root().params["debug"])
        child = _child_command(application, log_level, debug)
        raise typer.Exit(_supervise(child, workers or 1, reload, place))
    app = find.load(application)
    # After the import, and without effect if the application has configured logging itself.
    log_to_stderr(log_level, "" if held is None else f"[{held.number}] ")
    if held is None:  # otherwise the supervisor logs it
        find.log_broker(app.settings.url)
    finish(app, serving_metrics(app, place, app.run) if held is None else _run_supervised(app, held, place))


def finish(app: "Onward", work: Coroutine[Any, Any, None]) -> None:
    """Run the work in an event loop of its own to its end, and limit how long that takes after a stop signal."""
    ended = limit_exit(app.settings.drain_timeout_s)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(work)
    except OnwardError:
        raise
    except Exception:  # a bug of ours or of the application: reported once, with its traceback
        log.exception("the application ended with an error")
        raise typer.Exit(policy.NO) from None
    finally:
        ended()


async def serving_metrics(
    app: "Onward", place: "Address | None", work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Do the work, and serve the application's metrics meanwhile if there is a `place`."""
    if place is None:
        await work()
        return
    from onward.observe.endpoint import serving

    async with serving(app, place) as where:
        log.info("metrics at http://%s/metrics", where)
        app.endpoint = str(where.public)
        await work()


async def _run_supervised(app: "Onward", held: leash.Leash, place: "Address | None") -> None:
    """Run the handlers, and report to the supervisor. With a `place`, the supervisor serves these reports there.

    The hello is sent when the broker is open, so a broker that cannot be opened is reported once, not by every worker.
    """
    async with app:
        held.greet(leash.Hello(app.settings.drain_timeout_s, app.settings.url))
        app.endpoint = None if place is None else str(place.public)
        app.supervised = held.supervised
        app.joined = held.join
        reporting = None if place is None else asyncio.create_task(_report(app, held))
        try:
            await app.run()
        finally:
            if reporting is not None:
                reporting.cancel()


async def _report(app: "Onward", held: leash.Leash) -> None:
    from onward.observe.workers import REPORT_S, Report

    def make() -> Report:
        prefix = app.settings.metrics_prefix
        return Report(app.health(), tuple(app.readings()), tuple(app.registry.families()), prefix)

    failed: set[type[Exception]] = set()  # already logged
    while True:
        sent = True
        try:
            sent = held.report(make)
        except Exception as error:  # the handlers go on, and so do the reports
            if type(error) not in failed:
                failed.add(type(error))
                log.exception("a report to the supervisor failed")
        await asyncio.sleep(REPORT_S if sent else REPORT_S / 20)


def _supervise(command: list[str], workers: int, reload: bool, place: "Address | None") -> int:
    from onward.cli.supervisor import Supervisor
    from onward.cli.watch import Watch
    from onward.observe.endpoint import serving_in_thread
    from onward.observe.workers import Workers

    watch, board = Watch(Path.cwd()) if reload else None, Workers(workers)
    if reload:
        log.info("watching the .py files below %s", Path.cwd())
    with contextlib.ExitStack() as stack:
        if place is not None:
            where = stack.enter_context(serving_in_thread(board, place, board.live))
            log.info("metrics at http://%s/metrics", where)
            command = [*command, "--metrics", str(where)]  # the children report to us, and publish our address
        return Supervisor(command, workers, watch=watch, board=board).run()


def _child_command(application: str, log_level: Level, debug: bool) -> list[str]:
    # -P keeps the current folder out of our imports: an application's queue.py must not replace the standard one.
    # Not if this package itself was found in the current folder.
    isolate = [] if os.getcwd() in sys.path else ["-P"]
    options = ["--debug"] if debug else []
    return [sys.executable, *isolate, "-m", "onward", *options, "run", application, "--log-level", log_level.value]


def log_to_stderr(level: Level, who: str = "") -> None:
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s %(levelname)-7s {who}%(message)s")
