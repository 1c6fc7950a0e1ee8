"""What the tests of the Redis broker share: brokers and members on a real server, which may be one of their own."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import uuid4

from redis import Redis

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Broker
from onward.brokers.redis.keys import PartitionKeys
from onward.event import Event, Partition
from onward.testing.scenario import LEASE_S, Member, event
from tests.servers.redis import RedisServer


class Stage:
    """A topic on a server, of one partition by default."""

    def __init__(self, url: str, client: Redis, **options: Any) -> None:
        self.url = url
        self.client = client
        self.options = {"lease_s": LEASE_S, "takeover_grace_s": 0.1, "partitions": 1, **options}
        self.topic = f"trap-{uuid4().hex[:8]}"
        self.group = "group"
        self._brokers: list[Broker] = []

    @property
    def keys(self) -> PartitionKeys:
        """Of its first partition."""
        return PartitionKeys.own(Partition(self.topic, 0))

    @property
    def length(self) -> int:
        """Events in the first partition."""
        length: Any = self.client.xlen(self.keys.stream)
        return int(length)

    async def broker(self, url: str | None = None, **options: Any) -> Broker:
        broker = await open_broker(settings.load(url or self.url, **(self.options | options)))
        self._brokers.append(broker)
        return broker

    async def member(self, broker: Broker | None = None, **options: Any) -> Member:
        return await Member.join(broker or await self.broker(), self.topic, self.group, **options)

    def events(self, count: int, start: int = 0, keys: int = 1) -> list[Event]:
        return [event(self.topic, f"key-{n % keys}", n) for n in range(start, start + count)]

    async def close(self) -> None:
        for broker in self._brokers:
            await broker.close()


@asynccontextmanager
async def staged(server: RedisServer, *, url: str | None = None, **options: Any) -> AsyncIterator[Stage]:
    with server.client() as client:
        stage = Stage(url or server.url, client, **options)
        try:
            async with asyncio.timeout(100):
                yield stage
        finally:
            await stage.close()


@contextmanager
def own_server(*options: str, password: str | None = None) -> Iterator[RedisServer]:
    """For what must not happen to the server of the other tests."""
    server = RedisServer(*options, password=password)
    try:
        server.start()
        yield server
    finally:
        server.close()


def now_ms(stage: Stage) -> int:
    seconds, micros = stage.client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def set_id(stage: Stage, last_id: str) -> None:
    """Of the first partition's stream: the last id that it has given."""
    client: Any = stage.client
    client.execute_command("XSETID", stage.keys.stream, last_id)


async def until(condition: Callable[[], bool], within_s: float = 45.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)
