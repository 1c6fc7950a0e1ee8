"""Shared partitions: the suite on the reference broker, and applications with ordering="none" on it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onward import Event, Onward, Retry
from onward.brokers.base import Filter, State
from onward.context import current
from onward.testing import Process, SharedScenarios
from onward.testing.failure_shop import eventually, until
from onward.testing.shared import SharedProcessScenarios
from tests.brokers.shared_failure import UnorderedEndScenarios, UnorderedReplayScenarios
from tests.brokers.shared_harness import ReferenceHarness, scheme, served, stored
from tests.brokers.shared_reference import Store

__all__ = ["scheme"]

pytestmark = pytest.mark.timeout(240)  # scenarios have their own limits


class TestShared(SharedScenarios, UnorderedEndScenarios, UnorderedReplayScenarios):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[ReferenceHarness]:
        with stored(Store()) as url:
            yield ReferenceHarness(url, tmp_path, in_process=True)


class TestSharedInProcesses(SharedProcessScenarios):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[ReferenceHarness]:
        with served(Store()) as url:
            yield ReferenceHarness(url, tmp_path, in_process=False)


# -- applications -----------------------------------------------------------------------------------------------------

RETRY = Retry(attempts=3, first_delay_s=0.2, factor=2, jitter=0)


class Desk:
    """An application with one handler. `tried`: number, attempt and time of each call. `done`: the handled events."""

    def __init__(self, url: str, fails: Callable[[int], bool] = lambda n: False, group: str = "billing") -> None:
        self.app = Onward(url, drain_timeout_s=5.0, receive_batch=10)
        self.tried: list[tuple[int, int, float]] = []
        self.done: list[int] = []

        @self.app.handler("orders", group=group, ordering="none", start="latest", retry=RETRY)
        async def bill(order: dict[str, int], event: Event) -> None:
            n = order["n"]
            self.tried.append((n, current().attempt, time.monotonic()))
            await asyncio.sleep(0)
            if fails(n):
                raise ValueError(f"no stock for {n}")
            self.done.append(n)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Desk"]:
        """Run the application until the end of the block."""
        async with self.app:
            before = await _members(self.app)
            running = asyncio.create_task(self.app.run())
            try:
                await eventually(lambda: _has_joined(self.app, before), "it has joined")
                yield self
            finally:
                self.app.stop()
                await running

    async def publish(self, numbers: range) -> None:
        await self.app.publish_many("orders", [(f"key-{n % 3}", {"n": n}) for n in numbers])

    async def records(self, *states: State) -> list[Any]:
        where = Filter(states=frozenset(states or State))
        return list((await self.app.broker.aside("billing").scan(where, None, 100)).records)


def test_an_event_that_always_fails_is_retried_and_becomes_a_dead_letter() -> None:
    async def main() -> None:
        with stored(Store()) as url:
            async with Desk(url, lambda n: n == 3).open() as desk:
                await desk.publish(range(10))
                await eventually(lambda: _has_dead(desk, 1), "the event is a dead letter")
                (letter,) = await desk.records()
        assert sorted(desk.done) == [n for n in range(10) if n != 3]
        attempts = {attempt: at for n, attempt, at in desk.tried if n == 3}
        assert list(attempts) == [1, 2, 3]
        assert attempts[2] - attempts[1] >= 0.15
        assert attempts[3] - attempts[2] >= 0.35
        assert (letter.state, letter.event.key, letter.tries.failed) == (State.DEAD, "key-0", 3)
        assert (letter.failure.reason, letter.failure.attempts) == ("exhausted", 3)
        assert letter.failure.message == "no stock for 3"

    asyncio.run(main())


def test_members_share_events_and_count_the_attempts_of_each_together() -> None:
    async def main() -> None:
        with stored(Store()) as url:
            one, two = (Desk(url, lambda n: n % 10 == 0) for _ in range(2))
            async with one.open(), two.open():
                await one.publish(range(200))
                await eventually(lambda: _has_dead(one, 20), "20 events are dead letters")
        assert sorted(one.done + two.done) == [n for n in range(200) if n % 10]
        assert one.done
        assert two.done
        for n in range(0, 200, 10):
            assert sorted(attempt for each, attempt, _ in one.tried + two.tried if each == n) == [1, 2, 3]

    asyncio.run(main())


def test_a_replay_runs_again_in_its_group_only() -> None:
    async def main() -> None:
        broken = {1, 2}
        with stored(Store()) as url:
            desk, other = Desk(url, lambda n: n in broken), Desk(url, group="shipping")
            async with desk.open(), other.open():
                await desk.publish(range(3))
                await eventually(lambda: _has_dead(desk, 2), "two events are dead letters")
                broken.clear()
                tried = len(desk.tried)
                replayed = await desk.app.dead.replay()
                assert (replayed.replayed, replayed.failed, replayed.left) == (2, 0, 0)
                await until(lambda: sorted(desk.done) == [0, 1, 2], "all events are handled")
                await eventually(lambda: _has_no_records(desk), "their records are removed")
        assert sorted((n, attempt) for n, attempt, _ in desk.tried[tried:]) == [(1, 1), (2, 1)]
        assert sorted(other.done) == [0, 1, 2]

    asyncio.run(main())


def test_the_next_member_handles_the_events_and_retries_of_a_stopped_one() -> None:
    async def main() -> None:
        with stored(Store()) as url:
            first, second = Desk(url, lambda n: n < 5), Desk(url)
            async with first.open():
                await first.publish(range(20))
                await until(lambda: len(first.tried) >= 20, "each event was tried")
            async with second.open():
                await until(lambda: len(second.done) == 5, "the retries are handled")
                assert not await second.records()
        assert sorted(first.done + second.done) == list(range(20))
        assert {attempt for _, attempt, _ in second.tried} <= {2, 3}

    asyncio.run(main())


CRASHING = """
import asyncio, json, sys
from onward import Onward

url, count = sys.argv[1], int(sys.argv[2])
app = Onward(url, max_poll_gap_s=2.0)

@app.handler("orders", group="billing", ordering="none", start="latest", timeout_s=None)
async def bill(order: dict[str, int]) -> None:
    if order["n"] >= count:
        await asyncio.Event().wait()
    print(json.dumps({"done": order["n"]}), flush=True)

asyncio.run(app.run())
"""


def test_a_crash_of_a_member_loses_no_event(tmp_path: Path) -> None:
    """It is killed while it runs some events, has read others, and has not settled all events that are done."""

    async def main() -> None:
        with served(Store()) as url:
            child = Process(["-c", CRASHING, url, "30"])
            try:
                async with Onward(url) as publisher:
                    await eventually(lambda: _has_joined(publisher, set()), "it has joined")
                    await publisher.publish_many("orders", [(None, {"n": n}) for n in range(60)])
                    done = [(await child.line())["done"] for _ in range(30)]
                child.kill()
                assert sorted(done) == list(range(30))
                async with Desk(url).open() as desk:
                    await until(lambda: set(desk.done) >= set(range(30, 60)), "the events that it ran are handled")
                    assert not await desk.records()
            finally:
                child.end()

    asyncio.run(main())


async def _has_dead(desk: Desk, count: int) -> bool:
    return len(await desk.records(State.DEAD)) == count


async def _has_no_records(desk: Desk) -> bool:
    return not await desk.records()


async def _members(app: Onward) -> set[str]:
    return {member.name for info in await app.broker.groups("orders") for member in info.members}


async def _has_joined(app: Onward, before: set[str]) -> bool:
    """Whether there is a member that is not in `before`."""
    return bool(await _members(app) - before)
