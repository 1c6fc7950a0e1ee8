"""Three nodes, one of them killed under load: the group's coordinator, the leader of a partition, the node that answers
requests about topics.

The promise: no accepted event is lost or out of order, and publishing goes on or reports the events that were not
accepted. A cluster needs some time to replace a node, and a long time on a busy machine. Our time starts when a bare
client can publish and commit again. If it cannot for two minutes, the test is skipped.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from uuid import uuid4

import pytest

from onward import Event, Onward, settings
from onward.brokers import open_broker
from onward.brokers.base import TopicSpec, Topology
from onward.brokers.kafka.broker import KafkaBroker
from onward.errors import BrokerError, PublishError
from onward.testing.scenario import Member, event, first_times
from tests.brokers.kafka_stage import play, running, until
from tests.servers.kafka import KafkaCluster, KafkaServer, KafkaView
from tests.servers.needs import Missing

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.more, pytest.mark.timeout(600)]

PARTITIONS = 6
KEYS = 20
EVENTS = 60
CLUSTER_S = 120.0  # for the cluster to replace a node, and to be complete again
OURS_S = 60.0  # for Onward after that; a session of ten seconds may have to end first
LOOK_S = 0.2


@pytest.fixture(scope="module")
def nodes() -> Iterator[KafkaCluster]:
    try:
        cluster = KafkaCluster()
    except Missing as reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(reason))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(nodes: KafkaCluster) -> KafkaCluster:
    """The cluster with all its nodes, whatever the previous test did."""
    nodes.heal()
    asyncio.run(cluster_reaches(lambda: KafkaView(nodes.bootstrap).is_whole(3), "the cluster is complete"))
    return nodes


async def turns(condition: Callable[[], bool], what: str, within_s: float) -> float:
    """Wait until the condition is true, and return how long that took. The condition runs in a thread."""
    started = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < started + within_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - started


async def cluster_reaches(condition: Callable[[], bool], what: str) -> None:
    """Wait until the cluster itself is ready. Skip the test if it is not in time."""
    try:
        await turns(condition, what, CLUSTER_S)
    except AssertionError as late:
        pytest.skip(f"three nodes on this machine: {late}")


async def killed(node: KafkaServer, view: KafkaView) -> None:
    """Kill the node, and return when the cluster works without it."""
    await asyncio.to_thread(node.kill)
    await cluster_reaches(view.works, "a bare client publishes and commits")


async def returned(node: KafkaServer, view: KafkaView) -> None:
    await asyncio.to_thread(node.restart)
    await cluster_reaches(lambda: view.is_whole(3), "the node has caught up")


class Load:
    """Two members of a group, and a publisher that publishes all the time."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self.topic, self.group = f"topic-{uuid4().hex[:8]}", f"group-{uuid4().hex[:8]}"
        self.view = KafkaView(cluster.bootstrap)
        self.apps = [self._app(cluster.url) for _ in range(2)]
        self.handled: list[tuple[str, int]] = []
        self.accepted = 0
        self.named = 0  # events that an error listed as not accepted
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
        await asyncio.to_thread(self.view.prepare, PARTITIONS)
        async with contextlib.AsyncExitStack() as stack:
            for app in self.apps:
                await stack.enter_async_context(app)
                await stack.enter_async_context(running(app))
            publishing = asyncio.create_task(self._publish())
            try:
                await until(lambda: len(self.handled) > 200, OURS_S)
                yield
            except BaseException:
                publishing.cancel()
                raise
            self._ends = True
            await publishing
            await until(lambda: len(self.handled) >= self.accepted == len(set(self.handled)), OURS_S)

    async def _publish(self) -> None:
        n = 0
        while not self._ends:
            batch = [event(self.topic, f"key-{key}", n) for key in range(KEYS)]
            n += 1
            while batch:
                batch = await self._tried(batch)
            self.accepted += KEYS
            await asyncio.sleep(0.05)

    async def _tried(self, batch: list[Event]) -> list[Event]:
        """Publish the batch. Returns the events that the broker did not accept, in order."""
        started = time.monotonic()
        try:
            await self.apps[0].broker.publish(batch)
        except PublishError as error:
            failed = {each.id for each in (*error.refused, *error.unknown)}
            assert failed, "the error lists no event"
            self.named += len(failed)
            return [each for each in batch if each.id in failed]
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        return []

    async def outlives(self, node: KafkaServer) -> float:
        """Kill the node. Returns how much later than a bare client the group commits again."""
        await killed(node, self.view)
        enough = self.accepted + 10 * KEYS
        return await turns(lambda: self.view.committed(self.topic, self.group) >= enough, "commits go on", OURS_S)

    async def coordinator(self) -> int:
        return await asyncio.to_thread(self.view.coordinator, self.group)

    def verdict(self) -> None:
        """Check that no event is lost or out of order."""
        numbers = list(range(self.accepted // KEYS))
        assert first_times(self.handled) == {f"key-{key}": numbers for key in range(KEYS)}
        print(  # noqa: T201
            f"\n{self.accepted} events, {len(self.handled) - self.accepted} repeated, {self.named} named by an "
            f"error and published again, slowest publish {self.slowest_s:.1f} s"
        )


def test_the_group_survives_its_coordinator_and_the_next_coordinator(cluster: KafkaCluster) -> None:
    async def scene() -> None:
        load = Load(cluster)
        async with load.at_work():
            first = await load.coordinator()
            late_s = await load.outlives(cluster.node(first))
            await returned(cluster.node(first), load.view)
            second = await load.coordinator()
            late_again_s = await load.outlives(cluster.node(second))
        load.verdict()
        print(f"coordinators {first}, {second}: {late_s:.1f} and {late_again_s:.1f} s after a bare client")  # noqa: T201

    play(scene())


def test_the_group_survives_the_leader_of_a_partition(cluster: KafkaCluster) -> None:
    async def scene() -> None:
        load = Load(cluster)
        async with load.at_work():
            leaders = await asyncio.to_thread(load.view.leaders, load.topic)
            await load.outlives(cluster.node((leaders - {await load.coordinator()}).pop()))
        load.verdict()

    play(scene())


async def opened(cluster: KafkaCluster) -> KafkaBroker:
    broker = await open_broker(settings.load(cluster.url, partitions=PARTITIONS))
    assert isinstance(broker, KafkaBroker)
    return broker


def test_requests_about_topics_are_answered_after_their_node_was_killed(cluster: KafkaCluster) -> None:
    """The client sends requests to a node that it chose long before, and to the leaders of that time. Each must be
    answered, and only with numbers that a leader reported."""
    topic, group, view = f"topic-{uuid4().hex[:8]}", f"group-{uuid4().hex[:8]}", KafkaView(cluster.bootstrap)

    async def scene() -> None:
        asker, broker = await opened(cluster), await opened(cluster)
        await broker.publish([event(topic, f"key-{n}", n) for n in range(EVENTS)])
        member = await Member.join(broker, topic, group)
        while len(member.assigned) < PARTITIONS:
            await member.receive(limit=0)
        assert await undelivered(member) == EVENTS
        asked = asker._cluster.admin.client.list_topics(timeout=30).controller_id
        await killed(cluster.node(asked), view)
        assert await asker.declare(Topology([TopicSpec(topic, PARTITIONS)]), apply=False) == []
        async with asyncio.timeout(OURS_S):
            while (found := await undelivered(member)) is None:
                pass
        assert found == EVENTS
        await member.subscription.close()
        await asker.close()
        await broker.close()

    view.prepare(PARTITIONS)
    play(scene())


async def undelivered(member: Member) -> int | None:
    """How many events are undelivered in all partitions; None while that is unknown."""
    await member.receive(limit=0, wait_s=LOOK_S)
    try:
        lag = await member.subscription.lag()
    except BrokerError:
        return None
    return sum(each.undelivered or 0 for each in lag.values()) if len(lag) == PARTITIONS else None
