"""The command line. Each command has its own file, which is imported only when that command is used.

run.py        `onward run`. With several processes it uses supervisor.py, whose decisions are in policy.py, its
              connection to a child in leash.py, a slot's earlier processes in predecessors.py and the files of
              --reload in watch.py. exit_limit.py ends a process that does not exit in time
health.py     `onward health`
publish.py    `onward publish`
tail.py       `onward tail`: follow.py reads the events, show.py formats them
dead.py       `onward dead`: options in dead_choice.py, tables in dead_show.py, the progress bar in dead_replay.py
groups.py     `onward groups`
outbox.py     `onward outbox`: tables in outbox_show.py
relay.py      `onward relay`
topology.py   `onward topology`
doctor.py     `onward doctor`
demo.py       `onward demo`
find.py       the application or broker that a command uses; say.py: messages to the user; policy.py: exit codes
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

# Listed here so that `onward --help` does not import the commands.
COMMANDS = {
    "run": "Run an application's handlers.",
    "health": "Check whether a running application is ready, or alive.",
    "publish": "Publish one event.",
    "tail": "Show a topic's events as they arrive.",
    "dead": "Show dead letters (events that Onward gave up on), replay or drop them.",
    "groups": "Show the groups that read a topic, or drop one.",
    "outbox": "Create an outbox's tables, show its state, or release refused events.",
    "relay": "Publish the events of an application's outbox.",
    "topology": "Compare an application's topics with the broker, or create them.",
    "doctor": "Check how the broker is set up, and report problems.",
    "demo": "Run a small shop on one SQLite file, with workers to kill.",
}


class CommandGroup(TyperGroup):
    """Finds commands by name, and turns their errors into exit codes; see policy.py."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            return _command(cmd_name)
        if ctx.resilient_parsing:  # shell completion
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
                pass  # no message: the user pressed Ctrl-C
            elif ctx.params["debug"]:
                traceback.print_exception(error)
            else:
                complain(error)
            raise typer.Exit(exit_code(error)) from None


def _command(name: str) -> Any:
    found = getattr(import_module(f"onward.cli.{name}"), name)
    if isinstance(found, typer.Typer):  # it has subcommands
        return typer.main.get_command(found)
    one = typer.Typer(add_completion=False, rich_markup_mode=None)
    one.command(name)(found)
    return typer.main.get_command(one)


# Rich help takes a third of the time of `onward --help`, and rich tracebacks print the values of variables.
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
    """Carry events from the code that publishes them to the code that handles them: none lost, every key in order.

    \b
    Example:
      onward run shop:app
      onward publish orders --key c-1 '{"id": 1}'
      onward tail orders
    """


def main() -> None:
    app(prog_name="onward")
