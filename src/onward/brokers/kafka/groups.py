"""The groups of the cluster: reads their members and their progress, and drops groups. Calls block."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from onward import clock
from onward.brokers.base import GroupInfo, MemberInfo, Standing
from onward.brokers.kafka import commit_metadata
from onward.brokers.kafka.client import REQUEST_S, explained
from onward.brokers.kafka.log_offsets import offsets
from onward.brokers.kafka.topics import Cluster
from onward.errors import BrokerError
from onward.event import Partition

_AGAIN_S = 0.1
_MOVING = frozenset(
    {KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS}
)


class GroupMember(NamedTuple):
    """A live member, and the partitions that the group has assigned to it."""

    info: MemberInfo
    partitions: frozenset[Partition]

    def may_use(self, topic: str) -> bool:
        """While a group rebalances, its members have no partitions."""
        return not self.partitions or any(partition.topic == topic for partition in self.partitions)


class Groups:
    """Uses consumers that join no group to read and write progress. The admin client's own request for it crashes the
    process when a node answers that it is not the coordinator (confluentinc/librdkafka#5040)."""

    def __init__(self, cluster: Cluster) -> None:
        self._factory = cluster.factory
        self._admin = cluster.admin
        self._topics = cluster.topics

    def of(self, topic: str) -> list[GroupInfo]:
        """The groups that have progress in the topic."""
        progress = self._progress_in(topic)
        if not progress:
            return []
        members = self._members(progress)
        ends = self._ends(sorted({Partition(topic, place.partition) for each in progress.values() for place in each}))
        return [_info(group, topic, progress[group], members[group], ends) for group in progress]

    def owners(self, topic: str, group: str) -> list[MemberInfo]:
        """The members that own partitions of the topic. While the group rebalances there are none."""
        members = self._members([group])[group]
        return [each.info for each in members if any(partition.topic == topic for partition in each.partitions)]

    def names(self) -> list[str]:
        doing = "listing groups"
        try:
            listing = self._admin.answer(self._admin.client.list_consumer_groups(request_timeout=REQUEST_S), doing)
        except KafkaException as error:
            raise explained(error, doing) from error
        return sorted(each.group_id for each in listing.valid)

    def progress(self, group: str, places: Sequence[TopicPartition]) -> list[TopicPartition]:
        """The group's commits for these places."""
        consumer = self._factory.consumer(**{"group.id": group})
        try:
            found = _committed(consumer, places)
        except KafkaException as error:
            raise explained(error, f"reading the progress of group {group}") from error
        finally:
            consumer.close()
        return [place for place in found if place.offset >= 0 and place.metadata != commit_metadata.FORGOTTEN]

    def progress_everywhere(self, group: str) -> list[TopicPartition]:
        counts = self._topics.counts()
        return self.progress(group, [TopicPartition(name, at) for name, count in counts.items() for at in range(count)])

    def drop(self, topic: str, group: str) -> None:
        """Forget the group's progress in the topic. BrokerError: it has a live member."""
        progress = self.progress_everywhere(group)
        here = [place for place in progress if place.topic == topic]
        if not here:
            return
        if members := self._members([group])[group]:
            raise BrokerError(f"group {group} of topic {topic} is in use by {_names(members)}; stop them first")
        doing = f"dropping group {group}"
        try:
            if len(here) == len(progress):
                futures = self._admin.client.delete_consumer_groups([group], request_timeout=REQUEST_S)
                self._admin.answer(futures[group], doing)
            else:  # the client cannot delete the commits of one topic
                self._forget(group, here)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
                raise explained(error, doing) from error

    def unused(self, topic: str) -> list[str]:
        """The groups that have progress in the topic. BrokerError: some group has a live member that may use it."""
        progress = self._progress_in(topic)
        for group, members in self._members(self.names()).items():
            if users := [each for each in members if each.may_use(topic) and (each.partitions or group in progress)]:
                raise BrokerError(f"topic {topic} is in use by {_names(users)} of group {group}; stop them first")
        return list(progress)

    def _progress_in(self, topic: str) -> dict[str, list[TopicPartition]]:
        """The commits in the topic, by group."""
        described = self._topics.described(topic)
        if described is None:
            return {}
        places = [TopicPartition(topic, index) for index in range(described.partitions)]
        found = {group: self.progress(group, places) for group in self.names()}
        return {group: progress for group, progress in found.items() if progress}

    def _members(self, groups: Iterable[str]) -> dict[str, list[GroupMember]]:
        names = list(groups)
        if not names:
            return {}
        futures = self._admin.client.describe_consumer_groups(names, request_timeout=REQUEST_S)
        return {group: self._members_of(group, future) for group, future in futures.items()}

    def _members_of(self, group: str, future: Any) -> list[GroupMember]:
        doing = f"describing group {group}"
        try:
            described = self._admin.answer(future, doing)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return []
            raise explained(error, doing) from error
        return [GroupMember(MemberInfo.parse(each.client_id), _assigned(each)) for each in described.members]

    def _ends(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Where the logs end; empty if a leader does not answer."""
        try:
            return offsets(self._admin.client, partitions, OffsetSpec.latest())
        except (KafkaException, BrokerError):
            return {}

    def _forget(self, group: str, places: Sequence[TopicPartition]) -> None:
        consumer = self._factory.consumer(**{"group.id": group})
        try:
            forgotten = [TopicPartition(each.topic, each.partition, 0, commit_metadata.FORGOTTEN) for each in places]
            for place in consumer.commit(offsets=forgotten, asynchronous=False):
                if place.error is not None:
                    raise KafkaException(place.error)
        finally:
            consumer.close()


def _info(
    group: str,
    topic: str,
    progress: Sequence[TopicPartition],
    members: Sequence[GroupMember],
    ends: dict[Partition, int],
) -> GroupInfo:
    owners = {partition: member.info.name for member in members for partition in member.partitions}
    standings = {}
    for place in progress:
        partition = Partition(topic, place.partition)
        fence = commit_metadata.read(place.metadata or "", place.offset).progress.fence
        standings[partition.index] = Standing(place.offset, ends.get(partition), owners.get(partition), fence)
    return GroupInfo(group, topic, [each.info for each in members if each.may_use(topic)], standings)


def _assigned(member: Any) -> frozenset[Partition]:
    places = member.assignment.topic_partitions if member.assignment else ()
    return frozenset(Partition(place.topic, place.partition) for place in places or ())


def _names(members: Iterable[GroupMember]) -> str:
    return ", ".join(each.info.name for each in members)


def _committed(consumer: Any, places: Sequence[TopicPartition]) -> list[TopicPartition]:
    """The commits for these places. The request is repeated while the coordinator moves to another node."""
    end = clock.now() + REQUEST_S
    while True:
        try:
            return list(consumer.committed(list(places), REQUEST_S))
        except KafkaException as error:
            if error.args[0].code() not in _MOVING or clock.now() > end:
                raise
            time.sleep(_AGAIN_S)
