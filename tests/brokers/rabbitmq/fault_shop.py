"""An application under faults: it publishes numbered events, handles them, and knows which must have been handled."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from onward import Event, GiveUp, Onward, Retry
from onward.brokers.base import AsideRecord, Filter, State
from onward.errors import PublishError
from onward.testing.scenario import event

TOPIC, GROUP = "orders", "billing"
KEYS = 5
KINDS: dict[str, dict[str, Any]] = {"ordered": {"ordering": "key"}, "work": {"ordering": "none", "start": "latest"}}
QUICK = Retry(attempts=5, first_delay_s=0.3, factor=1, jitter=0)
SETTINGS: dict[str, Any] = {
    "partitions": 2,
    "lease_s": 2.0,
    "takeover_grace_s": 0.2,
    "publish_timeout_s": 15.0,
    "drain_timeout_s": 5.0,
    "client": {"heartbeat_s": 2},
}


def no_failure(_: int) -> str:
    return "fine"


def some_fail(n: int) -> str:
    """Every seventh event succeeds at its second attempt, and every tenth never does."""
    return "never" if n % 10 == 9 else "later" if n % 7 == 3 else "fine"


def rarely_fail(n: int) -> str:
    """The same, for so many events that their keys cannot wait so often."""
    return "never" if n % 101 == 9 else "later" if n % 61 == 3 else "fine"


class FaultShop:
    """`runs`: the handled events, in order. `ends(n)`: how event number n ends: fine, later or never."""

    keys = KEYS

    def __init__(self, url: str, kind: str, ends: Callable[[int], str] = no_failure, **settings: Any) -> None:
        self.app = Onward(url, **(SETTINGS | settings))
        self.kind = kind
        self.runs: list[tuple[str, int]] = []
        self.tried: Counter[int] = Counter()
        self.accepted: set[int] = set()
        self.unknown: set[int] = set()
        self.ends = ends
        self.cured = False
        self._next = 0

        @self.app.handler(TOPIC, group=GROUP, retry=QUICK, **KINDS[kind])
        async def bill(n: int, event: Event) -> None:
            self.tried[n] += 1
            end = self.ends(n)
            if end == "never" and not self.cured:
                raise GiveUp("never")
            if end == "later" and self.tried[n] == 1:
                raise ValueError("later")
            self.runs.append((event.key or "", n))

    @asynccontextmanager
    async def open(self) -> AsyncIterator["FaultShop"]:
        """Run the application until the end of the block. Then nothing that was accepted may be missing."""
        async with self.app:
            running = asyncio.create_task(self.app.run())
            try:
                await until(lambda: self.app.health().ready, "the application is ready", self)
                yield self
                await self.settled()
                self.check()
            finally:
                self.app.stop()
                await running

    async def publish(self, count: int = 10) -> None:
        """Publish the next events, and note which of them were accepted."""
        numbers = range(self._next, self._next + count)
        self._next += count
        events = [event(TOPIC, f"key-{n % self.keys}", n) for n in numbers]
        try:
            await self.app.broker.publish(events)
        except PublishError as error:
            refused, unknown = ({int(each.value or b"") for each in some} for some in (error.refused, error.unknown))
        else:
            refused = unknown = set()
        self.unknown |= unknown
        self.accepted |= set(numbers) - refused - unknown

    async def settled(self) -> None:
        """Wait until every accepted event is handled, or a dead letter."""
        expected = {n for n in self.accepted if self.cured or self.ends(n) != "never"}
        await until(
            lambda: expected <= self.handled, lambda: f"{sorted(expected - self.handled)[:9]} are handled", self
        )
        dead = {n for n in self.accepted - self.handled if self.ends(n) == "never"}
        deadline = time.monotonic() + 60
        while missing := dead - await self.letters():
            assert time.monotonic() < deadline, f"{sorted(missing)} are no dead letters; {self.app.health().troubles}"
            await asyncio.sleep(0.05)

    @property
    def handled(self) -> set[int]:
        return {n for _, n in self.runs}

    async def letters(self) -> set[int]:
        """The numbers of the dead letters."""
        where = Filter(states=frozenset({State.DEAD}))
        page = await self.app.broker.aside(GROUP).scan(where, None, 10_000)
        return {int(record.event.value or b"") for record in page.records}

    async def records(self, group: str) -> Sequence[AsideRecord]:
        return (await self.app.broker.aside(group).scan(Filter(), None, 10_000)).records

    def check(self) -> None:
        assert self.handled <= self.accepted | self.unknown, "a refused event was handled"
        if self.kind == "ordered":
            for key in {key for key, _ in self.runs}:
                first = list(dict.fromkeys(n for each, n in self.runs if each == key and self.ends(n) != "never"))
                assert first == sorted(first), f"{key} ran out of order: {first}"


async def until(
    condition: Callable[[], bool], what: str | Callable[[], str], shop: FaultShop, within_s: float = 60.0
) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        said = what if isinstance(what, str) else what()
        assert time.monotonic() < deadline, f"not within {within_s} s: {said}; {shop.app.health().troubles}"
        await asyncio.sleep(0.02)
