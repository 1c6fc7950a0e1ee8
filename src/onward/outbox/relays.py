"""The relays of one process: one for each table of an outbox that is not in the broker's own file."""

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from onward.brokers.base import Broker, Figure, FigureSample
from onward.outbox.databases import dialect_of, sqlite_path
from onward.outbox.outbox import Outbox
from onward.outbox.relay import Relay, RelaySettings
from onward.outbox.relay_figures import RelayFigures
from onward.outbox.stores import open_store
from onward.settings import Settings, redacted

log = logging.getLogger("onward")


class Relayed(NamedTuple):
    outboxes: Sequence[Outbox]  # of one table: an application may make several
    relay: Relay
    figures: RelayFigures


class Relays:
    """`name`: of this process, as other relays and `onward outbox status` see it."""

    def __init__(self, outboxes: Sequence[Outbox], broker: Broker, settings: Settings, name: str) -> None:
        tables: dict[tuple[str, str], list[Outbox]] = {}
        for each in outboxes:
            if each.url is not None and not _is_broker(each.url, broker):
                tables.setdefault((each.url, each.table), []).append(each)
        self._all = [_relayed(place, found, broker, settings, name) for place, found in tables.items()]
        self._stopping = asyncio.Event()

    def __len__(self) -> int:
        return len(self._all)

    async def run(self, started: Callable[[], None]) -> None:
        """Run until `stop`, or until one relay fails. Calls `started` when each has reached its database, or could
        not."""
        if not self._all:
            log.info("nothing to relay: the outbox is in the broker's own file, so its events are in the log at once")
            started()
            await self._stopping.wait()
        waiting = set(range(len(self._all)))

        def begin(number: int) -> None:
            if number in waiting:
                waiting.remove(number)
                if not waiting:
                    started()

        try:
            async with asyncio.TaskGroup() as group:
                for number, each in enumerate(self._all):
                    group.create_task(_rung(each, partial(begin, number)))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def stop(self) -> None:
        self._stopping.set()
        for each in self._all:
            each.relay.stop()

    def troubles(self) -> list[str]:
        return [trouble for each in self._all for trouble in each.figures.troubles()]

    def figures(self) -> list[Figure]:
        published: Counter[str] = Counter()
        for each in self._all:
            published.update(each.figures.published)
        samples = [FigureSample((topic,), count) for topic, count in published.items()]
        shards = [FigureSample((), sum(each.relay.shards for each in self._all))]
        return [
            Figure("outbox_published", "counter", "Events that the relay has published.", ("topic",), samples),
            Figure("outbox_shards", "gauge", "Shards of the outbox that the process owns.", (), shards),
            _largest(
                "outbox_oldest_seconds",
                "Age of the oldest event that the relay has read and not published.",
                [each.figures.oldest_s for each in self._all],
            ),
            _largest(
                "outbox_parked_events",
                "Events of the outbox that the broker did not accept, and the later events of their keys.",
                [each.figures.parked for each in self._all],
            ),
        ]


async def _rung(each: Relayed, started: Callable[[], None]) -> None:
    """Run the relay. The writers of this process wake it after their commits, from any thread."""
    loop = asyncio.get_running_loop()

    def ring() -> None:
        with suppress(RuntimeError):  # the loop has just ended
            loop.call_soon_threadsafe(each.relay.ring)

    with ExitStack() as stack:
        for outbox in each.outboxes:
            stack.callback(outbox.on_ring(ring))
        each.figures.began(redacted(str(each.outboxes[0].url)))
        await each.relay.run(started)
        each.figures.ended()


def _largest(name: str, text: str, values: Sequence[float]) -> Figure:
    return Figure(name, "gauge", text, (), [FigureSample((), max(values, default=0))], largest=True)


def _relayed(
    place: tuple[str, str], outboxes: Sequence[Outbox], broker: Broker, settings: Settings, name: str
) -> Relayed:
    url, table = place
    terms = RelaySettings(
        f"{name}-{uuid4().hex[:8]}", settings.lease_s, settings.outbox_keep_s, settings.drain_timeout_s
    )
    figures = RelayFigures(table, settings.outbox_max_age_s)
    return Relayed(outboxes, Relay(open_store(url, table), broker, terms, figures), figures)


def _is_broker(url: str, broker: Broker) -> bool:
    """Whether the database is the broker's own file. Then its events go into the broker's log at once."""
    if not broker.features.append_in or dialect_of(url) != "sqlite" or not sqlite_path(url).exists():
        return False
    with closing(sqlite3.connect(sqlite_path(url))) as db:
        return broker.append_in(db, ()) is not None
