"""The relays of one process: one for each outbox of the application that has a database of its own."""

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from sqlalchemy.engine import make_url

from onward.brokers.base import Broker, Figure, FigureSample
from onward.outbox.outbox import Outbox
from onward.outbox.relay import Relay, RelaySettings
from onward.outbox.relay_figures import RelayFigures
from onward.outbox.stores import open_store
from onward.settings import Settings


class Relayed(NamedTuple):
    outbox: Outbox
    relay: Relay
    figures: RelayFigures


class Relays:
    """`name`: of this process, as other relays and `onward outbox status` see it."""

    def __init__(self, outboxes: Sequence[Outbox], broker: Broker, settings: Settings, name: str) -> None:
        found = [(each, each.url) for each in outboxes if each.url is not None and not _is_broker(each.url, broker)]
        terms = RelaySettings(
            f"{name}-{uuid4().hex[:8]}", settings.lease_s, settings.outbox_keep_s, settings.drain_timeout_s
        )
        self._all = [_relayed(outbox, url, broker, terms, settings.outbox_max_age_s) for outbox, url in found]

    def __len__(self) -> int:
        return len(self._all)

    async def run(self, started: Callable[[], None]) -> None:
        """Run until `stop`, or until one relay fails. Calls `started` when each has reached its database, or could
        not."""
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

    unsubscribe = each.outbox.on_ring(ring)
    try:
        await each.relay.run(started)
    finally:
        unsubscribe()


def _largest(name: str, text: str, values: Sequence[float]) -> Figure:
    return Figure(name, "gauge", text, (), [FigureSample((), max(values, default=0))], largest=True)


def _relayed(outbox: Outbox, url: str, broker: Broker, terms: RelaySettings, max_age_s: float) -> Relayed:
    figures = RelayFigures(outbox.table, max_age_s)
    return Relayed(outbox, Relay(open_store(url, outbox.table), broker, terms, figures), figures)


def _is_broker(url: str, broker: Broker) -> bool:
    """Whether the database is the broker's own file. Then its events go into the broker's log at once."""
    place = make_url(url)
    if place.get_backend_name() != "sqlite" or not place.database or not os.path.exists(place.database):
        return False
    with closing(sqlite3.connect(place.database)) as db:
        return broker.append_in(db, ()) is not None
