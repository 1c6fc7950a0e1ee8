"""Onward's relay: from its first event to its last, with leases and the order of every key.

The witness sees an event when the broker has accepted it. Without a URL, the broker accepts everything at once.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import PARTITIONS, Order
from onward import Onward
from onward.brokers.base import Features
from onward.brokers.base import Relay as RelayTag
from onward.event import Event
from onward.outbox import schema
from onward.outbox.databases import connected
from onward.outbox.relay import Relay, RelaySettings
from onward.outbox.relay_figures import RelayFigures
from onward.outbox.stores import open_store

LEASE_S = 10.0
STUCK_S = 30.0
READY = "ready"
ORDER = msgspec.json.Decoder(Order)


class NullBroker:
    features = Features(False, False, "memory", False, frozenset())

    async def publish(self, events: Sequence[Event], *, relay: RelayTag | None = None) -> None:
        pass

    async def topics(self) -> list[Any]:
        return []


class WatchedBroker:
    """A broker whose accepted events are counted. `over` is set after the last one."""

    def __init__(self, broker: Any, lap: Lap) -> None:
        self.features = broker.features
        self.topics = broker.topics
        self.over = asyncio.Event()
        self._broker = broker
        self._lap = lap

    async def publish(self, events: Sequence[Event], *, relay: RelayTag | None = None) -> None:
        await self._broker.publish(events, relay=relay)
        for event in events:
            order = ORDER.decode(event.value or b"")
            if self._lap.saw(order.customer, order.number):
                self.over.set()


def run(database: str, events: int, broker: str | None = None, *, to_the_end: bool = False) -> Ran:
    """`to_the_end`: run on until the relay has removed all published rows. This time is not counted."""
    return looped(_run(database, broker, Lap(events), to_the_end))


async def _run(database: str, url: str | None, lap: Lap, to_the_end: bool) -> Ran:
    async with _opened(url) as broker:
        watched: Any = WatchedBroker(broker, lap)
        settings = RelaySettings("bench", LEASE_S, keep_s=0.0, drain_timeout_s=10.0)
        relay = Relay(open_store(database, schema.TABLE), watched, settings, RelayFigures(schema.TABLE, 60.0))
        running = asyncio.create_task(relay.run(lambda: print(READY, flush=True)))
        await _ended(watched.over, lap)
        if to_the_end:
            await asyncio.to_thread(_await_empty, database)
        relay.stop()
        await running
    return lap.ran()


async def _ended(over: asyncio.Event, lap: Lap) -> None:
    """Wait for the last event, or until no further one comes."""
    before = -1
    while lap.witness.handled != before and not over.is_set():
        before = lap.witness.handled
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), STUCK_S)


def _await_empty(database: str) -> None:
    end = time.monotonic() + STUCK_S
    with connected(database, rights="") as connection:
        while connection.rows(f"SELECT 1 FROM {schema.TABLE} LIMIT 1") and time.monotonic() < end:
            connection.run("COMMIT")  # the next read sees what others have removed
            time.sleep(0.2)


@asynccontextmanager
async def _opened(url: str | None) -> AsyncIterator[Any]:
    if url is None:
        yield NullBroker()
        return
    async with Onward(url, partitions=PARTITIONS) as app:
        yield app.broker
