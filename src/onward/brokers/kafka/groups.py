"""Groups of the cluster: who is in them, how far they are, and how to forget one."""

import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from onward import clock
from onward.brokers.base import GroupInfo, MemberInfo, Standing
from onward.brokers.kafka import marks
from onward.brokers.kafka.client import REQUEST_S, Client, explained
from onward.brokers.kafka.topics import Catalogue
from onward.errors import BrokerError

_AGAIN_S = 0.1
_MOVING = frozenset(
    {KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS}
)


class Groups:
    """Progress is read and written by consumers that join nothing: the admin client's own request for it ends the
    process when a coordinator answers that it is none (confluentinc/librdkafka#5040)."""

    def __init__(self, client: Client, catalogue: Catalogue) -> None:
        self._client = client
        self._catalogue = catalogue

    def of(self, topic: str) -> list[GroupInfo]:
        """Those that have progress in the topic."""
        admin = self._catalogue.admin
        described = self._catalogue.described(topic)
        if described is None:
            return []
        places = [TopicPartition(topic, index) for index in range(described.partitions)]
        try:
            listing = self._catalogue.answer(admin.list_consumer_groups(request_timeout=REQUEST_S), "listing groups")
        except KafkaException as error:
            raise explained(error, "listing groups") from error
        found = []
        for group in sorted(each.group_id for each in listing.valid):
            progress = self.progress(group, places)
            if progress:
                standings = {place.partition: Standing(place.offset, None, None, None) for place in progress}
                members = [MemberInfo.parse(name) for name in self._members(group, topic)]
                found.append(GroupInfo(group, topic, members, standings))
        return found

    def drop(self, topic: str, group: str) -> None:
        progress = self.progress(group, self._everywhere())
        here = [place for place in progress if place.topic == topic]
        if not here:
            return
        members = self._members(group, None)
        if members:
            raise BrokerError(f"group {group} of topic {topic} is in use by {', '.join(members)}; stop them first")
        try:
            if len(here) == len(progress):
                futures = self._catalogue.admin.delete_consumer_groups([group], request_timeout=REQUEST_S)
                self._catalogue.answer(futures[group], f"forgetting group {group}")
            else:  # the client cannot delete the commits of one topic
                self._forget(group, here)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
                raise explained(error, f"forgetting group {group}") from error

    def progress(self, group: str, places: list[TopicPartition]) -> list[TopicPartition]:
        """Where the group has progress, of these places."""
        consumer = self._client.consumer(**{"group.id": group})
        try:
            found = _committed(consumer, places)
        except KafkaException as error:
            raise explained(error, f"reading the progress of group {group}") from error
        finally:
            consumer.close()
        return [place for place in found if place.offset >= 0 and place.metadata != marks.FORGOTTEN]

    def _forget(self, group: str, places: list[TopicPartition]) -> None:
        consumer = self._client.consumer(**{"group.id": group})
        try:
            forgotten = [TopicPartition(each.topic, each.partition, 0, marks.FORGOTTEN) for each in places]
            for place in consumer.commit(offsets=forgotten, asynchronous=False):
                if place.error is not None:
                    raise KafkaException(place.error)
        finally:
            consumer.close()

    def _everywhere(self) -> list[TopicPartition]:
        try:
            topics = self._catalogue.admin.list_topics(timeout=REQUEST_S).topics
        except KafkaException as error:
            raise explained(error, "listing topics") from error
        return [TopicPartition(name, index) for name, topic in topics.items() for index in topic.partitions]

    def _members(self, group: str, topic: str | None) -> Sequence[str]:
        futures = self._catalogue.admin.describe_consumer_groups([group], request_timeout=REQUEST_S)
        try:
            described: Any = self._catalogue.answer(futures[group], f"describing group {group}")
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return []
            raise explained(error, f"describing group {group}") from error
        return [
            member.client_id
            for member in described.members
            if topic is None or not member.assignment or _concerns(member.assignment, topic)
        ]


def _committed(consumer: Any, places: list[TopicPartition]) -> list[TopicPartition]:
    """Asked again while the coordinator moves."""
    end = clock.now() + REQUEST_S
    while True:
        try:
            return list(consumer.committed(places, REQUEST_S))
        except KafkaException as error:
            if error.args[0].code() not in _MOVING or clock.now() > end:
                raise
            time.sleep(_AGAIN_S)


def _concerns(assignment: Any, topic: str) -> bool:
    places = assignment.topic_partitions
    return not places or any(place.topic == topic for place in places)
