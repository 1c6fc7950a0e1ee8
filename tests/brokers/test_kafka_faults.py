"""Errors from librdkafka's mock cluster, because a test cannot make a real broker report them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Fenced, Progress
from onward.brokers.kafka.groups import Groups
from onward.brokers.kafka.topics import COUNTS_TOPIC, Cluster, KafkaTopic, KafkaTopics
from onward.errors import BrokerError
from onward.testing.scenario import Member, event
from tests.brokers.kafka_mock import OFFSET_COMMIT, OFFSET_FETCH, MockCluster, mock_cluster

pytestmark = pytest.mark.slow  # real processes, seconds each

TOPIC = "orders"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockCluster]:
    """The mock has no controller, so it cannot describe topics. Two topics exist, and no topic for an aside."""

    def described(_: KafkaTopics, name: str) -> KafkaTopic | None:
        return KafkaTopic(name, "log", 1) if name in (TOPIC, COUNTS_TOPIC) else None

    monkeypatch.setattr(KafkaTopics, "described", described)
    with mock_cluster() as cluster:
        for topic in (TOPIC, COUNTS_TOPIC):
            cluster.create(topic, 1)
        yield cluster


def play(cluster: MockCluster, scene: Callable[[Member], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        common = {"auto_declare": False, "lease_s": 3.0, "takeover_grace_s": 0.1, "partitions": 1}
        broker = await open_broker(settings.load(cluster.url, **(common | options)))
        try:
            async with asyncio.timeout(100):
                await broker.publish([event(TOPIC, "k", n) for n in range(10)])
                member = await Member.join(broker, TOPIC, "billing")
                await member.take(10)
                await scene(member)
        finally:
            await broker.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "codes",
    [
        [KafkaError.OFFSET_METADATA_TOO_LARGE],
        [KafkaError.OFFSET_METADATA_TOO_LARGE] * 3,
        [KafkaError.REBALANCE_IN_PROGRESS] * 2,
        [KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.NOT_COORDINATOR],
        [KafkaError.COORDINATOR_NOT_AVAILABLE],
    ],
    ids=["too large", "too large thrice", "rebalance", "coordinator moved", "coordinator away"],
)
def test_trap_9_a_commit_survives_errors_that_pass(cluster: MockCluster, codes: list[int]) -> None:
    async def scene(member: Member) -> None:
        cluster.fail(OFFSET_COMMIT, *codes)
        first = member.deliveries[0]
        above = [(n, n + 1) for n in range(2, 10, 2)]
        assert not await member.subscription.settle([Progress(first.partition, first.epoch, 1, above)])
        assert not await member.settle()

    play(cluster, scene)


@pytest.mark.parametrize("code", [KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID])
def test_trap_8_and_9_a_lost_partition_is_fenced_and_settles_nothing(cluster: MockCluster, code: int) -> None:
    async def scene(member: Member) -> None:
        partition = member.deliveries[0].partition
        cluster.fail(OFFSET_COMMIT, code)
        assert await member.settle() == [partition]
        await member.until(lambda: any(isinstance(each, Fenced) for each in member.history))
        await member.take(20)
        assert member.values == [*range(10), *range(10)], "nothing was settled, so all events are delivered again"
        first, second = member.deliveries[0], member.deliveries[-1]
        assert second.epoch > first.epoch

    play(cluster, scene)


def test_trap_9_a_commit_that_is_refused_for_good_is_an_error(cluster: MockCluster) -> None:
    async def scene(member: Member) -> None:
        cluster.fail(OFFSET_COMMIT, KafkaError.GROUP_AUTHORIZATION_FAILED)
        with pytest.raises(BrokerError, match=r"orders/0: progress could not be committed: .*authorization"):
            await member.settle()
        assert not await member.settle()

    play(cluster, scene)


def test_trap_9_a_settle_fails_at_its_deadline_if_the_coordinator_never_accepts_it(cluster: MockCluster) -> None:
    async def scene(member: Member) -> None:
        cluster.fail(OFFSET_COMMIT, *[KafkaError.REBALANCE_IN_PROGRESS] * 1_000)
        started = time.monotonic()
        with pytest.raises(BrokerError, match="has not answered a commit in 5 s"):
            await member.settle()
        assert time.monotonic() - started < 30

    play(cluster, scene, publish_timeout_s=5.0)


@pytest.mark.parametrize("code", [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS])
def test_progress_is_read_while_the_coordinator_moves(cluster: MockCluster, code: int) -> None:
    """The admin client's own request for progress would crash the process at this answer."""

    async def scene(member: Member) -> None:
        await member.settle()
        groups = Groups(Cluster.at(cluster.url, settings.load(cluster.url)))
        cluster.fail(OFFSET_FETCH, code)
        found = await asyncio.to_thread(groups.progress, "billing", [TopicPartition(TOPIC, 0)])
        assert [place.offset for place in found] == [10]

    play(cluster, scene)
