"""Helpers of the failure suite: an application with one handler, in this process or in another."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from onward import Event, Onward, Retry
from onward.brokers.base import AsideRecord, Filter, State
from onward.testing.scenario import Kit, Process

GROUP = "billing"
QUICK = Retry(attempts=3, first_delay_s=0.05, jitter=0)

Handle = Callable[[str, int], Awaitable[None]]
"""Called with the key and the number of an event."""


class FailureShop:
    """An application with one handler. `done` lists the handled events as (key, n), `tried` all attempts, in order."""

    def __init__(self, kit: Kit, handle: Handle, **options: Any) -> None:
        self.topic = kit.topic
        self.done: list[tuple[str, int]] = []
        self.tried: list[tuple[str, int]] = []
        names = ("retry", "on_dead", "ordering", "start", "concurrency")
        declared: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
        self.app = Onward(kit.harness.url, drain_timeout_s=5.0, **(kit.options | options))

        @self.app.handler(kit.topic, group=GROUP, **({"retry": QUICK} | declared))
        async def bill(value: dict[str, int], event: Event) -> None:
            n, key = value["n"], event.key or ""
            self.tried.append((key, n))
            await handle(key, n)
            self.done.append((key, n))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["FailureShop"]:
        """Run the application until the end of the block."""
        async with self.app:
            running = asyncio.create_task(self.app.run())
            try:
                yield self
            finally:
                self.app.stop()
                await running

    def of(self, key: str) -> list[int]:
        return [n for each, n in self.done if each == key]

    async def records(self, *states: State, limit: int = 10_000) -> list[AsideRecord]:
        where = Filter(states=frozenset(states or State))
        return list((await self.app.broker.aside(GROUP).scan(where, None, limit)).records)


async def publish(kit: Kit, items: Mapping[str, range], **settings: Any) -> None:
    async with Onward(kit.harness.url, **(kit.options | settings)) as app:
        pairs = [(key, {"n": n}) for key, numbers in items.items() for n in numbers]
        await app.publish_many(kit.topic, pairs)


async def until(condition: Callable[[], bool], what: str, within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)


class FailureMember(Process):
    """An application or a replay in its own process; see onward.testing.failure_member."""

    def __init__(self, kit: Kit, task: Mapping[str, Any]) -> None:
        common = {"url": kit.harness.url, "settings": kit.options, "topic": kit.topic, "group": GROUP}
        super().__init__(["-m", "onward.testing.failure_member", json.dumps(common | dict(task))])
        kit.adopt(self)

    async def collect_done(self, done: set[tuple[str, int]], enough: int) -> None:
        """Add the events that it handles to `done`, until it dies or `done` has this many."""
        with contextlib.suppress(AssertionError):  # it has died
            while len(done) < enough:
                line = await self.line(60.0)
                if line["report"] == "done":
                    done.add((line["key"], line["n"]))


async def fine(_: str, __: int) -> None:
    pass


def none_left(shop: FailureShop) -> Callable[[], Awaitable[bool]]:
    return lambda: has_records(shop, 0)


async def has_records(shop: FailureShop, count: int) -> bool:
    return len(await shop.records()) == count


async def has_state(shop: FailureShop, state: State, least: int = 1) -> bool:
    return len(await shop.records(state, limit=least)) == least
