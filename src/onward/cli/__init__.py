"""The command line. One file per command, each imported only when it is asked for.

run.py        `onward run`, through supervisor.py when there are several processes: its decisions are in policy.py,
              its tie to a child in leash.py, a slot's earlier processes in predecessors.py, the files of --reload in
              watch.py; exit_limit.py cuts what holds up the end of a process
health.py     `onward health`
publish.py    `onward publish`
tail.py       `onward tail`: follow.py reads, show.py makes lines of events
dead.py       `onward dead`: its options in dead_choice.py, tables in dead_show.py, the bar in dead_replay.py
groups.py     `onward groups`
topology.py   `onward topology`
doctor.py     `onward doctor`
demo.py       `onward demo`
find.py       which system a command talks to; say.py: how it talks to the person; policy.py: exit codes
"""

import difflib
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onward import __version__
from onward.cli.say import complain
from onward.errors import OnwardError

# Said here, so that `onward --help` imports none of them.
COMMANDS = {
    "run": "Run an application's handlers.",
    "health": "Ask a running application whether it is ready, or alive.",
    "publish": "Publish one event.",
    "tail": "Show a topic's events as they come.",
    "dead": "Look at events that were given up, run them again or drop them.",
    "groups": "Look at the groups that read a topic, or drop one.",
    "topology": "Compare what an application declares with the broker, or create it.",
    "doctor": "Look at the broker and say what is wrong.",
    "demo": "See the whole path on one SQLite file, with workers to kill.",
}


class CommandGroup(TyperGroup):
    """The commands by name, and what their errors mean to the shell; see policy.py."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            return _command(cmd_name)
        if ctx.resilient_parsing:  # a shell asks for completions
            return None
        near = difflib.get_close_matches(cmd_name, COMMANDS, 1)
        return ctx.fail(f"no command {cmd_name!r}; {f'did you mean {near[0]!r}?' if near else 'see onward --help'}")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (OnwardError, KeyboardInterrupt) as error:
            from onward.cli.policy import exit_code

            if isinstance(error, KeyboardInterrupt):
                pass  # the person knows
            elif ctx.params["debug"]:
                traceback.print_exception(error)
            else:
                complain(error)
            raise typer.Exit(exit_code(error)) from None


def _command(name: str) -> Any:
    found = getattr(import_module(f"onward.cli.{name}"), name)
    if isinstance(found, typer.Typer):  # a command of commands
        return typer.main.get_command(found)
    one = typer.Typer(add_completion=False, rich_markup_mode=None)
    one.command(name)(found)
    return typer.main.get_command(one)


# Rich help costs a third of the time that `onward --help` takes, and its exceptions print the values of variables.
app = typer.Typer(cls=CommandGroup, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"onward {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Events from a database commit to the code that must act on them: none lost, every key in order.

    \b
    Example:
      onward run shop:app
      onward publish orders --key c-1 '{"id": 1}'
      onward tail orders
    """


def main() -> None:
    app(prog_name="onward")
