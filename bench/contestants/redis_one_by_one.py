"""A usual consumer group in asyncio: it reads up to 100 entries, and acknowledges each one after its handler."""

from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import Order

COUNT = 100


def run(url: str, streams: Sequence[str], group: str, events: int) -> Ran:
    lap = Lap(events)
    looped(_run(url, streams, group, lap))
    return lap.ran()


async def _run(url: str, streams: Sequence[str], group: str, lap: Lap) -> None:
    decode = msgspec.json.Decoder(Order).decode

    async def handle(data: bytes) -> None:
        order = decode(data)
        lap.saw(order.customer, order.number)

    client: Any
    async with Redis.from_url(url) as client:
        for stream in streams:
            await client.xgroup_create(stream, group, id="0")
        while found := await client.xreadgroup(group, "one-by-one", dict.fromkeys(streams, ">"), count=COUNT):
            for stream, entries in found:
                for id_, fields in entries:
                    await handle(fields[b"data"])
                    await client.xack(stream, group, id_)
