"""Publishing to RabbitMQ with confirms, compared with aio-pika and with hand-written frames.

All of them publish the same events to exchanges with the same queues behind them: the streams of a topic and one work
queue. Every message is persistent and mandatory.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aio_pika
from aio_pika.abc import AbstractExchange

from bench.amqp_frames import Outgoing, Wire
from bench.amqp_frames import publish as publish_frames
from bench.contestants.lap import looped
from bench.kit import Bench, Pace, child
from bench.publish import report
from bench.rabbitmq_server import (
    TYPE,
    VALUE_BYTES,
    Target,
    declare_group,
    drop,
    left_in,
    orders,
    properties,
)
from bench.workload import PARTITIONS, Item, batches, value
from onward import Onward
from onward.brokers.rabbitmq import names

BATCH = 100
CALLERS = 100
GROUP = "workers"
ONWARD, PIKA, FRAMES = "published-by-onward", "published-by-aio-pika", "published-by-frames"  # topics
SINGLES, PIKA_SINGLES = "singles-of-onward", "singles-of-aio-pika"


def run(bench: Bench, server: Target) -> None:
    for topic in (ONWARD, PIKA, FRAMES, SINGLES, PIKA_SINGLES):
        asyncio.run(declare_group(server.url, topic, GROUP, "none"))
    looped(_batches(bench, server))
    looped(_singles(bench, server))


async def _batches(bench: Bench, server: Target) -> None:
    size, rounds = bench.sized((20_000, 5), (3_000, 2))
    ours, pika, frames = Pace(), Pace(), Pace()
    async with _connected(server, PIKA) as (app, exchange):
        with Wire(server.url) as wire:
            for number, part in enumerate(batches(orders(size * rounds), size), 1):
                bench.say(f"rabbitmq: publish, calls of {BATCH} events, round {number} of {rounds}")
                with ours.timed(size):
                    for batch in batches(part, BATCH):
                        await app.publish_many(ONWARD, batch, type=TYPE)
                with pika.timed(size):
                    for batch in batches(part, BATCH):
                        await asyncio.gather(*[_publish(exchange, item) for item in batch])
                with frames.timed(size):
                    publish_frames(wire, [_outgoing(FRAMES, item) for item in part])
    what = f"RabbitMQ, publish with confirms, calls of {BATCH} events"
    report(bench, what, ours, pika, f"aio-pika, {BATCH} publishes awaited together: {pika}", target=3)
    report(bench, what, ours, frames, f"hand-written frames, up to 2,000 unconfirmed: {frames}")
    _read_back(bench, server, ONWARD, size * rounds)
    _count(bench, server, {ONWARD: size * rounds, PIKA: size * rounds, FRAMES: size * rounds})


async def _singles(bench: Bench, server: Target) -> None:
    each, rounds = bench.sized((100, 5), (20, 2))
    size = CALLERS * each
    ours, pika = Pace(), Pace()
    async with _connected(server, PIKA_SINGLES) as (app, exchange):
        for number in range(rounds):
            bench.say(f"rabbitmq: publish, {CALLERS} callers of single events, round {number + 1} of {rounds}")
            items = [_items(f"c-{caller}", number * each, each) for caller in range(CALLERS)]
            with ours.timed(size):
                await asyncio.gather(*[_caller(app, mine) for mine in items])
            with pika.timed(size):
                await asyncio.gather(*[_pika_caller(exchange, mine) for mine in items])
    what = f"RabbitMQ, publish with confirms, {CALLERS} callers of single events"
    report(bench, what, ours, pika, f"aio-pika, {CALLERS} callers on one channel: {pika}")
    _read_back(bench, server, SINGLES, size * rounds)
    _count(bench, server, {SINGLES: size * rounds, PIKA_SINGLES: size * rounds})


@asynccontextmanager
async def _connected(server: Target, topic: str) -> AsyncIterator[tuple[Onward, AbstractExchange]]:
    """Onward, and an exchange of aio-pika with its channel in confirm mode."""
    async with Onward(server.url, partitions=PARTITIONS) as app, await aio_pika.connect(server.url) as connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        yield app, await channel.get_exchange(names.exchange(topic))


def _key(item: Item) -> str:
    """The routing key. It begins with the number of the stream, as Onward's own do."""
    return f"{int(item[0].removeprefix('c-')) % PARTITIONS}.{TYPE}"


async def _publish(exchange: AbstractExchange, item: Item) -> None:
    key, data = item
    message = aio_pika.Message(
        data,
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        headers={"onward-key": key},
        message_id=f"{key}-of-a-bench-with-36-characters"[:36],
        type=TYPE,
    )
    await exchange.publish(message, _key(item), mandatory=True)


def _outgoing(topic: str, item: Item) -> Outgoing:
    return Outgoing(names.exchange(topic), _key(item), properties(item[0]), item[1])


def _items(key: str, first: int, count: int) -> list[Item]:
    return [(key, value(key, number, VALUE_BYTES)) for number in range(first, first + count)]


async def _caller(app: Onward, items: Sequence[Item]) -> None:
    for key, data in items:
        await app.publish(SINGLES, data, key=key, type=TYPE)


async def _pika_caller(exchange: AbstractExchange, items: Sequence[Item]) -> None:
    for item in items:
        await _publish(exchange, item)


def _read_back(bench: Bench, server: Target, topic: str, events: int) -> None:
    """Check that every event that publish returned for reaches a handler, in the order of its key."""
    bench.say(f"rabbitmq: reading back {events:,} events")
    where = {"url": server.url, "topic": topic, "group": "reader"}
    ran = child("bench.contestants.server_app", bench.folder, events=events, **where)
    bench.judge(f"RabbitMQ, {topic}", ran.verdict)


def _count(bench: Bench, server: Target, topics: dict[str, int]) -> None:
    """Check that the work queue of each topic has exactly what was published, and remove the topics."""
    for topic, events in topics.items():
        found = left_in(server, names.work_queue(topic, GROUP))
        bench.check(f"RabbitMQ, {topic}, in the work queue", found == events, f"{found:,} of {events:,}")
        drop(server, topic)
