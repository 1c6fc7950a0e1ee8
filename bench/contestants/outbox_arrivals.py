"""A relay whose broker writes down which events it got, and when: a line with process, key and time in a file."""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from bench.contestants.outbox_relay import NullBroker
from onward.brokers.base import Relay as RelayTag
from onward.event import Event
from onward.outbox import schema
from onward.outbox.relay import Relay, RelaySettings
from onward.outbox.relay_figures import RelayFigures
from onward.outbox.stores import open_store


class NotingBroker(NullBroker):
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def publish(self, events: Sequence[Event], *, relay: RelayTag | None = None) -> None:
        lines = [f"{os.getpid()} {event.key} {time.monotonic()}\n" for event in events]
        os.write(self._file, "".join(lines).encode())


def run(database: str, path: str, lease_s: float) -> None:
    """Until it is killed."""
    broker: Any = NotingBroker(path)
    settings = RelaySettings(f"relay-{os.getpid()}", lease_s, keep_s=0.0, drain_timeout_s=1.0)
    relay = Relay(open_store(database, schema.TABLE), broker, settings, RelayFigures(schema.TABLE, 60.0))
    asyncio.run(relay.run(lambda: None))
