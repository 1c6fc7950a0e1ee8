"""Publishing to RabbitMQ with confirms, compared with aio-pika and with hand-written frames.

All of them publish the same events, persistent and mandatory, each to an exchange of its own with the same queues
behind it: a topic of Onward with its streams and one work queue, or a declared exchange with one quorum queue.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    message_id,
    orders,
    properties,
)
from bench.workload import PARTITIONS, Item, batches, value
from onward import Onward
from onward.brokers.rabbitmq import Binding, Exchange, Queue, names

BATCH = 100
CALLERS = 100
GROUP = "workers"
PUBLISHERS = ("onward", "aio-pika", "frames")


class Place(NamedTuple):
    """Where one contestant publishes. `queue` gets every event."""

    topic: str
    exchange: str
    queue: str
    has_streams: bool

    def routing_key(self, key: str) -> str:
        """With streams it begins with the number of one, as Onward's own does."""
        return f"{int(key.removeprefix('c-')) % PARTITIONS}.{TYPE}" if self.has_streams else TYPE


def run(bench: Bench, server: Target) -> None:
    topics = [_topic(server, f"batches-of-{name}") for name in PUBLISHERS]
    behind = f"{PARTITIONS} streams and a work queue"
    _judge(bench, server, topics, looped(_batches(bench, server, behind, Onward(server.url), topics)))
    app = Onward(server.url)
    exchanges = [_exchange(app, f"exchange-of-{name}") for name in PUBLISHERS]
    _judge(bench, server, exchanges, looped(_batches(bench, server, "one quorum queue", app, exchanges)))
    topics = [_topic(server, f"singles-of-{name}") for name in PUBLISHERS[:2]]
    _judge(bench, server, topics, looped(_singles(bench, server, topics)))


def _topic(server: Target, name: str) -> Place:
    asyncio.run(declare_group(server.url, name, GROUP, "none"))
    return Place(name, names.exchange(name), names.work_queue(name, GROUP), has_streams=True)


def _exchange(app: Onward, name: str) -> Place:
    """It is created when the application opens."""
    app.topology(Exchange(name), Queue(name), Binding(name, name, "#"))
    return Place(name, name, name, has_streams=False)


async def _batches(bench: Bench, server: Target, behind: str, app: Onward, places: Sequence[Place]) -> int:
    """Return how many events each of them has published."""
    size, rounds = bench.sized((20_000, 5), (3_000, 2))
    ours, pika, frames = Pace(), Pace(), Pace()
    mine, for_pika, for_frames = places
    async with app, await aio_pika.connect(server.url) as connection:
        exchange = await _opened(connection, for_pika)
        with Wire(server.url) as wire:
            for number, part in enumerate(batches(orders(size * rounds), size), 1):
                bench.say(f"rabbitmq: publish to {behind}, calls of {BATCH} events, round {number} of {rounds}")
                with ours.timed(size):
                    for batch in batches(part, BATCH):
                        await app.publish_many(mine.topic, batch, type=TYPE)
                with pika.timed(size):
                    for batch in batches(part, BATCH):
                        await asyncio.gather(*[_publish(exchange, for_pika, item) for item in batch])
                with frames.timed(size):
                    publish_frames(wire, [_outgoing(for_frames, item) for item in part])
    what = f"RabbitMQ, publish with confirms to {behind}, calls of {BATCH} events"
    report(bench, what, ours, pika, f"aio-pika, {BATCH} publishes awaited together: {pika}", target=3)
    report(bench, what, ours, frames, f"hand-written frames, up to 2,000 unconfirmed: {frames}")
    return size * rounds


async def _singles(bench: Bench, server: Target, places: Sequence[Place]) -> int:
    each, rounds = bench.sized((100, 5), (20, 2))
    size = CALLERS * each
    ours, pika = Pace(), Pace()
    mine, for_pika = places
    async with Onward(server.url) as app, await aio_pika.connect(server.url) as connection:
        exchange = await _opened(connection, for_pika)
        for number in range(rounds):
            bench.say(f"rabbitmq: publish, {CALLERS} callers of single events, round {number + 1} of {rounds}")
            items = [_items(f"c-{caller}", number * each, each) for caller in range(CALLERS)]
            with ours.timed(size):
                await asyncio.gather(*[_caller(app, mine, part) for part in items])
            with pika.timed(size):
                await asyncio.gather(*[_pika_caller(exchange, for_pika, part) for part in items])
    what = f"RabbitMQ, publish with confirms, {CALLERS} callers of single events"
    report(bench, what, ours, pika, f"aio-pika, {CALLERS} callers on one channel: {pika}")
    return size * rounds


async def _opened(connection: Any, place: Place) -> AbstractExchange:
    """An exchange of aio-pika, in confirm mode."""
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    exchange: AbstractExchange = await channel.get_exchange(place.exchange)
    return exchange


async def _publish(exchange: AbstractExchange, place: Place, item: Item) -> None:
    key, data = item
    message = aio_pika.Message(
        data,
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        headers={"onward-key": key},
        message_id=message_id(key),
        type=TYPE,
    )
    await exchange.publish(message, place.routing_key(key), mandatory=True)


def _outgoing(place: Place, item: Item) -> Outgoing:
    key, data = item
    return Outgoing(place.exchange, place.routing_key(key), properties(key), data)


def _items(key: str, first: int, count: int) -> list[Item]:
    return [(key, value(key, number, VALUE_BYTES)) for number in range(first, first + count)]


async def _caller(app: Onward, place: Place, items: Sequence[Item]) -> None:
    for key, data in items:
        await app.publish(place.topic, data, key=key, type=TYPE)


async def _pika_caller(exchange: AbstractExchange, place: Place, items: Sequence[Item]) -> None:
    for item in items:
        await _publish(exchange, place, item)


def _judge(bench: Bench, server: Target, places: Sequence[Place], events: int) -> None:
    """Check that every queue has exactly what was published, and that the streams have it in the order of each key."""
    for place in places:
        found = left_in(server, place.queue)
        bench.check(f"RabbitMQ, {place.topic}, in its queue", found == events, f"{found:,} of {events:,}")
    mine = places[0]
    if mine.has_streams:
        bench.say(f"rabbitmq: reading back {events:,} events")
        where = {"url": server.url, "topic": mine.topic, "group": "reader"}
        ran = child("bench.contestants.server_app", bench.folder, events=events, **where)
        bench.judge(f"RabbitMQ, {mine.topic}", ran.verdict)
        for place in places:
            drop(server, place.topic)
