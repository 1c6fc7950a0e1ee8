"""Handlers on exchanges and queues of other programs, which publish plain messages."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import aio_pika
import pytest

from onward import Event, Onward, Retry
from onward.brokers.base import Filter, State
from onward.brokers.rabbitmq import Binding, Exchange, Queue
from onward.brokers.rabbitmq.amqp import Channel, Outbound, properties_of
from onward.errors import BadSetting
from onward.testing.failure_shop import eventually, until
from tests.brokers.rabbitmq.stage import played
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

EXCHANGE, QUEUE, KEY = "shop.orders", "shop.billing", "order.placed"
RETRY = Retry(attempts=3, first_delay_s=0.2, factor=1, jitter=0)
BINDING_KEYS = {"direct": KEY, "topic": "order.*", "fanout": ""}
DEAD_LETTERS: dict[str, Any] = {"dead_letter_exchange": "shop.rejected", "dead_letter_key": "billing"}


class Foreign(NamedTuple):
    """What another program has declared."""

    server: RabbitMQServer
    vhost: str
    exchange: Exchange
    queue: Queue

    @property
    def url(self) -> str:
        return self.server.url_of(self.vhost)

    @property
    def objects(self) -> list[object]:
        rejected = [
            Exchange("shop.rejected", "direct"),
            Queue("shop.rejects"),
            Binding("shop.rejected", "shop.rejects", "billing"),
        ]
        bound = Binding(self.exchange.name, self.queue.name, BINDING_KEYS[self.exchange.kind])
        return [self.exchange, *rejected, self.queue, bound]

    def seen(self) -> tuple[Any, ...]:
        """The queue and its bindings, as the server has them."""
        found = self.server.queues(self.vhost)[self.queue.name]
        path = f"/api/queues/{quote(self.vhost, safe='')}/{quote(self.queue.name, safe='')}/bindings"
        bindings = sorted((each["source"], each["routing_key"]) for each in self.server.ask("GET", path))
        return found["type"], found["arguments"], found["durable"], found["auto_delete"], bindings

    def count(self, queue: str) -> int:
        """How many messages it has."""
        found = self.server.ask("GET", f"/api/queues/{quote(self.vhost, safe='')}/{quote(queue, safe='')}")
        return int(found.get("messages", 0))

    async def publish(self, numbers: Sequence[int], key: str = KEY) -> None:
        """As another program does: no message has an id, a type or headers."""
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            exchange = await channel.get_exchange(self.exchange.name)
            for n in numbers:
                message = aio_pika.Message(json.dumps({"n": n}).encode(), content_type="application/json")
                await exchange.publish(message, key, mandatory=True)


class Shop:
    """An application with a handler on the foreign queue. `broken`: the numbers that fail."""

    def __init__(self, foreign: Foreign, broken: Sequence[int] = ()) -> None:
        self.app = Onward(foreign.url, lease_s=2.0, drain_timeout_s=5.0)
        self.app.topology(*foreign.objects)
        self.broken = set(broken)
        self.tried: Counter[int] = Counter()
        self.types: dict[int, str] = {}
        self.done: list[int] = []

        @self.app.handler(foreign.exchange.name, group=foreign.queue.name, ordering="none", retry=RETRY)
        async def bill(order: dict[str, int], event: Event) -> None:
            n = order["n"]
            self.tried[n] += 1
            self.types[n] = event.type
            if n in self.broken:
                raise ValueError(f"no stock for {n}")
            self.done.append(n)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Shop"]:
        async with self.app:
            running = asyncio.create_task(self.app.run())
            try:
                await until(lambda: self.app.health().ready, "the application is ready")
                yield self
            finally:
                self.app.stop()
                await running

    async def has_dead(self, count: int) -> bool:
        where = Filter(states=frozenset({State.DEAD}))
        return len((await self.app.broker.aside(QUEUE).scan(where, None, 100)).records) == count


@pytest.fixture
def vhost(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as vhost:
        yield vhost


@pytest.fixture(
    params=[
        ("direct", Queue(QUEUE)),
        ("topic", Queue(QUEUE, **DEAD_LETTERS)),
        ("fanout", Queue(QUEUE, "classic")),
        ("topic", Queue(QUEUE, "classic", **DEAD_LETTERS)),
    ],
    ids=["direct-quorum", "topic-quorum-dlx", "fanout-classic", "topic-classic-dlx"],
)
def foreign(rabbitmq_server: RabbitMQServer, vhost: str, request: pytest.FixtureRequest) -> Foreign:
    kind, queue = request.param
    return Foreign(rabbitmq_server, vhost, Exchange(EXCHANGE, kind), queue)


@played
async def test_plain_messages_are_handled_retried_and_replayed_in_their_own_queue(foreign: Foreign) -> None:
    shop = Shop(foreign, broken=[3])
    async with shop.app:  # creates the objects, as the other program would
        before = foreign.seen()
    await foreign.publish(range(5))
    shop = Shop(foreign, broken=[3])
    async with shop.open():
        await foreign.publish(range(5, 10))
        await eventually(lambda: shop.has_dead(1), "the event is a dead letter")
        await until(lambda: len(shop.done) == 9, "all others are handled")
        assert shop.tried == Counter(range(10)) + Counter({3: 2})
        assert set(shop.types.values()) == {KEY}
        shop.broken.clear()
        replayed = await shop.app.dead.replay()
        assert (replayed.replayed, replayed.failed, replayed.left) == (1, 0, 0)
        await until(lambda: 3 in shop.done, "the replay is handled")
        assert shop.types[3] == KEY
        await eventually(lambda: shop.has_dead(0), "its record is removed")
    assert sorted(shop.done) == list(range(10))
    assert foreign.seen() == before
    assert await asyncio.to_thread(foreign.count, "shop.rejects") == 0, "nothing took the route of rejected messages"


@played
async def test_a_replayed_message_has_all_its_properties(foreign: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Outbound] = []
    send = Channel.send

    def noting(channel: Channel, messages: Sequence[Outbound]) -> int:
        sent.extend([each for each in messages if each.routing_key == QUEUE])
        return send(channel, messages)

    monkeypatch.setattr(Channel, "send", noting)
    shop = Shop(foreign, broken=[1])
    async with shop.open():
        async with await aio_pika.connect(foreign.url) as connection:
            channel = await connection.channel()
            exchange = await channel.get_exchange(EXCHANGE)
            names: dict[str, Any] = {
                "correlation_id": "c",
                "reply_to": "r",
                "priority": 5,
                "app_id": "shop",
                "message_id": "m-1",
            }
            headers: dict[str, Any] = {"tenant": "a", "number": 7}
            await exchange.publish(aio_pika.Message(b'{"n": 1}', headers=headers, **names), KEY)
        await eventually(lambda: shop.has_dead(1), "the event is a dead letter")
        sent.clear()
        shop.broken.clear()
        await shop.app.dead.replay()
        await until(lambda: shop.done == [1], "the replay is handled")
    found = properties_of(sent[-1].properties)
    assert names == {name: getattr(found, name) for name in names}
    assert found.headers is not None
    assert {name: found.headers.get(name) for name in ("tenant", "number")} == {"tenant": "a", "number": 7}


@played
async def test_a_replay_goes_only_to_the_queue_of_its_group(foreign: Foreign) -> None:
    """Another queue that is bound to the same exchange gets each message once."""
    shop = Shop(foreign, broken=[1])
    key = BINDING_KEYS[foreign.exchange.kind]
    shop.app.topology(Queue("shop.audit"), Binding(EXCHANGE, "shop.audit", key))
    async with shop.open():
        await foreign.publish([1])
        await eventually(lambda: shop.has_dead(1), "the event is a dead letter")
        shop.broken.clear()
        await shop.app.dead.replay()
        await until(lambda: shop.done == [1], "the replay is handled")
    async with await aio_pika.connect(foreign.url) as connection:
        audit = await (await connection.channel()).declare_queue("shop.audit", passive=True)
    assert audit.declaration_result.message_count == 1


@played
async def test_operators_find_the_group_and_its_dead_letters_without_the_application(foreign: Foreign) -> None:
    shop = Shop(foreign, broken=[1])
    async with shop.open():
        await foreign.publish([1])
        await eventually(lambda: shop.has_dead(1), "the event is a dead letter")
    async with Onward(foreign.url) as operator:
        assert [spec.name for spec in await operator.broker.topics()] == [EXCHANGE]
        assert [info.group for info in await operator.broker.groups(EXCHANGE)] == [QUEUE]
        letters = [letter async for letter in operator.dead.export(group=QUEUE)]
    assert len(letters) == 1


@played
async def test_an_exchange_cannot_be_read_in_order_or_shown(foreign: Foreign) -> None:
    async with Shop(foreign).app as app:
        with pytest.raises(BadSetting, match="`onward tail` cannot show it"):
            await app.broker.subscribe([EXCHANGE], group="tail", member="m", ordering="partition", start="latest")


@played
async def test_dropping_the_group_leaves_the_queue_and_its_messages(foreign: Foreign) -> None:
    shop = Shop(foreign, broken=[0])
    async with shop.open():
        await foreign.publish([0])
        await eventually(lambda: shop.has_dead(1), "the event is a dead letter")
        before = foreign.seen()
    await foreign.publish([1, 2])
    async with Onward(foreign.url) as operator:
        await operator.broker.drop_group(EXCHANGE, QUEUE)
        assert not await operator.broker.groups(EXCHANGE)
        assert not (await operator.broker.aside(QUEUE).scan(Filter(), None, 10)).records
    assert foreign.seen() == before
    names = await asyncio.to_thread(foreign.server.queues, foreign.vhost)
    assert not [each for each in names if each.startswith(f"onward.{EXCHANGE}")]
    again = Shop(foreign)
    async with again.open():
        await until(lambda: sorted(again.done) == [1, 2], "the messages are still there")


@played
async def test_a_crash_of_the_connection_loses_and_charges_nothing(foreign: Foreign) -> None:
    """A classic queue does not count how often a message came back, so such messages run alone once."""
    shop = Shop(foreign)
    async with shop.open():
        for first in (0, 20):
            await foreign.publish(range(first, first + 20))
            await asyncio.to_thread(foreign.server.close_connections, foreign.vhost)
        await until(lambda: set(shop.done) == set(range(40)), "all messages are handled")
        assert await shop.has_dead(0)
