"""`onward groups`: the groups that read a topic, their members and their progress."""

import asyncio
import difflib
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from onward.cli import find, policy
from onward.cli.say import Misuse, complain, confirm

if TYPE_CHECKING:
    from rich.table import Table

    from onward.brokers.base import Broker, GroupInfo, Standing

T = TypeVar("T")

groups = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
TopicOption = Annotated[str | None, typer.Option(metavar="TOPIC", help="Only of this topic. Default: every topic.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PIPE_WIDTH = 1_000


@groups.callback()
def root() -> None:
    """List the groups that read a topic, show one, or drop one that is no longer used.

    The events of a group count as unfinished even if none of its members runs. A group that is never run again
    therefore blocks retention, and in the end the publishers.

    \b
    Example:
      onward groups list
      onward groups show billing --topic orders
      onward groups drop billing --topic orders
    """


@groups.command("list")
def list_(
    topic: TopicOption = None, json: JsonOption = False, app: find.AppOption = None, url: find.UrlOption = None
) -> None:
    """List the groups of each topic. Prints how many members they have, and in how many partitions they are behind."""
    found = _with(app, url, lambda broker: _found(broker, topic))
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    elif not found:
        typer.echo("no groups")
    else:
        _print(_overview(found))


@groups.command()
def show(
    group: GroupArgument,
    topic: TopicOption = None,
    json: JsonOption = False,
    app: find.AppOption = None,
    url: find.UrlOption = None,
) -> None:
    """Show one group. Prints its members and, for each partition, watermark, end of the log, owner and fence.

    The watermark is the first position that is not known to be done. Positions have gaps, so the distance to the end
    is not a number of events. The fence is the number of the ownership: each new owner gets a higher one. A group with
    a work queue has no watermark: its end is the number of events that wait.
    """
    found = _with(app, url, lambda broker: _of_group(broker, group, topic))
    if json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    for info in found:
        typer.echo(f"group {info.group} of topic {info.topic}: {_members(info)}")
        _print(_standings(info))


@groups.command()
def drop(
    group: GroupArgument,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="Required if the group reads several.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: JsonOption = False,
    app: find.AppOption = None,
    url: find.UrlOption = None,
) -> None:
    """Drop a group of a topic. Deletes its progress, its waiting and held events, and its dead letters.

    Asks for confirmation; without a terminal it needs --yes. Exits with 1 if a member of the group is running.
    """

    async def work(broker: "Broker") -> "GroupInfo":
        found = await _of_group(broker, group, topic)
        if len(found) > 1:
            topics = ", ".join(info.topic for info in found)
            raise Misuse(f"group {group} reads the topics {topics}; name one of them with --topic")
        (info,) = found
        if info.members:
            cure = "stop it first (a killed member counts as running until its lease ends, at most lease_s)"
            complain(Misuse(f"group {group} of topic {info.topic} is running: {_members(info)}; {cure}"))
            raise typer.Exit(policy.NO)
        if not yes:
            confirm(f"group {group} of topic {info.topic}, with its progress, waiting events and dead letters,")
        await broker.drop_group(info.topic, info.group)
        return info

    info = _with(app, url, work)
    answer = {"group": info.group, "topic": info.topic}
    typer.echo(msgspec.json.encode(answer).decode() if json else f"dropped group {group} of topic {info.topic}")


def _with(app: str | None, url: str | None, work: "Callable[[Broker], Awaitable[T]]") -> T:
    system = find.existing(app, url)

    async def run() -> T:
        async with system:
            return await work(system.broker)

    return asyncio.run(run())


async def _found(broker: "Broker", topic: str | None) -> "list[GroupInfo]":
    topics = [spec.name for spec in await broker.topics()] if topic is None else [topic]
    return [info for name in topics for info in await broker.groups(name)]


async def _of_group(broker: "Broker", group: str, topic: str | None) -> "list[GroupInfo]":
    every = await _found(broker, topic)
    if found := [info for info in every if info.group == group]:
        return found
    near = difflib.get_close_matches(group, {info.group for info in every}, 1)
    hint = f"did you mean {near[0]!r}?" if near else "`onward groups list` shows all groups"
    raise Misuse(f"no group {group!r} has read {'any topic' if topic is None else f'topic {topic}'}; {hint}")


def _members(info: "GroupInfo") -> str:
    if not info.members:
        return "no member is alive"
    return ", ".join(f"{each.name} at {each.endpoint}" if each.endpoint else each.name for each in info.members)


def _overview(found: "Sequence[GroupInfo]") -> "Table":
    table = _table("topic", "group", "members", "behind")
    for info in found:
        behind = sum(_is_behind(standing) for standing in info.partitions.values())
        table.add_row(info.topic, info.group, str(len(info.members)), f"{behind} of {len(info.partitions)} partitions")
    return table


def _is_behind(standing: "Standing") -> bool:
    return standing.end is None or standing.watermark < standing.end


def _standings(info: "GroupInfo") -> "Table":
    table = _table("partition", "watermark", "end", "owner", "fence")
    for index, standing in sorted(info.partitions.items()):
        cells = [index, standing.watermark, standing.end, standing.owner, standing.fence]
        table.add_row(*["-" if cell is None else str(cell) for cell in cells])
    return table


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _print(table: "Table") -> None:
    from rich.console import Console

    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
