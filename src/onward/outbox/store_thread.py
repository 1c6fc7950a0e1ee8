"""Runs the calls of a store in a thread of its own, so that a slow database does not block the event loop."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from onward.outbox.base import OutboxStore

P = ParamSpec("P")
T = TypeVar("T")


class StoreThread:
    def __init__(self, store: OutboxStore, name: str) -> None:
        self.store = store
        self._calls = ThreadPoolExecutor(1, f"onward-{name}")
        self._waits = ThreadPoolExecutor(1, f"onward-{name}-bell")
        self._waiting: asyncio.Future[None] | None = None

    async def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a method of the store. If the caller is cancelled, the call still runs to its end."""
        work = functools.partial(method, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._calls, work)

    async def rung(self, timeout_s: float) -> None:
        """Return when the store's bell rings, or after the time."""
        if self._waiting is None or self._waiting.done():  # a cancelled wait goes on in its thread
            self._waiting = asyncio.get_running_loop().run_in_executor(self._waits, self.store.wait, timeout_s)
        await asyncio.wait([self._waiting], timeout=timeout_s)

    async def close(self) -> None:
        """Disconnect, after the calls that have begun."""
        await self.run(self.store.close)

    def end(self) -> None:
        """End the threads. Call it after `close`."""
        self._calls.shutdown(wait=False)
        self._waits.shutdown(wait=False)
