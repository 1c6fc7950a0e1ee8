"""Which dead letters a command means."""

import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli.say import Misuse

if TYPE_CHECKING:
    from onward.failure.dead import Where

TopicOption = Annotated[str | None, typer.Option(metavar="TOPIC", help="Of this topic.")]
GroupOption = Annotated[str | None, typer.Option(metavar="GROUP", help="Of this group.")]
KeyOption = Annotated[str | None, typer.Option(help="Of this key.")]
ErrorOption = Annotated[str | None, typer.Option(metavar="TYPE", help="With this error, such as ValueError.")]
TextOption = Annotated[str | None, typer.Option(help="With this text in the error's message or in the value.")]
SinceOption = Annotated[
    str | None, typer.Option(metavar="WHEN", help="Last failed since then: an ISO time, or an age such as 30m, 2h, 1d.")
]
UntilOption = Annotated[str | None, typer.Option(metavar="WHEN", help="Last failed before then.")]
IdsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Of letters or of their events; else all that match.")
]

_AGE = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def chosen(  # one option each, in the order in which the commands name them
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
