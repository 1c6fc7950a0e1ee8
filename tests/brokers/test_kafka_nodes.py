"""Three nodes, one of them killed under load: the one that coordinates the group, and one that leads a partition.

Promised: no event that was accepted is lost, none is inverted, and publishing goes on or names what was not accepted.

Run by ONWARD_NODES=1. On two busy cores commits did not go on within RECOVERED_S in one run, and why is not known yet:
it is no gate until it is.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest

from onward import Event, Onward
from onward.errors import PublishError
from onward.testing.failure_shop import eventually
from onward.testing.harness import event, first_times
from tests.brokers.kafka_stage import play, running, until
from tests.servers.kafka import KafkaCluster, KafkaServer, KafkaView
from tests.servers.needs import Missing

pytestmark = [
    pytest.mark.servers,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif("ONWARD_NODES" not in os.environ, reason="three nodes: set ONWARD_NODES=1"),
]

PARTITIONS = 6
KEYS = 20
RECOVERED_S = 40.0  # a second or two by itself; the machine may be busy


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    try:
        cluster = KafkaCluster()
    except Missing as reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(reason))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


class Load:
    """Two members of a group at work, and a publisher that never rests."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self.topic, self.group = f"topic-{uuid4().hex[:8]}", f"group-{uuid4().hex[:8]}"
        self.view = KafkaView(cluster.bootstrap, self.topic, self.group)
        self.apps = [self._app(cluster.url) for _ in range(2)]
        self.handled: list[tuple[str, int]] = []
        self.accepted = 0
        self.named = 0  # events that an error said were not accepted
        self.slowest_s = 0.0
        self._ends = False

    def _app(self, url: str) -> Onward:
        app = Onward(url, partitions=PARTITIONS, takeover_grace_s=0.5, publish_timeout_s=20.0)

        @app.handler(self.topic, group=self.group)
        async def handle(event: Event) -> None:
            await asyncio.sleep(0.002)
            self.handled.append((event.key or "", int(event.value or b"")))

        return app

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for app in self.apps:
                await stack.enter_async_context(app)
                await stack.enter_async_context(running(app))
            publishing = asyncio.create_task(self._publish())
            try:
                await until(lambda: len(self.handled) > 200, RECOVERED_S)
                yield
            finally:
                self._ends = True
                await publishing
            await until(lambda: len(set(self.handled)) == self.accepted, RECOVERED_S)

    async def _publish(self) -> None:
        n = 0
        while not self._ends:
            batch = [event(self.topic, f"key-{key}", n) for key in range(KEYS)]
            n += 1
            while batch:
                batch = await self._tried(batch)
            self.accepted += KEYS
            await asyncio.sleep(0.02)

    async def _tried(self, batch: list[Event]) -> list[Event]:
        """What the broker says that it has not accepted, in order."""
        started = time.monotonic()
        try:
            await self.apps[0].broker.publish(batch)
        except PublishError as error:
            failed = {each.id for each in (*error.refused, *error.unknown)}
            assert failed, "an error that names nothing"
            self.named += len(failed)
            return [each for each in batch if each.id in failed]
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        return []

    async def outlives(self, node: KafkaServer) -> float:
        """Kill the node; answers after how long what was published since is committed. Then the node comes back."""
        node.kill()
        before, started = self.accepted, time.monotonic()
        await eventually(lambda: self._has_committed(before + 10 * KEYS), "commits go on", RECOVERED_S)
        recovered_s = time.monotonic() - started
        await asyncio.to_thread(node.restart)
        await eventually(self._is_whole, "the node has caught up", RECOVERED_S)
        return recovered_s

    async def _has_committed(self, count: int) -> bool:
        return await asyncio.to_thread(self.view.committed) >= count

    async def _is_whole(self) -> bool:
        return await asyncio.to_thread(self.view.is_whole, 3)

    async def verdict(self) -> None:
        """None lost, none inverted, and the group has nothing left to do."""
        numbers = list(range(self.accepted // KEYS))
        assert first_times(self.handled) == {f"key-{key}": numbers for key in range(KEYS)}
        print(  # noqa: T201
            f"\n{self.accepted} events, {len(self.handled) - self.accepted} repeated, {self.named} named by an "
            f"error and published again, slowest publish {self.slowest_s:.1f} s"
        )


def test_the_coordinator_is_killed_comes_back_and_the_next_one_is_killed(cluster: KafkaCluster) -> None:
    async def scene() -> None:
        load = Load(cluster)
        async with load.at_work():
            first = await asyncio.to_thread(load.view.coordinator)
            took_s = await load.outlives(cluster.node(first))
            second = await asyncio.to_thread(load.view.coordinator)
            took_again_s = await load.outlives(cluster.node(second))
        await load.verdict()
        print(f"coordinators {first}, {second}: commits went on after {took_s:.1f} and {took_again_s:.1f} s")  # noqa: T201

    play(scene())


def test_the_leader_of_a_partition_is_killed(cluster: KafkaCluster) -> None:
    async def scene() -> None:
        load = Load(cluster)
        async with load.at_work():
            coordinator = await asyncio.to_thread(load.view.coordinator)
            leaders = await asyncio.to_thread(load.view.leaders)
            await load.outlives(cluster.node((leaders - {coordinator}).pop()))
        await load.verdict()

    play(scene())
