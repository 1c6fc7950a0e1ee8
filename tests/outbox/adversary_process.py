"""A relay in a process of its own: `python -m tests.outbox.adversary_process DATABASE FILE`.

Its broker does not check fences, so it also accepts what a relay sends that has lost its shards. It is slow. Sometimes
it does not accept the last events of a key, and at times it accepts no event of some key. The batches of the relay are
small, so there is always a backlog to read page by page.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from onward.brokers.base import Broker, Features, TopicSpec
from onward.brokers.base import Relay as RelayTag
from onward.errors import PublishError
from onward.event import Event
from onward.outbox import relay as relay_module
from onward.outbox.relay import Relay, RelaySettings
from onward.outbox.relay_figures import RelayFigures
from onward.outbox.stores import open_store
from tests.outbox.adversary import KEYS, TABLE, Published, arrived
from tests.outbox.adversary_fleet import LEASE_S

SLOWEST_S = 0.1
BATCH_ROWS = 40
REFUSALS = 0.1  # the part of the calls in which some events are not accepted
PERIOD_S = 3.0  # in each period another key is refused
REFUSED_S = 2.0  # at the beginning of a period. A relay parks a row that it cannot publish for 0.6 s


class Arrivals:
    """A broker that appends the events of each call to a file, in one write."""

    features = Features(False, False, "window", False, frozenset())

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def publish(self, events: Sequence[Event], *, relay: RelayTag | None = None) -> None:
        await asyncio.sleep(random.uniform(0, SLOWEST_S))
        last = _of_the_refused_key(events) or (_last_of_a_key(events) if random.random() < REFUSALS else [])
        accepted = random.choice([0, 0, len(last)])  # how many of them are accepted, without an answer
        failed = {event.id for event in last[accepted:]}
        self._write([event for event in events if event.id not in failed])
        if last:
            raise PublishError("no answer", refused=last[accepted:], unknown=last[:accepted])

    def _write(self, events: Sequence[Event]) -> None:
        """A relay may be killed while it writes, so each write begins with the end of the line before it."""
        lines = [b"\n" + msgspec.json.encode(arrived(each.id, each.value or b"")) for each in events]
        os.write(self._file, b"".join([*lines, b"\n"]))

    async def topics(self) -> Sequence[TopicSpec]:
        return []


def _of_the_refused_key(events: Sequence[Event]) -> list[Event]:
    """All relays refuse the same key at the same time."""
    period, since = divmod(time.monotonic(), PERIOD_S)
    refused = KEYS[int(period) % len(KEYS)] if since < REFUSED_S else ""
    return [event for event in events if event.key == refused]


def _last_of_a_key(events: Sequence[Event]) -> list[Event]:
    key = random.choice(events).key
    same = [event for event in events if event.key == key]
    return same[random.randrange(len(same)) :]


def read(path: Path) -> list[Published]:
    """What has arrived so far, of all relays. A line that is not complete has not arrived."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Published) for line in lines if line.endswith(b"]")]


async def main(database: str, path: str) -> None:
    relay_module.BATCH_ROWS = BATCH_ROWS
    settings = RelaySettings(f"relay-{os.getpid()}", LEASE_S, keep_s=0.0, drain_timeout_s=5.0)
    broker = cast("Broker", Arrivals(Path(path)))
    relay = Relay(open_store(database, TABLE), broker, settings, RelayFigures(TABLE, 60.0))
    await relay.run(lambda: None)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
