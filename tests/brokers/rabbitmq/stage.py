"""What the tests of the RabbitMQ broker share: async tests, waiting, and what a broker is built on."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

from onward import settings
from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.ground import RabbitGround

P = ParamSpec("P")
LIMIT_S = 100.0


def played(function: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of an async function, with a time limit."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await function(*args, **kwargs)

        asyncio.run(limited())

    return run


async def until(condition: Callable[[], object], within_s: float = 45.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@asynccontextmanager
async def grounded(url: str, **options: Any) -> AsyncIterator[RabbitGround]:
    """What a broker is built on, with its registry open."""
    loaded = settings.load(url, **options)
    ground = RabbitGround(RabbitAddress.of(loaded.url, loaded), loaded)
    try:
        await ground.io.run(ground.registry.open())
        yield ground
    finally:
        await ground.io.run(ground.close())
        await ground.io.close()
