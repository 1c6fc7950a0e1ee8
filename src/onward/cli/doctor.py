"""`onward doctor`: checks how the broker is set up."""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from onward import brokers
from onward.brokers.base import Change, Finding
from onward.cli import find, policy
from onward.cli.say import Misuse

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.settings import Settings

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(
    url: Annotated[str | None, typer.Argument(metavar="URL", help="The broker's URL.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array of findings.")] = False,
    app: find.AppOption = None,
    url_option: find.UrlOption = None,
) -> None:
    """Check how the broker is set up, and print what is wrong and how to fix it. Changes nothing.

    Exits with 1 if it finds an error, with 2 if there is nothing at the URL, and with 3 if the broker cannot be
    opened or reached.

    \b
    Example:
      onward doctor sqlite:///shop.db
      onward doctor --app shop:app --json
    """
    if url is not None and url_option is not None:
        raise Misuse("URL and --url cannot be used together; give one of them")
    findings = asyncio.run(_findings(find.existing(app, url_option if url is None else url)))
    if json:
        typer.echo(msgspec.json.encode(findings).decode())
    else:
        _print(findings)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(policy.NO)


async def _findings(system: "Onward") -> Sequence[Finding]:
    logging.getLogger("onward").setLevel(logging.ERROR)  # the findings have the warnings
    broker = await brokers.open_broker(system.settings)
    try:
        await broker.topics()  # raises BrokerError if the server cannot be reached; open_broker may not notice that
        changes = await broker.declare(system.declared, apply=False) if system.declared.own else ()
        return [*await broker.diagnose(), *(_missing(each, changes, system.settings) for each in changes)]
    finally:
        await broker.close()


def _missing(change: Change, changes: Sequence[Change], settings: "Settings") -> Finding:
    """A difference from the objects that the application declares."""
    if change.action == "refuse":
        return Finding("error", change.detail)
    cure = "create it with `onward topology apply --app MODULE:APP`"
    if not settings.auto_declare:
        return Finding("error", f"{change.what} does not exist", cure)
    if _is_lost_route(change, changes):
        return Finding("warning", f"{change.what} does not exist, so its queue gets no events", cure)
    return Finding("ok", f"{change.what} does not exist yet; the application creates it when it starts")


def _is_lost_route(change: Change, changes: Sequence[Change]) -> bool:
    """A binding whose both ends exist. With an end missing, the application was probably never started."""
    ends = [each.what for each in changes if not each.what.startswith("binding ")]
    return change.what.startswith("binding ") and not any(f"{end} " in f"{change.what} " for end in ends)


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        typer.echo(f"{typer.style(f'{finding.level:<8}', fg=_COLOURS[finding.level])} {finding.what}")
        if finding.cure:
            typer.echo(f"{'':<8} {finding.cure}")
