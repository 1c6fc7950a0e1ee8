"""Asides on a real server, without members: owners and operators that a test drives by hand."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from onward.brokers.base import AsideRecord
from onward.brokers.core.folded_aside import BodyRoom
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.amqp import Connection, Outbound, Properties, encoded_properties
from onward.brokers.rabbitmq.aside.aside_entries import AsidePlace
from onward.brokers.rabbitmq.aside.aside_log import AsideStream
from onward.brokers.rabbitmq.aside.aside_reader import AsideSource
from onward.brokers.rabbitmq.aside.aside_writing import EntryChannel
from onward.brokers.rabbitmq.connecting import connected
from onward.brokers.rabbitmq.names import Place
from onward.settings import load
from tests.servers.rabbitmq import RabbitMQServer

PLACE = AsidePlace("orders", "g", 2)


class KnownGenerations:
    """A registry that all of a test know."""

    def __init__(self) -> None:
        self.generations: dict[AsidePlace, int] = {}

    def generation(self, topic: str, group: str, place: Place) -> int:
        return self.generations.get(AsidePlace(topic, group, place), 0)

    def fence_floor(self, topic: str, group: str) -> int:
        return 0

    async def catch_up(self) -> None:
        await asyncio.sleep(0)

    async def set_generation(self, topic: str, group: str, place: Place, generation: int) -> None:
        where = AsidePlace(topic, group, place)
        self.generations[where] = max(generation, self.generations.get(where, 0))


class AsideStage:
    """`connection` is shared by all; `connect` opens another one."""

    def __init__(self, url: str, connection: Connection) -> None:
        self.url = url
        self.connection = connection
        self.registry = KnownGenerations()
        self._connections = [connection]
        self._streams: list[AsideStream] = []

    async def connect(self) -> Connection:
        self._connections.append(await open_connection(self.url))
        return self._connections[-1]

    def aside(
        self,
        connection: Connection | None = None,
        *,
        place: AsidePlace = PLACE,
        room: int = 1 << 20,
        keeps_rows: bool = True,
    ) -> AsideStream:
        via = connection or self.connection
        source = AsideSource(via, self.registry, place, BodyRoom(room), asyncio.Lock(), keeps_rows)
        self._streams.append(AsideStream(source, EntryChannel(via)))
        return self._streams[-1]

    async def owner(self, fence: int, **options: Any) -> AsideStream:
        aside = self.aside(**options)
        await aside.claim(fence)
        return aside

    async def operator(self, **options: Any) -> AsideStream:
        """Read from the beginning up to now."""
        aside = self.aside(**options)
        await aside.follow()
        await aside.catch_up()
        return aside

    async def publish(self, generation: int, bodies: Iterable[bytes]) -> None:
        """Write into the stream as another program."""
        channel = await self.connection.channel()
        stream = names.aside_stream(*PLACE, generation)
        properties = encoded_properties(Properties(delivery_mode=2))
        assert not any(await channel.publish([Outbound("", stream, properties, body) for body in bodies]))
        await channel.close()

    async def close(self) -> None:
        for aside in self._streams:
            await aside.close()
        for connection in self._connections:
            await connection.close()


async def all_records(aside: AsideStream) -> list[AsideRecord]:
    return await aside.records(list(aside.table.above(-1)))


async def open_connection(url: str) -> Connection:
    settings = load(url)
    return await connected(RabbitAddress.of(settings.url, settings), name="test", patience_s=5.0)


@asynccontextmanager
async def staged(server: RabbitMQServer) -> AsyncIterator[AsideStage]:
    with server.vhost() as vhost:
        url = server.url_of(vhost)
        stage = AsideStage(url, await open_connection(url))
        try:
            yield stage
        finally:
            await stage.close()
