"""Publishing to Redis, compared with redis-py: pipelines of XADD, and single XADDs by concurrent callers.

The bare entries have the fields of an event: id, key, time and value.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis as AsyncRedis
from tests.servers.redis import RedisServer

from bench.contestants.lap import looped
from bench.kit import Bench, Pace, child
from bench.publish import report
from bench.redis_server import PARTITIONS, VALUE_BYTES, orders, streams
from bench.workload import Item, batches, value
from onward import Onward
from onward.event import new_id

BATCH = 100
CALLERS = 100
BATCHES, SINGLES = "published-in-batches", "published-one-by-one"

Entry = tuple[str, str, str, float, bytes]  # stream, id, key, time and value


def run(bench: Bench, server: RedisServer) -> None:
    looped(_batches(bench, server))
    looped(_singles(bench, server))


async def _batches(bench: Bench, server: RedisServer) -> None:
    size, rounds = bench.sized((20_000, 7), (5_000, 3))
    ours, awaited, blocking = Pace(), Pace(), Pace()
    async with _connected(server) as (app, client):
        await app.publish_many(BATCHES, [("warm-up", value("warm-up", 0, VALUE_BYTES))])
        with server.client() as blocking_client:
            for number, part in enumerate(batches(orders(size * rounds), size), 1):
                bench.say(f"redis: publish, calls of {BATCH} events, round {number} of {rounds}")
                with ours.timed(size):
                    for batch in batches(part, BATCH):
                        await app.publish_many(BATCHES, batch)
                entries = [_entry("bare-batches", item) for item in part]
                with awaited.timed(size):
                    for chunk in batches(entries, BATCH):
                        await _pipelined(client, chunk).execute()
                with blocking.timed(size):
                    for chunk in batches(entries, BATCH):
                        _pipelined(blocking_client, chunk).execute()
    what = f"Redis, publish, calls of {BATCH} events"
    report(bench, what, ours, awaited, f"redis.asyncio, pipeline of {BATCH} XADD: {awaited}", target=2)
    report(bench, what, ours, blocking, f"redis-py without asyncio, pipeline of {BATCH} XADD: {blocking}")
    _read_back(bench, server, BATCHES, size * rounds + 1)


async def _singles(bench: Bench, server: RedisServer) -> None:
    each, rounds = bench.sized((100, 5), (20, 3))
    size = CALLERS * each
    ours, bare = Pace(), Pace()
    async with _connected(server) as (app, client):
        for number in range(rounds):
            bench.say(f"redis: publish, {CALLERS} callers of single events, round {number + 1} of {rounds}")
            items = [_items(f"c-{caller}", number * each, each) for caller in range(CALLERS)]
            entries = [[_entry("bare-singles", item) for item in mine] for mine in items]
            with ours.timed(size):
                await asyncio.gather(*[_caller(app, mine) for mine in items])
            with bare.timed(size):
                await asyncio.gather(*[_bare_caller(client, mine) for mine in entries])
    beside = f"redis.asyncio, {CALLERS} callers of XADD: {bare}"
    report(bench, f"Redis, publish, {CALLERS} callers of single events", ours, bare, beside)
    _read_back(bench, server, SINGLES, size * rounds)


@asynccontextmanager
async def _connected(server: RedisServer) -> AsyncIterator[tuple[Onward, Any]]:
    async with (
        Onward(server.url, partitions=PARTITIONS) as app,
        AsyncRedis.from_url(server.url, max_connections=CALLERS) as client,
    ):
        yield app, client


def _entry(name: str, item: Item) -> Entry:
    key, data = item
    stream = streams(name)[int(key.removeprefix("c-")) % PARTITIONS]
    return stream, new_id(), key, time.time(), data


def _pipelined(client: Any, entries: Sequence[Entry]) -> Any:
    pipe = client.pipeline(transaction=False)
    for stream, id_, key, at, data in entries:
        pipe.xadd(stream, {"id": id_, "key": key, "time": at, "data": data})
    return pipe


def _items(key: str, first: int, count: int) -> list[Item]:
    return [(key, value(key, number, VALUE_BYTES)) for number in range(first, first + count)]


async def _caller(app: Onward, items: Sequence[Item]) -> None:
    for key, data in items:
        await app.publish(SINGLES, data, key=key)


async def _bare_caller(client: Any, entries: Sequence[Entry]) -> None:
    for stream, id_, key, at, data in entries:
        await client.xadd(stream, {"id": id_, "key": key, "time": at, "data": data})


def _read_back(bench: Bench, server: RedisServer, topic: str, events: int) -> None:
    """Check that every event that publish returned for reaches a handler, in the order of its key."""
    bench.say(f"redis: reading back {events:,} events")
    arguments: dict[str, Any] = {"url": server.url, "topic": topic, "group": "reader", "events": events}
    bench.judge(f"Redis, {topic}", child("bench.contestants.server_app", bench.folder, **arguments).verdict)
