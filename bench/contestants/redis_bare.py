"""The limit on Redis: a bare redis-py loop that reads 1,000 entries, handles each, and acknowledges 1,000."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from redis import Redis

from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import Order

COUNT = 1_000


def run(url: str, streams: Sequence[str], group: str, events: int) -> Ran:
    lap = Lap(events)

    async def handle(order: Order) -> None:
        lap.saw(order.customer, order.number)

    with Redis.from_url(url) as client:
        for stream in streams:
            client.xgroup_create(stream, group, id="0")
        looped(_read(client, streams, group, handle))
    return lap.ran()


async def _read(client: Any, streams: Sequence[str], group: str, handle: Callable[[Order], Awaitable[None]]) -> None:
    """Read the streams in turn, until all of them are empty."""
    orders = msgspec.json.Decoder(Order)
    left = list(streams)
    while left:
        for stream in tuple(left):
            found = client.xreadgroup(group, "bare", {stream: ">"}, count=COUNT)
            if not found:
                left.remove(stream)
                continue
            entries = found[0][1]
            for _, fields in entries:
                await handle(orders.decode(fields[b"data"]))
            client.xack(stream, group, *[id_ for id_, _ in entries])
