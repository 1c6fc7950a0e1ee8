"""Dead letters on the screen: a table, a page, JSON."""

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onward.brokers.base import AsideRecord, Failure
from onward.cli.show import as_line, harmless
from onward.clock import moment
from onward.failure.letter import as_json, fields

_MOST_CHARS = 200  # of an error in the table
_PIPE_WIDTH = 1_000


def print_array(letters: Sequence[AsideRecord]) -> None:
    """One JSON array, a letter a line."""
    body = b",\n ".join(as_json(letter) for letter in letters)
    sys.stdout.buffer.write(b"[" + body + b"]\n")
    sys.stdout.flush()


def print_object(letter: AsideRecord) -> None:
    data = msgspec.json.format(msgspec.json.encode(fields(letter)), indent=2)
    sys.stdout.buffer.write(data + b"\n")
    sys.stdout.flush()


def print_answer(answer: Any, note: str, *, json: bool) -> None:
    typer.echo(msgspec.json.encode(answer).decode() if json else note)


def print_table(letters: Sequence[AsideRecord]) -> None:
    if not letters:
        typer.echo("no dead letters")
        return
    # Piped output is not wrapped: there is no screen to fit.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("died", no_wrap=True)
    table.add_column("event", no_wrap=True)
    table.add_column("group, topic, key: error", overflow="fold")
    for letter in letters:
        failure = letter.failure
        table.add_row(Text(_clock(failure.last) if failure else "", "dim"), Text(letter.event.id), _summary(letter))
    console.print(table)


def _summary(letter: AsideRecord) -> Text:
    text = Text(letter.group)
    text.append(f" {letter.partition.topic}", "cyan")
    if letter.event.key is not None:
        text.append(f" {harmless(letter.event.key)}", "bold yellow")
    if letter.failure is not None:
        first = letter.failure.message.partition("\n")[0]
        error = harmless(f"{letter.failure.error}: {first}")
        text.append(": ").append(error if len(error) <= _MOST_CHARS else f"{error[: _MOST_CHARS - 1]}…", "red")
        text.append(f" ({_attempts(letter.failure)})", "dim")
    return text


def print_letter(letter: AsideRecord) -> None:
    console = Console(highlight=False)
    failure = letter.failure
    facts = {
        "letter": letter.id,
        "event": letter.event.id,
        "origin": f"{letter.partition} position {letter.position}",
        "group": letter.group,
    }
    if failure is not None:
        facts |= {
            "handler": failure.handler,
            "reason": f"{failure.reason} after {_attempts(failure)}",
            "first failure": _clock(failure.first),
            "last failure": _clock(failure.last),
            "error": f"{failure.error}: {failure.message}",
        }
    for name, value in facts.items():
        console.print(Text(f"{name:<14}", "dim") + Text(harmless(value)), soft_wrap=True)
    console.print(Text("\n") + as_line(letter.event), soft_wrap=True)
    if failure is not None and failure.traceback:
        lines = [harmless(line) for line in failure.traceback.splitlines()]
        console.print(Text("\n" + "\n".join(lines), "red"), soft_wrap=True)


def _attempts(failure: Failure) -> str:
    return f"{failure.attempts} attempt{'s' * (failure.attempts != 1)}"


def _clock(time: float) -> str:
    """The local time, without the date if it is today's."""
    at = moment(time)
    if at is None:
        return "--:--:--"
    return f"{at:%H:%M:%S}" if at.date() == datetime.now().date() else f"{at:%Y-%m-%d %H:%M:%S}"
