"""`onward dead`: dead letters. dead_choice.py: the options; dead_show.py: the output; dead_replay.py: replays."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from onward.cli import find
from onward.cli.dead_choice import (
    ErrorOption,
    GroupOption,
    IdsArgument,
    KeyOption,
    SinceOption,
    TextOption,
    TopicOption,
    UntilOption,
    chosen,
)
from onward.cli.say import confirm, counted, say

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.failure.dead import Dropped, LetterScan, Replayed, Where

T = TypeVar("T")

dead = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Change nothing, print how many would be changed.")]
LimitOption = Annotated[int | None, typer.Option(metavar="N", min=1, help="At most N dead letters.")]


@dead.callback()
def root() -> None:
    """Show dead letters, run them again, or drop them. A dead letter is an event that Onward has given up on.

    \b
    Example:
      onward dead list --url sqlite:///shop.db
      onward dead list --topic orders
      onward dead show 0198c5e2-7f0a-7a44-9d52-3e6c0a3a5f10
      onward dead replay --error ConnectionError --rate 50
    """


@dead.command("list")
def list_(
    topic: TopicOption = None,
    group: GroupOption = None,
    key: KeyOption = None,
    error: ErrorOption = None,
    text: TextOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most N dead letters.")] = 50,
    after: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Continue after the page that printed this cursor.")
    ] = None,
    json: JsonOption = False,
    app: find.AppOption = None,
    url: find.UrlOption = None,
) -> None:
    """List dead letters, ordered by group, partition and position. --json prints one array, with all fields.

    Without --topic and --group: those of the application's topics, or with --url those of every topic.
    """
    from onward.cli import dead_show

    where = chosen(topic, group, key, error, text, since, until)

    async def work(system: "Onward") -> "LetterScan":
        await system.dead.check(group=group)
        return await system.dead.list(after=after, limit=limit, **where)

    page = _with(app, url, work)
    if json:
        dead_show.print_array(page.letters)
    else:
        dead_show.print_table(page.letters)
    if page.after is not None:
        say(f"there are more: add --after {page.after}")


@dead.command()
def show(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the dead letter, or of its event.")],
    group: GroupOption = None,
    json: JsonOption = False,
    app: find.AppOption = None,
    url: find.UrlOption = None,
    topic: TopicOption = None,
) -> None:
    """Show one dead letter. Prints the event, the error and its traceback."""
    from onward.cli import dead_show

    letter = _with(app, url, lambda system: system.dead.show(id_, group=group, topic=topic))
    if json:
        dead_show.print_object(letter)
    else:
        dead_show.print_letter(letter)


@dead.command()
def replay(
    ids: IdsArgument = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    key: KeyOption = None,
    error: ErrorOption = None,
    text: TextOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitOption = None,
    rate: Annotated[float | None, typer.Option(metavar="N", min=0.001, help="At most N per second.")] = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    app: find.AppOption = None,
    url: find.UrlOption = None,
) -> None:
    """Run dead letters again, in their group only. Their attempts are counted from 1 again.

    Each runs as soon as the group runs, before the events of its key that have not run yet. Later events that ran
    while it was dead stay done. Ctrl-C stops the replay and prints how far it got.
    """
    from onward.cli.dead_replay import run
    from onward.cli.dead_show import print_answer

    where = chosen(topic, group, key, error, text, since, until, ids=ids)

    async def work(system: "Onward") -> None:
        await system.dead.check(**where)
        replay = system.dead.replaying(limit=limit, rate=rate, **where)
        answer = await replay.rehearse() if dry_run else await run(replay)
        verb = "would be replayed" if dry_run else "replayed"
        note = f"{answer.replayed:,} {verb}, {_rest(answer)}"
        print_answer(answer, note, json=json)
        if replay.stopped:
            say("stopped; run the command again for the rest")
            raise typer.Exit(130)

    _with(app, url, work)


@dead.command()
def drop(
    ids: IdsArgument = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    key: KeyOption = None,
    error: ErrorOption = None,
    text: TextOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitOption = None,
    dry_run: DryRunOption = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: JsonOption = False,
    app: find.AppOption = None,
    url: find.UrlOption = None,
) -> None:
    """Delete dead letters for good. Asks for confirmation; without a terminal it needs --yes."""
    from onward.cli.dead_show import print_answer

    where = chosen(topic, group, key, error, text, since, until, ids=ids)

    async def work(system: "Onward") -> "Dropped":
        await system.dead.check(**where)
        if not dry_run and not yes:
            await _confirm(system, where, limit)
        return await system.dead.drop(limit=limit, dry_run=dry_run, **where)

    answer = _with(app, url, work)
    verb = "would be dropped" if dry_run else "dropped"
    note = f"{answer.dropped:,} {verb}, {_rest(answer)}"
    print_answer(answer, note, json=json)


@dead.command()
def export(
    topic: TopicOption = None,
    group: GroupOption = None,
    key: KeyOption = None,
    error: ErrorOption = None,
    text: TextOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    app: find.AppOption = None,
    url: find.UrlOption = None,
) -> None:
    """Print dead letters as JSON lines, with all fields. They stay where they are."""
    where = chosen(topic, group, key, error, text, since, until)

    async def work(system: "Onward") -> int:
        count = 0
        async for line in system.dead.export(**where):
            sys.stdout.buffer.write(line + b"\n")
            count += 1
        sys.stdout.flush()
        return count

    try:
        say(counted(_with(app, url, work), "dead letter"))
    except BrokenPipeError:
        # The reader of our output has closed it. Python flushes stdout again when it exits, and that must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dead.command()
def send(
    to: Annotated[str, typer.Option("--topic", metavar="TOPIC", help="The topic to publish to.")],
    ids: IdsArgument = None,
    origin: Annotated[
        str | None, typer.Option("--from", metavar="TOPIC", help="Only dead letters of this topic.")
    ] = None,
    group: GroupOption = None,
    key: KeyOption = None,
    error: ErrorOption = None,
    text: TextOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: LimitOption = None,
    json: JsonOption = False,
    app: find.AppOption = None,
    url: find.UrlOption = None,
) -> None:
    """Publish copies of dead letters to a topic. The letters stay where they are.

    Every group of that topic gets the copies. To run them again in their own group and order, use replay.
    """
    where = chosen(origin, group, key, error, text, since, until, ids=ids)

    async def work(system: "Onward") -> int:
        await system.dead.check(**where)
        return await system.dead.send(to, limit=limit, **where)

    sent = _with(app, url, work)
    typer.echo(f'{{"sent":{sent}}}' if json else f"{sent:,} {'copy' if sent == 1 else 'copies'} sent to {to}")


def _rest(answer: "Replayed | Dropped") -> str:
    were = "was" if answer.failed == 1 else "were"
    return f"{answer.failed:,} {were} no longer dead, {counted(answer.left, 'matching dead letter')} left"


def _with(app: str | None, url: str | None, work: Callable[["Onward"], Awaitable[T]]) -> T:
    system = find.existing(app, url)

    async def run() -> T:
        async with system:
            return await work(system)

    return asyncio.run(run())


async def _confirm(system: "Onward", where: "Where", limit: int | None) -> None:
    planned = await system.dead.drop(limit=limit, dry_run=True, **where)
    if not planned.dropped:
        return
    confirm(counted(planned.dropped, "dead letter"))
