"""The base of the broker suite: the harness, members that a scenario drives by hand, and members in other processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self
from uuid import uuid4

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Assigned, Broker, Fenced, Message, Ordering, Progress, Revoked, Subscription, Supervised
from onward.event import Delivery, Event, Partition, new_id

LEASE_S = 3.0  # longer than a busy machine delays a renewal
OVER_LEASE_S = 1.5 * LEASE_S
GRACE_S = 0.2
SCENARIO_LIMIT_S = 200.0


class BrokerUnderTest(Protocol):
    """What a suite needs to test a broker. Child processes open the same `url`."""

    url: str
    folder: Path  # for files of the suite

    def refuse(self, event: Event) -> AbstractContextManager[None]:
        """Inside this context the broker refuses the event (and, where calls are atomic, the whole call)."""


class Kit:
    """The brokers, the topic and the processes of one scenario. All of them end with the scenario."""

    def __init__(self, harness: BrokerUnderTest, options: Mapping[str, Any]) -> None:
        self.harness = harness
        self.options = {"lease_s": LEASE_S, "takeover_grace_s": GRACE_S, "partitions": 4, **options}
        self.topic = f"topic-{uuid4().hex[:12]}"
        self._brokers: list[Broker] = []
        self._children: list[Process] = []

    async def broker(self, **options: Any) -> Broker:
        broker = await open_broker(settings.load(self.harness.url, **(self.options | options)))
        self._brokers.append(broker)
        return broker

    async def member(
        self, broker: Broker, group: str = "group", *, topic: str | None = None, **options: Any
    ) -> "Member":
        return await Member.join(broker, topic or self.topic, group, **options)

    def child(self, mode: str, group: str = "group", **options: Any) -> "MemberProcess":
        child = MemberProcess(self, mode, group, options)
        self.adopt(child)
        return child

    def adopt(self, child: "Process") -> None:
        """End this process when the scenario ends."""
        self._children.append(child)

    def events(self, count: int, keys: int = 1) -> list[Event]:
        """Numbered events: the values of each key are 0, 1, 2, …"""
        return [event(self.topic, f"key-{n % keys}", n // keys) for n in range(count)]

    async def close(self) -> None:
        for child in self._children:
            child.end()
        for broker in self._brokers:
            await broker.close()


async def publish_beside_cancelled_receives(kit: Kit, broker: Broker, member: "Member", count: int) -> None:
    """Publish events of one key. Cancel a receive during each publish, with different timing each time."""
    for n in range(count):
        receiving = asyncio.create_task(member.receive(wait_s=5.0))
        await asyncio.sleep(0.001 * (n % 4))
        publishing = asyncio.create_task(broker.publish([event(kit.topic, "a", n)]))
        await asyncio.sleep(0.001 * (n % 5))
        receiving.cancel()
        await asyncio.wait([receiving])
        await publishing


def event(topic: str, key: str | None, n: int, **fields: Any) -> Event:
    return Event(new_id(), topic, key, str(n).encode(), **fields)


Scenario = Callable[[Any, Kit], Coroutine[Any, Any, None]]


def scenario(**options: Any) -> Callable[[Scenario], Callable[[Any, BrokerUnderTest], None]]:
    """Make a test of an async function: it runs with a new Kit, these settings and a time limit."""

    def decorate(function: Scenario) -> Callable[[Any, BrokerUnderTest], None]:
        def run(self: Any, harness: BrokerUnderTest) -> None:
            asyncio.run(_run_limited(function, self, Kit(harness, options)))

        # Not functools.wraps: pytest would look for fixtures with the names of the function's parameters.
        run.__name__, run.__qualname__, run.__doc__ = function.__name__, function.__qualname__, function.__doc__
        return run

    return decorate


async def _run_limited(function: Scenario, self: Any, kit: Kit) -> None:
    try:
        await asyncio.wait_for(function(self, kit), SCENARIO_LIMIT_S)
    finally:
        await kit.close()


class Member:
    """A subscription that a scenario drives by hand. It records every message and settles only on request."""

    def __init__(self, subscription: Subscription, *, yields: bool) -> None:
        self.subscription = subscription
        self.assigned: dict[Partition, Assigned] = {}  # by partition, while it owns the partition
        self.history: list[Message] = []
        self.deliveries: list[Delivery] = []
        self.handled: int | None = None  # how many of them it settles on Revoked; None: all
        self._yields = yields  # settle and release on Revoked, as a good member does

    @classmethod
    async def join(
        cls,
        broker: Broker,
        topic: str,
        group: str,
        *,
        yields: bool = True,
        start: Any = "earliest",
        ordering: Ordering = "key",
        supervised: Supervised | None = None,
    ) -> Self:
        name = f"member-{uuid4().hex[:8]}" if supervised is None else supervised.member
        subscription = await broker.subscribe(
            [topic], group=group, member=name, ordering=ordering, start=start, supervised=supervised
        )
        return cls(subscription, yields=yields)

    @property
    def values(self) -> list[int]:
        return [int(delivery.event.value or b"") for delivery in self.deliveries]

    async def receive(self, *, limit: int = 1000, max_bytes: int = 1 << 24, wait_s: float = 0.2) -> Sequence[Message]:
        messages = await self.subscription.receive(limit, max_bytes, wait_s)
        for message in messages:
            await self._note(message)
        return messages

    async def _note(self, message: Message) -> None:
        self.history.append(message)
        match message:
            case Delivery():
                assert self.assigned[message.partition].epoch == message.epoch, (
                    "a delivery under an epoch that is not current"
                )
                self.deliveries.append(message)
            case Assigned():
                assert message.partition not in self.assigned, "assigned a partition that it already owns"
                self.assigned[message.partition] = message
            case Revoked() if self._yields:
                await self.settle(self.deliveries[: self.handled])
                await self.release(message.partitions)
            case Fenced():
                for partition in message.partitions:
                    self.assigned.pop(partition, None)

    async def until(self, condition: Callable[[], bool], within_s: float = 90.0) -> None:
        """Receive until the condition holds."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s} s; last messages: {self.history[-5:]}"
            await self.receive()

    async def hold(self, count: int) -> Self:
        """Receive until it owns this many partitions."""
        await self.until(lambda: len(self.assigned) == count)
        return self

    async def take(self, count: int) -> list[Delivery]:
        """Receive until it has got this many events in all. Returns all its deliveries."""
        await self.until(lambda: len(self.deliveries) >= count)
        return self.deliveries

    async def quiet(self, for_s: float = 0.5) -> None:
        """Check that nothing is delivered for this long."""
        deadline = time.monotonic() + for_s
        before = len(self.deliveries)
        while time.monotonic() < deadline:
            await self.receive(wait_s=0.1)
        assert len(self.deliveries) == before, f"unexpected deliveries: {self.deliveries[before:]}"

    def progress(self, deliveries: Iterable[Delivery] | None = None) -> list[Progress]:
        """Progress by which these deliveries (default: all), and everything before the last of them, are done."""
        done: dict[Partition, list[Delivery]] = {}
        for delivery in self.deliveries if deliveries is None else deliveries:
            current = self.assigned.get(delivery.partition)
            if current is not None and current.epoch == delivery.epoch:
                done.setdefault(delivery.partition, []).append(delivery)
        return [
            Progress(partition, each[-1].epoch, each[-1].position + 1, (), tuple(d.position for d in each))
            for partition, each in done.items()
        ]

    async def settle(self, deliveries: Iterable[Delivery] | None = None) -> Sequence[Partition]:
        return await self.subscription.settle(self.progress(deliveries))

    async def release(self, partitions: Sequence[Partition], *, drained: bool = True) -> None:
        await self.subscription.release(partitions, drained=drained)
        for partition in partitions:
            self.assigned.pop(partition, None)


class Process:
    """A child process that a scenario can suspend, resume and kill. It writes lines of JSON to stdout."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    async def line(self, within_s: float = 40.0) -> Any:
        """The next line that it writes, decoded."""
        assert self._process.stdout is not None
        reading = asyncio.get_running_loop().run_in_executor(None, self._process.stdout.readline)
        text = await asyncio.wait_for(reading, within_s)
        assert text, f"child {self.pid} exited with {self._process.wait()}"
        return json.loads(text)

    def rest(self) -> list[Any]:
        """The unread lines that it wrote before it was killed."""
        assert self._process.stdout is not None
        return [json.loads(line) for line in self._process.stdout.read().splitlines()]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Suspend it with SIGSTOP. It is suspended when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """Resume it with SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class MemberProcess(Process):
    """A member in its own process; see onward.testing.member for the modes."""

    def __init__(self, kit: Kit, mode: str, group: str, options: Mapping[str, Any]) -> None:
        task = {
            "url": kit.harness.url,
            "settings": kit.options,
            "mode": mode,
            "topic": kit.topic,
            "group": group,
            "effects": str(kit.harness.folder / f"{kit.topic}-{group}.effects"),
            **options,
        }
        super().__init__(["-m", "onward.testing.member", json.dumps(task)])


def effects(kit: Kit, group: str = "group") -> list[tuple[str, int]]:
    """The events that children in mode `work` handled, as (key, n), in the order over all children."""
    path = kit.harness.folder / f"{kit.topic}-{group}.effects"
    return [(key, int(n)) for key, n in map(str.split, whole_lines(path))]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that other processes write to. Of a line that is being written, a part may be there."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def first_times(done: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """By key, the numbers in the order in which each was handled for the first time. Repeats are left out."""
    first: dict[str, dict[int, None]] = {}
    for key, n in done:
        first.setdefault(key, {}).setdefault(n)
    return {key: list(numbers) for key, numbers in first.items()}
