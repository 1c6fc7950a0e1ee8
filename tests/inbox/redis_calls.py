"""A RedisInbox around a handler that records its runs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from onward.event import Delivery
from onward.inbox import Claim, RedisInbox
from onward.inbox.base import Asked
from tests.inbox.place import ground

Handler = Callable[[], Awaitable[None]]


def asked(*, is_async: bool = True) -> Asked:
    engine = "tasks" if is_async else "threads"
    return Asked(name="test", group="billing", engine=engine, is_async=is_async, batch=False, gives=Claim)


@asynccontextmanager
async def started(url: str, **options: Any) -> AsyncIterator[RedisInbox]:
    inbox = RedisInbox(url, **options)
    await inbox.start(ground())
    try:
        yield inbox
    finally:
        await inbox.close()


async def handle(inbox: RedisInbox, work: Delivery, handler: Handler) -> None:
    """Deliver the event once to an `async def` handler."""

    async def run(_: Any, __: Claim) -> None:
        await handler()

    await inbox.around(run, asked())(work)


async def handle_in_thread(inbox: RedisInbox, work: Delivery, handler: Callable[[], None]) -> None:
    """Deliver the event once to a plain `def` handler."""
    call = inbox.around(lambda _, __: handler(), asked(is_async=False))
    await asyncio.to_thread(call, work)
