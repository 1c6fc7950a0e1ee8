"""How a command talks to the person: on stderr, so that stdout belongs to the answer."""

import sys

import typer

from onward.errors import ConfigError


class Misuse(ConfigError):
    """The command line asks for something that cannot be; exit code 2."""


def say(text: str) -> None:
    typer.secho(text, err=True, dim=True)


def complain(error: Exception) -> None:
    """The error and its notes, without a traceback."""
    text = "\n  ".join([str(error), *getattr(error, "__notes__", ())])
    typer.echo(f"{typer.style('error:', fg='red')} {text}", err=True)


def confirm(what: str) -> None:
    """Ask before something is dropped for good. Misuse: there is no terminal to ask at."""
    if not sys.stdin.isatty():
        raise Misuse(f"{what} would be gone for good, and there is no terminal to ask at; add --yes")
    if not typer.confirm(f"Drop {what} for good?", err=True):
        raise typer.Exit(1)
