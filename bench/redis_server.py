"""A real Redis of the tests, with an append-only file that is synced every second, and the events in it."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.servers.redis import RedisServer

from bench.contestants import redis_faststream, redis_taskiq
from bench.workload import Item, batches, items
from onward import Onward

PARTITIONS = 4
KEYS = 1_000
VALUE_BYTES = 200
DURABILITY = ("--appendfsync", "everysec", "--auto-aof-rewrite-percentage", "0")  # a rewrite would disturb one of them


@contextmanager
def redis() -> Iterator[RedisServer]:
    server = RedisServer(*DURABILITY)
    try:
        server.start()
        yield server
    finally:
        server.close()


def orders(events: int) -> Iterator[Item]:
    return items(events, keys=KEYS, value_bytes=VALUE_BYTES)


def streams(name: str) -> list[str]:
    return [f"{name}:{index}" for index in range(PARTITIONS)]


def placed(name: str, events: int) -> Iterator[tuple[str, Item]]:
    """Each event with its stream: a customer's events are in one."""
    names = streams(name)
    for item in orders(events):
        yield names[int(item[0].removeprefix("c-")) % PARTITIONS], item


def fill(server: RedisServer, topic: str, events: int) -> str:
    """Publish them with Onward."""
    asyncio.run(_fill(server.url, topic, events))
    return topic


async def _fill(url: str, topic: str, events: int) -> None:
    async with Onward(url, partitions=PARTITIONS) as app:
        for batch in batches(orders(events), 1_000):
            await app.publish_many(topic, batch)


def fill_plain(server: RedisServer, name: str, events: int) -> list[str]:
    """The same events in plain streams: an entry has one field, the JSON."""
    with server.client() as client:
        for batch in batches(placed(name, events), 1_000):
            pipe = client.pipeline(transaction=False)
            for stream, (_, data) in batch:
                pipe.xadd(stream, {"data": data})
            pipe.execute()
    return streams(name)


def fill_faststream(server: RedisServer, name: str, events: int) -> list[str]:
    redis_faststream.fill(server.url, placed(name, events))
    return streams(name)


def fill_taskiq(server: RedisServer, name: str, events: int) -> list[str]:
    redis_taskiq.fill(server.url, placed(name, events))
    return streams(name)


def pending(server: RedisServer, names: Iterable[str], group: str) -> int:
    """How many entries a consumer group was given and has not acknowledged."""
    with server.client() as client:
        return sum(client.xpending(name, group)["pending"] for name in names)


async def unsettled(server: RedisServer, topic: str, group: str) -> list[int]:
    """The partitions in which the group has not settled all events."""
    async with Onward(server.url) as app:
        (found,) = [info for info in await app.broker.groups(topic) if info.group == group]
    return [index for index, each in found.partitions.items() if each.end is None or each.watermark < each.end]
