"""The diagnosis of a Kafka cluster: each problem is reported with its cure."""

import asyncio
from typing import Any

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, NewTopic, ResourceType

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Finding
from onward.brokers.kafka.aside_topics import topic_name
from onward.brokers.kafka.cluster_facts import ClusterFacts, GroupFacts, TopicFacts
from onward.brokers.kafka.diagnosis import diagnose
from onward.testing.scenario import event
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, staged, until
from tests.servers.server import free_port

__all__ = ["harness"]

WELL = {
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
    "cleanup.policy": "delete",
    "retention.ms": str(7 * 86_400_000),
    "retention.bytes": "-1",
}
BROKER = {"offsets.retention.minutes": "10080", "inter.broker.protocol.version": "3.9"}
ORDERS = TopicFacts("orders", 8, 3, 3, WELL)
ASIDE = TopicFacts(
    topic_name("billing", "orders"), 8, 3, 3, {"cleanup.policy": "compact", "max.message.bytes": "1310720"}
)
COUNTS = TopicFacts("onward.topics", 1, 3, 3, WELL | {"retention.ms": "-1"})
CLUSTER = ClusterFacts("one:9092", 3, BROKER, [COUNTS, ORDERS, ASIDE], [GroupFacts("billing", "orders", 8)])


def found(facts: ClusterFacts, **options: Any) -> list[Finding]:
    return diagnose(facts, settings.load("kafka://one", **options))


def problems(facts: ClusterFacts, **options: Any) -> list[Finding]:
    return [finding for finding in found(facts, **options) if finding.level != "ok"]


def test_a_healthy_cluster_is_described() -> None:
    assert [finding.what for finding in found(CLUSTER)] == [
        "Kafka at one:9092 answers: 3 brokers, version 3.9",
        "the progress of a stopped group is kept for 7 days",
        "topic orders: 8 partitions, 3 replicas, events kept for 7 days",
        "topic onward.aside.billing..orders: compacted, 8 partitions, 3 replicas",
    ]
    assert {finding.level for finding in found(CLUSTER)} == {"ok"}


def with_topic(**config: str) -> ClusterFacts:
    named = {name.replace("_", "."): value for name, value in config.items()}
    return CLUSTER._replace(topics=[ORDERS._replace(config=WELL | named), ASIDE])


@pytest.mark.parametrize(
    ("facts", "level", "what", "cure"),
    [
        (CLUSTER._replace(brokers=1), "warning", "1 broker", "replication=3"),
        (CLUSTER._replace(config=None), "warning", "settings cannot be read", "DescribeConfigs"),
        (
            CLUSTER._replace(config=BROKER | {"offsets.retention.minutes": "1440"}),
            "warning",
            "a group that is stopped for 1 day, while events are kept for 7 days",
            "offsets.retention.minutes=10080",
        ),
        (with_topic(min_insync_replicas="1"), "warning", "on one broker only", "min.insync.replicas=2"),
        (with_topic(min_insync_replicas="3"), "warning", "publishing stops when one broker", "min.insync.replicas=2"),
        (with_topic(min_insync_replicas="4"), "error", "nothing can be published", "min.insync.replicas=2"),
        (with_topic(unclean_leader_election_enable="true"), "error", "may lose accepted", "election.enable=false"),
        (with_topic(cleanup_policy="compact"), "warning", "earlier events are removed", "cleanup.policy=delete"),
        (with_topic(retention_ms="3600000"), "warning", "kept for 1 hour", "retention.ms=604800000"),
        (with_topic(retention_bytes="1000"), "warning", "retention.bytes=1000", "retention.bytes=-1"),
        (
            CLUSTER._replace(
                topics=[ORDERS._replace(replicas=1, in_sync=1, config=WELL | {"min.insync.replicas": "1"})]
            ),
            "warning",
            "1 replica on 3 brokers",
            "replication=3",
        ),
        (CLUSTER._replace(topics=[ORDERS._replace(in_sync=2)]), "warning", "only 2 of 3 replicas", "bring the missing"),
        (CLUSTER._replace(topics=[ORDERS._replace(config=None)]), "warning", "cannot be read", "DescribeConfigs"),
        (
            CLUSTER._replace(topics=[ORDERS, ASIDE._replace(config={"cleanup.policy": "delete"})]),
            "error",
            "dead letters and waiting events are removed by age",
            "cleanup.policy=compact",
        ),
        (
            CLUSTER._replace(topics=[ORDERS, ASIDE._replace(config={"max.message.bytes": "1048588"})]),
            "warning",
            "large events cannot be set aside",
            "max.message.bytes=1310720",
        ),
        (
            CLUSTER._replace(topics=[ORDERS._replace(key_partitions=4), ASIDE]),
            "warning",
            "topic orders: it has 8 partitions, and had 4 when its first event was published",
            "More partitions in docs/kafka.md",
        ),
        (
            CLUSTER._replace(topics=[ORDERS, ASIDE, COUNTS._replace(config=WELL)]),
            "error",
            "topic onward.topics: retention.ms=604800000, so it forgets",
            "set retention.ms=-1 on topic onward.topics",
        ),
        (
            CLUSTER._replace(groups=[GroupFacts("billing", "orders", 4)]),
            "warning",
            "group billing: topic orders has 8 partitions, and had 4",
            "on_partition_growth='accept'",
        ),
    ],
)
def test_each_problem_has_its_cure(facts: ClusterFacts, level: str, what: str, cure: str) -> None:
    (finding,) = problems(facts)
    assert finding.level == level
    assert what in finding.what
    assert cure in finding.cure


def test_an_aside_with_too_few_partitions_is_a_problem_if_it_may_not_be_grown() -> None:
    small = CLUSTER._replace(topics=[ORDERS, ASIDE._replace(partitions=4)])
    assert not problems(small), "its owner adds them"
    (finding,) = problems(small, auto_declare=False)
    assert finding.level == "error"
    assert "--partitions 8" in finding.cure


def test_growth_that_is_accepted_and_endless_retention_are_no_problems() -> None:
    assert not problems(CLUSTER._replace(groups=[GroupFacts("billing", "orders", 4)]), on_partition_growth="accept")
    assert not problems(with_topic(retention_ms="-1"))


def test_the_diagnosis_of_a_real_cluster_changes_nothing(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=None) as stage:
            await (await stage.broker(partitions=2)).publish([event(stage.topic, "a", 0)])
            member = await (await stage.member()).hold(2)
            await member.take(1)
            await member.settle()
            await member.subscription.close()
            aside = topic_name(stage.group, stage.topic)
            _configure(harness, aside, "cleanup.policy", "delete")
            harness.admin.create_partitions([NewPartitions(stage.topic, 3)])[stage.topic].result(30)
            new = NewTopic("short", 1, 1, config={"retention.ms": "60000"})
            harness.admin.create_topics([new])["short"].result(30)
            await until(lambda: "short" in harness.admin.list_topics(timeout=30).topics and stage.partitions() == 3)
            before = harness.admin.list_topics(timeout=30).topics.keys(), stage.committed()
            findings = await (await stage.broker()).diagnose()
            assert (harness.admin.list_topics(timeout=30).topics.keys(), stage.committed()) == before
            what = {finding.what.split(":")[0]: finding for finding in findings if finding.level != "ok"}
            assert what.keys() == {
                "1 broker",
                f"topic {aside}",
                "topic short",
                f"group {stage.group}",
                f"topic {stage.topic}",
            }
            assert what[f"topic {aside}"].level == "error"
            assert "has 3 partitions, and had 2" in what[f"group {stage.group}"].what
            assert "publishes to the first 2 only" in what[f"topic {stage.topic}"].what
            assert findings[0].what == f"Kafka at {harness.bootstrap} answers: 1 broker"

    play(scene())


def _configure(harness: KafkaHarness, topic: str, name: str, value: str) -> None:
    change = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
    harness.admin.incremental_alter_configs([resource])[resource].result(30)


def test_a_cluster_that_cannot_be_reached_is_an_error_with_a_cure() -> None:
    async def scene() -> None:
        broker = await open_broker(settings.load(f"kafka://127.0.0.1:{free_port()}"))
        try:
            (finding,) = await broker.diagnose()
        finally:
            await broker.close()
        assert finding.level == "error"
        assert "cannot be reached: Connection refused" in finding.what
        assert finding.cure

    asyncio.run(scene())
