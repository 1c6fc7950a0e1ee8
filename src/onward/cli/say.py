"""Messages to the user. They go to stderr, so that stdout has only the command's output."""

import sys

import typer

from onward.errors import ConfigError


class Misuse(ConfigError):
    """The command line asks for something that cannot work; exit code 2."""


def say(text: str) -> None:
    typer.secho(text, err=True, dim=True)


def complain(error: Exception) -> None:
    """Print the error and its notes, without a traceback."""
    text = "\n  ".join([str(error), *getattr(error, "__notes__", ())])
    typer.echo(f"{typer.style('error:', fg='red')} {text}", err=True)


def counted(count: int, noun: str) -> str:
    """The count with its noun, such as `1 dead letter` or `2 dead letters`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def confirm(what: str) -> None:
    """Ask before something is dropped for good. Misuse if there is no terminal."""
    if not sys.stdin.isatty():
        raise Misuse(f"this would drop {what} for good; to do so without a terminal, add --yes")
    if not typer.confirm(f"Drop {what} for good?", err=True):
        raise typer.Exit(1)
