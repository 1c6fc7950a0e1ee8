"""`onward publish`: one event from the shell."""

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli import find
from onward.cli.say import Misuse

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.event import Event


def publish(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to publish to.")],
    value: Annotated[str, typer.Argument(metavar="JSON", help="The event's value; - reads it from stdin.")],
    key: Annotated[str | None, typer.Option(help="Events of one key are handled in order.")] = None,
    type_: Annotated[
        str | None,
        typer.Option("--type", metavar="TYPE", help="The event's type, such as order.placed, to select events by."),
    ] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header. May be repeated.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Send the value unchanged. It need not be JSON.")] = False,
    app: find.AppOption = None,
    url: find.UrlOption = None,
) -> None:
    """Publish one event, and print its id when the broker has stored it durably.

    \b
    Example:
      onward publish orders --key c-1 '{"id": 1, "total": 9.5}' --type order.placed
      onward publish orders --header source=shell - < order.json
      onward publish notes --text 'plain words' --url sqlite:///shop.db
    """
    headers = dict(_header(each) for each in header or ())
    system = find.system(app, url)
    data = _payload(value, text=text, max_bytes=system.settings.max_event_bytes)
    event = system.event(topic, data, key=key, type=type_, headers=headers)
    asyncio.run(_publish(system, event))
    typer.echo(event.id)


async def _publish(system: "Onward", event: "Event") -> None:
    async with system:
        await system.broker.publish([event])


def _header(given: str) -> tuple[str, str]:
    name, separator, value = given.partition("=")
    if not name or not separator:
        raise Misuse(f"--header {given!r} is not NAME=VALUE")
    return name, value


def _payload(given: str, *, text: bool, max_bytes: int) -> bytes:
    """The bytes to send: checked to be JSON, but not rewritten."""
    import msgspec

    data = _stdin(max_bytes) if given == "-" else os.fsencode(given)
    if text:
        return data
    try:
        msgspec.json.decode(data)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Misuse(
            f"the value is not JSON: {error}; quote it for the shell, or send it unchanged with --text"
        ) from error
    return data.strip()


def _stdin(max_bytes: int) -> bytes:
    from onward.errors import TooLarge

    data = sys.stdin.buffer.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLarge(
            f"stdin has more than max_event_bytes={max_bytes:,}; store the data elsewhere and publish its address"
        )
    return data
