"""`onward health`: an exec probe for containers. It asks the endpoint that `onward run --metrics` serves."""

import http.client
import json
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli import policy
from onward.cli.say import say

if TYPE_CHECKING:
    from onward.observe.endpoint import Address

METRICS = "ONWARD_METRICS"  # environment variable: the address where `run` serves and `health` asks
_PATIENCE_S = 5.0


def health(
    live: Annotated[
        bool,
        typer.Option(
            "--live/--ready",
            help="--live: does the process work? If not, restart it. --ready (default): do its handlers run and make "
            "progress? If not, the reasons are printed.",
        ),
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", envvar=METRICS, help="The address given to `onward run --metrics`."),
    ] = None,
) -> None:
    """Check whether a running `onward run --metrics` is ready, or alive. Exits with 0 for yes and with 1 for no.

    \b
    Example:
      onward health --ready --metrics 9464
      ONWARD_METRICS=9464 onward health --live
    """
    if metrics is None:
        raise typer.BadParameter(
            f"no address: give the one that was given to `onward run --metrics`, or set {METRICS}",
            param_hint="--metrics",
        )
    place, question = place_of(metrics).seen_from("127.0.0.1"), "live" if live else "ready"
    yes, reasons = _ask(place.host, place.port, question)
    if yes:
        typer.echo(question)
        return
    say(f"not {question}: {'; '.join(reasons)}")
    raise typer.Exit(policy.NO)


def place_of(text: str) -> "Address":
    """The address in the value of --metrics. BadParameter if it has none."""
    from onward.observe.endpoint import Address

    try:
        return Address.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--metrics") from None


def _ask(host: str, port: int, question: str) -> tuple[bool, list[str]]:
    try:
        connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
        connection.request("GET", f"/health/{question}")
        answer = connection.getresponse()
        troubles = json.loads(answer.read())["troubles"]
    except (OSError, http.client.HTTPException) as error:
        return False, [f"nothing answers at {host}:{port} ({error or type(error).__name__})"]
    except (ValueError, KeyError, TypeError):
        return False, [f"the server at {host}:{port} is not Onward"]
    return answer.status == 200, troubles
