"""The options that select dead letters."""

import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli.say import Misuse

if TYPE_CHECKING:
    from onward.failure.dead import Where

TopicOption = Annotated[str | None, typer.Option(metavar="TOPIC", help="Only dead letters of this topic.")]
GroupOption = Annotated[str | None, typer.Option(metavar="GROUP", help="Only of this group.")]
KeyOption = Annotated[str | None, typer.Option(help="Only of this key.")]
ErrorOption = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Only with this type of error, such as ValueError.")
]
TextOption = Annotated[str | None, typer.Option(help="Only with this text in the error message or in the value.")]
SinceOption = Annotated[
    str | None,
    typer.Option(
        metavar="WHEN", help="Only if the last failure was since then: an ISO time, or an age such as 30m, 2h, 1d."
    ),
]
UntilOption = Annotated[str | None, typer.Option(metavar="WHEN", help="Only if the last failure was before then.")]
IdsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Ids of dead letters or of their events. Default: all that match the options."),
]

_AGE = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def chosen(  # one parameter per option, in the order of the commands
    topic: str | None,
    group: str | None,
    key: str | None,
    error: str | None,
    text: str | None,
    since: str | None,
    until: str | None,
    *,
    ids: Sequence[str] | None = None,
) -> "Where":
    where: Where = {"topic": topic, "group": group, "key": key, "error": error, "text": text}
    where |= {"since": _when("--since", since), "until": _when("--until", until), "ids": ids or None}
    return where


def _when(option: str, given: str | None) -> float | None:
    if given is None:
        return None
    if age := _AGE.fullmatch(given):
        return time.time() - int(age[1]) * _UNITS[age[2]]
    try:
        return datetime.fromisoformat(given).timestamp()
    except (ValueError, OverflowError) as error:
        raise Misuse(f"{option} {given!r} is neither an ISO time nor an age such as 30m, 2h, 1d") from error
