"""`onward topology`: compares what an application declares with what its broker has."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from onward import brokers
from onward.brokers.base import Change, GroupSpec, TopicSpec, Topology
from onward.brokers.core.topic_rules import DEFAULT_PARTITIONS, TopicRules
from onward.cli import find, policy
from onward.cli.say import Misuse, say
from onward.settings import redacted

if TYPE_CHECKING:
    from onward.app import Onward

topology = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON array of changes.")]
_SIGNS = {"create": "+", "refuse": "!"}


@topology.callback()
def root() -> None:
    """Compare the topology of an application with its broker, or create what is missing.

    It consists of the topics and groups of the handlers, and of all that app.topology(...) declares. With
    auto_declare=False an application creates nothing by itself: run `apply` before it starts. Only RabbitMQ needs its
    groups created.

    \b
    Example:
      onward topology plan --app shop:app
      onward topology apply --app shop:app
    """


@topology.command()
def plan(app: find.AppOption = None, json: JsonOption = False) -> None:
    """Print what differs at the broker, and change nothing. Exits with 1 if `apply` would refuse something."""
    _differences(app, apply=False, json=json)


@topology.command()
def apply(app: find.AppOption = None, json: JsonOption = False) -> None:
    """Create what does not exist. Exits with 1 if something exists and differs; it does not change that."""
    _differences(app, apply=True, json=json)


def _differences(app: str | None, *, apply: bool, json: bool) -> None:
    system = find.load(app or find.application("--app shop:app"))
    wanted = _wanted(system)
    say(f"comparing with {redacted(system.settings.url)}")
    changes = asyncio.run(_declared(system, wanted, apply=apply))
    uncompared = "" if apply else brokers.uncompared(system.settings, wanted)
    if json:
        typer.echo(msgspec.json.encode(changes).decode())
    else:
        _print(changes, uncompared)
    refused = sum(change.action == "refuse" for change in changes)
    note = f"; {uncompared}" if uncompared else ""
    say(f"{len(changes) - refused} {'created' if apply else 'to create'}, {refused} refused{note}")
    if refused:
        raise typer.Exit(policy.NO)


def _wanted(system: "Onward") -> Topology:
    """The declared topics, and the handlers' other topics with the partition count that the broker would choose."""
    usual = system.settings.partitions or DEFAULT_PARTITIONS
    topics = {handler.topic: TopicSpec(handler.topic, usual) for handler in system.handlers}
    topics |= {spec.name: spec for spec in system.declared.topics}
    if not topics and not system.declared.own:
        raise Misuse("the application has no handler and declares no topology, so there is nothing to compare")
    groups = [GroupSpec(each.topic, each.group, each.ordering, each.start, each.asks) for each in system.handlers]
    return Topology(list(topics.values()), system.declared.own, groups)


async def _declared(system: "Onward", wanted: Topology, *, apply: bool) -> Sequence[Change]:
    if not apply and (why := brokers.absent(system.settings)):
        say(f"{why}; apply creates it")
        return TopicRules(system.settings).plan(wanted, lambda _: None, None)
    # With auto_declare, a broker may ask its server to compare objects in ways that need more permissions.
    settings = msgspec.structs.replace(system.settings, auto_declare=True)
    broker = await brokers.open_broker(settings)  # not the application, which would create what it declares
    try:
        return await broker.declare(wanted, apply=apply)
    finally:
        await broker.close()


def _print(changes: Sequence[Change], uncompared: str) -> None:
    for change in changes:
        typer.secho(f"{_SIGNS[change.action]} {change.detail}", fg="red" if change.action == "refuse" else None)
    if not changes:
        what = "was compared" if uncompared else "the application declares"
        typer.echo(f"the broker has everything that {what}{f': {uncompared}' if uncompared else ''}")
