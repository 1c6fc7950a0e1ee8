"""`onward demo`: a small shop on one SQLite file, with a live page or, with --check, a verdict."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli import policy
from onward.errors import BrokerError, OnwardError

if TYPE_CHECKING:
    from onward.demo.check import CheckScreen

CHECK_EVENTS = 20_000
BURST = 10_000


def demo(
    events: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000_000, help="Orders that --check places (20,000), or one burst of the page (10,000)."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Without a page: kill a worker half-way, then print a verdict.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of the page, or the next free one.")] = 8400,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes.")] = 3,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the data and print its folder.")] = False,
    url: Annotated[str | None, typer.Option(help="Broker to run on, instead of an SQLite file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="With --check: print the verdict as one JSON object.")] = False,
) -> None:
    """Run a small shop on one SQLite file: kill its workers and watch that no order is lost.

    The exit code is 1 if an order was lost or handled out of order, or if --check made no progress. The data of such
    a run is kept.
    """
    if json and not check:
        raise typer.BadParameter("the page has no verdict to print; add --check", param_hint="--json")
    folder = Path(tempfile.mkdtemp(prefix="onward-demo-"))
    if url is not None:
        _use(folder, url)
    ok = True  # an interrupted demo has no verdict, so its data need not be kept
    lost: BrokerError | None = None
    try:
        ok = _check(folder, events or CHECK_EVENTS, workers, json) if check else _live(folder, events, workers, port)
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo("interrupted", err=True)
        raise typer.Exit(policy.INTERRUPTED) from None
    except BrokerError as error:
        lost = error
        raise
    finally:
        _tidy(folder, keep or not ok, lost)
    if not ok:
        raise typer.Exit(policy.NO)


def _use(folder: Path, url: str) -> None:
    from onward.demo.shop import use_broker

    use_broker(folder, url)


def _check(folder: Path, events: int, workers: int, json: bool) -> bool:
    from onward.demo.check import Check

    with _reader(events) as reader:
        verdict = asyncio.run(Check(folder, events=events, workers=workers, reader=reader).run())
    if verdict.why:
        typer.echo(verdict.why, err=True)
    typer.echo(verdict.json() if json else verdict.line())
    return verdict.ok


def _live(folder: Path, burst: int | None, workers: int, port: int) -> bool:
    from onward.demo import live
    from onward.demo.page import bind

    try:
        server = bind(port)
    except OSError as error:
        typer.echo(f"cannot serve the page: {error}; choose another --port", err=True)
        raise typer.Exit(policy.USAGE) from None
    if port and server.server_port != port:
        typer.echo(f"port {port} is taken, using {server.server_port}")
    balance = asyncio.run(live.run(folder, server, workers=workers, burst=burst or BURST, say=typer.echo))
    typer.echo(" ".join(f"{name}={value}" for name, value in balance._asdict().items()))
    return balance.clean


def _tidy(folder: Path, keep: bool, lost: BrokerError | None) -> None:
    """Remove the data of the run, or print where it is. `lost`: why the broker cannot be reached, so nothing can be
    removed there."""
    from onward.demo import sweep

    where = sweep.place(folder)
    if keep:
        typer.echo(f"the data is in {folder}{f' and in {where}' if where else ''}", err=True)
        return
    try:
        if lost:
            raise lost
        asyncio.run(sweep.sweep(folder))
    except (OnwardError, KeyboardInterrupt) as error:
        if where:
            why = "" if lost else f": {str(error) or 'interrupted'}"
            typer.echo(f"{where} may still be there; you can delete them{why}", err=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _reader(events: int) -> Iterator["CheckScreen"]:
    """Print lines to stderr, so that stdout is only the verdict. The progress bar appears only on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from onward.demo.check import CheckScreen

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("handled"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("handled", total=events)

        class Terminal(CheckScreen):
            def say(self, text: str) -> None:
                bar.console.print(text, soft_wrap=True)

            def done(self, orders: int) -> None:
                bar.update(task, completed=orders)

        yield Terminal()
