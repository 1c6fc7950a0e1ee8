"""`onward tail`: shows events as they arrive. It reads as a group of its own, so handlers are not affected."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple
from uuid import uuid4

import typer

from onward import brokers
from onward.brokers.base import PASSING, Broker, Start, Subscription, TopicSpec, Topology
from onward.cli import find
from onward.cli.say import Misuse, say

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.cli.show import Screen

# No handler's group has one of these prefixes, so this command never shares events with a handler.
_ONCE = f"{PASSING}tail."
_KEPT = "onward-tail.kept."
_LOOK_S = 0.5  # between two looks for a topic that does not exist yet
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TailPlace(NamedTuple):
    """Where to read."""

    topic: str
    group: str
    start: Start

    @property
    def kept(self) -> bool:
        return self.group.startswith(_KEPT)


def tail(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to show.")],
    start: Annotated[
        str, typer.Option("--from", metavar="WHEN", help="earliest, latest, or an ISO time such as 2025-01-31T12:00.")
    ] = "latest",
    key: Annotated[str | None, typer.Option(help="Only events of this key.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N events.")] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Store the progress under this name. The next run with it continues there."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    app: find.AppOption = None,
    url: find.UrlOption = None,
) -> None:
    """Show a topic's events as they arrive, until Ctrl-C. Handlers still get every event.

    The events of one key are shown in order. With --group, events that were not shown yet count as unfinished and stay
    in the topic.

    \b
    Example:
      onward tail orders
      onward tail orders --from earliest --key c-1 --limit 10
      onward tail orders --json --from 2025-01-31T12:00 | jq .value
    """
    from onward.cli.show import Screen

    place = TailPlace(topic, _ONCE + uuid4().hex if group is None else _KEPT + group, _start(start))
    screen = Screen(json=json, key=key, limit=limit)
    try:
        asyncio.run(_tail(find.observed(app, url), place, screen))
    except BrokenPipeError:
        # The reader of our output has closed it. Python flushes stdout again when it exits, and that must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _start(given: str) -> Start:
    match given:
        case "earliest" | "latest":
            return given
    try:
        return datetime.fromisoformat(given).timestamp()
    except (ValueError, OverflowError) as error:
        raise Misuse(f"--from {given!r} is neither earliest, latest nor an ISO time: {error}") from error


async def _tail(system: "Onward", place: TailPlace, screen: "Screen") -> None:
    from onward.cli.follow import follow

    with _stop_signals() as stop:
        await _store_exists(system, stop)
        if stop.is_set():
            return
        async with system:
            place = await _topic_exists(system, place, stop)
            if stop.is_set():
                return
            async with _joined(system.broker, place) as subscription:
                say(f"showing {place.topic}; stop with Ctrl-C")
                await follow(subscription, screen, stop)


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """An event that the first stop signal sets. A second signal has its default effect."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    caught = [number for number in _END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def first() -> None:
        stop.set()
        for number in caught:
            loop.remove_signal_handler(number)

    for number in caught:
        loop.add_signal_handler(number, first)
    try:
        yield stop
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


async def _store_exists(system: "Onward", stop: asyncio.Event) -> None:
    """Wait until the store exists. Opening the broker would create it, and this command must not."""
    if why := brokers.absent(system.settings):
        say(f"{why}; waiting for it")
    while brokers.absent(system.settings) and not stop.is_set():
        await _pause(stop)


async def _topic_exists(system: "Onward", place: TailPlace, stop: asyncio.Event) -> TailPlace:
    """Wait until the topic exists. Subscribing would create it. A topic that is created while we wait is shown from its
    beginning."""
    wanted = Topology([TopicSpec(place.topic, partitions=1)])  # any count: only planned, never applied
    waited = False
    while not stop.is_set():
        changes = await system.broker.declare(wanted, apply=False)
        if all(change.action != "create" for change in changes):
            break
        if not waited:
            say(f"topic {place.topic} does not exist yet; waiting for it")
        waited = True
        await _pause(stop)
    return place._replace(start="earliest") if waited and place.start == "latest" else place


async def _pause(stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), _LOOK_S)


@contextlib.asynccontextmanager
async def _joined(broker: Broker, place: TailPlace) -> AsyncIterator[Subscription]:
    """Subscribe as a member of our group. Drops the groups of killed `tail` commands first, and ours at the end, unless
    the user named it with --group."""
    for info in await broker.groups(place.topic):
        if info.group.startswith(_ONCE) and not info.members:
            await broker.drop_group(place.topic, info.group)
    subscription = await broker.subscribe(
        [place.topic], group=place.group, member=f"tail-{os.getpid()}", ordering="partition", start=place.start
    )
    try:
        yield subscription
    finally:
        await subscription.close()
        if not place.kept:
            await broker.drop_group(place.topic, place.group)
