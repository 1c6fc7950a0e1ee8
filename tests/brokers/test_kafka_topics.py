"""Listing and dropping the topics of a Kafka cluster."""

import pytest

from onward.brokers.base import State, TopicSpec
from onward.brokers.kafka.aside_topics import topic_name
from onward.brokers.kafka.topics import COUNTS_TOPIC
from onward.errors import BrokerError
from onward.testing.aside import make_record
from onward.testing.scenario import event
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import Stage, play, staged

__all__ = ["harness"]


def names(harness: KafkaHarness, topic: str) -> set[str]:
    """All topics, without Kafka's own, without the topic of partition counts, which always stays, and without asides of
    earlier tests. Kafka creates a deleted aside again for a client that asks for it while it is still closing."""
    names = {name for name in harness.admin.list_topics(timeout=30).topics if not name.startswith("__")}
    assert COUNTS_TOPIC in names
    return {name for name in names - {COUNTS_TOPIC} if topic in name or not name.startswith("onward.aside.")}


def test_topics_are_listed_without_those_of_onward_and_of_kafka_itself(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=3) as stage:
            broker = await stage.broker()
            await broker.publish([event(topic, "a", 0) for topic in (stage.topic, "another")])
            await (await stage.member(broker)).hold(3)  # this creates an aside, and Kafka's topic of commits
            aside = topic_name(stage.group, stage.topic)
            assert names(harness, stage.topic) == {stage.topic, "another", aside}
            assert await broker.topics() == [TopicSpec("another", 3), TopicSpec(stage.topic, 3)]

    play(scene())


def test_dropping_a_topic_removes_the_asides_of_all_groups_and_nothing_of_other_topics(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            broker, other = await stage.broker(), f"{stage.topic}-other"
            await broker.publish([event(topic, "a", n) for topic in (stage.topic, other) for n in range(3)])
            for topic in (stage.topic, other):
                await _worked(stage, topic)
            second = await stage.member(broker)
            await second.subscription.close()
            before = {each.group: each.partitions[0].watermark for each in await broker.groups(other)}
            await broker.drop_topic(stage.topic)
            assert names(harness, stage.topic) == {other, topic_name(stage.group, other)}
            after = {each.group: each.partitions[0].watermark for each in await broker.groups(other)}
            assert before == after == {stage.group: 3}
            assert await broker.topics() == [TopicSpec(other, 1)]

    play(scene())


async def _worked(stage: Stage, topic: str) -> None:
    """Let a member of the group handle three events of the topic, and set one aside."""
    broker = await stage.broker()
    stage.topic, before = topic, stage.topic
    member = await stage.member(broker)
    await member.take(3)
    record = make_record(
        member.deliveries[0], member.assigned[member.deliveries[0].partition].log_id, State.DEAD, group=stage.group
    )
    await member.subscription.settle(member.progress(), aside=[record])
    await member.subscription.close()
    stage.topic = before


def test_dropping_a_topic_of_a_live_member_is_refused_and_changes_nothing(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            broker = await stage.broker()
            await broker.publish([event(stage.topic, "a", n) for n in range(3)])
            member = await stage.member(broker)
            await member.take(3)
            await member.settle()
            with pytest.raises(BrokerError, match=f"in use by member-.* of group {stage.group}; stop them first"):
                await (await stage.broker()).drop_topic(stage.topic)
            assert names(harness, stage.topic) == {stage.topic, topic_name(stage.group, stage.topic)}
            assert stage.watermark() == 3

    play(scene())
