"""`onward outbox`: creates the tables of an outbox, shows its state, and releases refused events."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import typer

from onward import settings as settings_
from onward.cli import find, policy
from onward.cli.say import Misuse, say
from onward.outbox import schema, status
from onward.outbox.databases import dialect_of

if TYPE_CHECKING:
    from onward.settings import Settings

outbox = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

UrlArgument = Annotated[
    str | None,
    typer.Argument(metavar="URL", help="The database. Default: the outbox of --app, or the setting outbox_url."),
]
AppOption = Annotated[str | None, typer.Option("--app", metavar="MODULE:APP", help="Use this application's outbox.")]
TableOption = Annotated[str | None, typer.Option(metavar="NAME", help=f"The table. Default: {schema.TABLE}.")]
PrintOption = Annotated[bool, typer.Option("--print", help="Print the SQL and change nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_CLIENTS = {
    "postgresql": "psql --single-transaction --set ON_ERROR_STOP=1 --file FILE",
    "mariadb": "mariadb DATABASE < FILE",
    "sqlite": "sqlite3 -bail DATABASE < FILE",
}


@outbox.callback()
def root() -> None:
    """Create the tables of an outbox, show what waits in it, or release events that the broker has refused.

    An outbox is a table in your database. You write an event in the transaction that changes your data; a relay
    publishes it after the commit.

    \b
    Example:
      onward outbox init postgresql://shop@localhost/shop
      onward outbox status --app shop:app
      onward outbox retry --app shop:app --key c-1
    """


@outbox.command()
def init(
    url: UrlArgument = None,
    table: TableOption = None,
    shards: Annotated[int | None, typer.Option(metavar="N", help="Parts that relays share. Default: 8.")] = None,
    mode: Annotated[Literal["log", "queue"] | None, typer.Option(help="PostgreSQL only. Default: log.")] = None,
    print_: PrintOption = False,
    app: AppOption = None,
) -> None:
    """Create the tables and SQL functions of an outbox. What exists already stays as it is.

    With --print it connects to nothing and prints the SQL for your migrations.

    \b
    Example:
      onward outbox init postgresql://shop@localhost/shop
      onward outbox init mysql://shop@localhost/shop --print
    """
    place = _place(url, app, table)
    if print_:
        _print_sql(place, schema.script(dialect_of(place.url), table=place.table, shards=shards, mode=mode))
    else:
        _report(place, schema.init(place.url, table=place.table, shards=shards, mode=mode))


@outbox.command()
def upgrade(
    url: UrlArgument = None, table: TableOption = None, print_: PrintOption = False, app: AppOption = None
) -> None:
    """Bring the tables and SQL functions to the version that this Onward needs. Writers may go on meanwhile.

    \b
    Example:
      onward outbox upgrade postgresql://shop@localhost/shop
    """
    place = _place(url, app, table)
    if print_:
        _print_sql(place, schema.missing(place.url, table=place.table))
    else:
        _report(place, schema.upgrade(place.url, table=place.table))


@outbox.command("status")
def status_(
    url: UrlArgument = None,
    table: TableOption = None,
    json: JsonOption = False,
    look_s: Annotated[
        float, typer.Option("--look", metavar="SECONDS", min=0.0, help="How long to look for signs of the relays.")
    ] = 3.0,
    app: AppOption = None,
) -> None:
    """Show what waits in an outbox, its relays, and the events that the broker did not accept.

    Exits with 1 if something needs a person: refused events, an event that waits for longer than outbox_max_age_s, or
    no relay that is alive while events wait. A relay gives a sign about every second.

    \b
    Example:
      onward outbox status postgresql://shop@localhost/shop
      onward outbox status --app shop:app --json
    """
    place = _place(url, app, table)
    found = status.read(place.url, table=place.table, look_s=look_s)
    findings = status.findings(found, place.settings.outbox_max_age_s)
    if json:
        answer: dict[str, Any] = msgspec.to_builtins(found)
        typer.echo(msgspec.json.encode(answer | {"findings": findings}).decode())
    else:
        from onward.cli import outbox_show

        outbox_show.print_status(found, findings)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(policy.NO)


@outbox.command()
def retry(
    url: UrlArgument = None,
    table: TableOption = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only events of this key.")] = None,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="Only events for this topic.")] = None,
    json: JsonOption = False,
    app: AppOption = None,
) -> None:
    """Let the relay try refused events again, each with the later events of its key. Prints how many were refused.

    Exits with 1 if there is none with this key or topic.

    \b
    Example:
      onward outbox retry postgresql://shop@localhost/shop
      onward outbox retry --app shop:app --topic orders --key c-1
    """
    place = _place(url, app, table)
    count = status.release(place.url, table=place.table, key=key, topic=topic)
    what = f"{count} event{'s' * (count != 1)}"
    note = f"released {what}; the relay tries again" if count else "there are no refused events to release"
    typer.echo(msgspec.json.encode({"released": count}).decode() if json else note)
    if not count and (key is not None or topic is not None):
        raise typer.Exit(policy.NO)


class OutboxPlace(NamedTuple):
    """Which outbox a command works on."""

    url: str
    table: str
    settings: "Settings"


def _place(url: str | None, app: str | None, table: str | None) -> OutboxPlace:
    """The outbox that the options name. Prints the choice on stderr."""
    if url is not None and app is not None:
        raise Misuse("URL and --app cannot be used together; give one of them")
    known = settings_.load()
    if url is not None:
        return OutboxPlace(url, table or schema.TABLE, known)
    if app is None and known.outbox_url is not None:
        return _said(OutboxPlace(known.outbox_url, table or schema.TABLE, known), "the setting outbox_url")
    target = app or known.app
    if target is None:
        raise Misuse("no outbox given: write its database's URL, name an application with --app, or set outbox_url")
    return _said(_of_application(target, table), f"application {target}")


def _of_application(target: str, table: str | None) -> OutboxPlace:
    loaded = find.load(target)
    every = {(each.url, each.table) for each in loaded.outboxes if each.url is not None}
    found = sorted(pair for pair in every if table in (None, pair[1]))
    if not every and loaded.settings.outbox_url is not None:
        found = [(loaded.settings.outbox_url, table or schema.TABLE)]
    if len(found) == 1:
        return OutboxPlace(*found[0], loaded.settings)
    if not found:
        raise Misuse(f"{target} has no outbox{f' with table {table}' if table else ''}; write its database's URL")
    names = ", ".join(f"{name} at {settings_.redacted(url)}" for url, name in found)
    raise Misuse(f"{target} has several outboxes ({names}); choose one with --table, or write its database's URL")


def _said(place: OutboxPlace, how: str) -> OutboxPlace:
    say(f"using {settings_.redacted(place.url)} ({how})")
    return place


def _report(place: OutboxPlace, created: list[str]) -> None:
    for each in created:
        typer.echo(f"created {each}")
    if not created:
        typer.echo(f"the outbox {place.table} is complete; nothing was changed")


def _print_sql(place: OutboxPlace, text: str) -> None:
    typer.echo(f"-- Onward's outbox {place.table}. Run it with: {_CLIENTS[dialect_of(place.url)]}\n\n{text}".rstrip())
