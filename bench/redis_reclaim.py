"""Entries that a dead consumer of another program has left: how soon Onward has taken them over and delivered them."""

import asyncio
import time
from typing import Any

from tests.servers.redis import RedisServer

from bench.kit import Bench, Figure, spread
from bench.redis_server import PARTITIONS, fill_plain
from onward import Onward
from onward.brokers.base import Assigned
from onward.brokers.redis import Streams
from onward.event import Delivery

BATCH = 1_000
TARGET_PER_S = 50_000


def run(bench: Bench, server: RedisServer) -> None:
    entries, rounds = bench.sized((100_000, 3), (10_000, 1))
    taken, delivered = [], []
    for number in range(rounds):
        name, group = f"left-{number}", "router"
        _leave(server, fill_plain(server, name, entries), group)
        taken_s, delivered_s, count = asyncio.run(_reclaim(server.url, name, group))
        bench.check("Redis, reclaimed entries are delivered", count == entries, f"{count:,} of {entries:,}")
        taken.append(entries / taken_s)
        delivered.append(entries / delivered_s)
        bench.say(f"redis: reclaimed {taken[-1]:,.0f} /s, with delivery {delivered[-1]:,.0f} /s")
    bench.add(
        Figure(
            what=f"Redis, {entries:,} entries of a dead consumer are taken over",
            measured=f"{spread(taken)} /s",
            value=min(taken),
            beside=f"and delivered: {spread(delivered)} /s",
            target=f"≥ {TARGET_PER_S:,} /s",
            met=min(taken) >= TARGET_PER_S,
            samples={"taken_per_s": taken, "delivered_per_s": delivered},
        )
    )


def _leave(server: RedisServer, streams: list[str], group: str) -> None:
    """A consumer reads everything, acknowledges nothing, and is gone."""
    with server.client() as client:
        other: Any = client
        for stream in streams:
            other.xgroup_create(stream, group, "0")
            while other.xreadgroup(group, "dead", {stream: ">"}, count=BATCH):
                pass


async def _reclaim(url: str, name: str, group: str) -> tuple[float, float, int]:
    """Seconds from the subscription until all partitions are ours, and until nothing more comes; what was delivered."""
    settings: dict[str, Any] = {
        "streams": {name: Streams(name, shards=PARTITIONS)},
        "reclaim_idle_s": 0.01,
        "reclaim_batch": BATCH,
    }
    async with Onward(url, **settings) as app:
        begun, assigned, delivered = time.monotonic(), 0, 0
        taken_s = last_s = 0.0
        subscription = await app.broker.subscribe([name], group=group, member="bench", ordering="key", start="earliest")
        while messages := await subscription.receive(BATCH, 16 << 20, 2.0):
            assigned += sum(isinstance(each, Assigned) for each in messages)
            delivered += sum(isinstance(each, Delivery) for each in messages)
            last_s = time.monotonic() - begun
            taken_s = taken_s or (last_s if assigned == PARTITIONS else 0.0)
        await subscription.close()
        return taken_s, last_s, delivered
