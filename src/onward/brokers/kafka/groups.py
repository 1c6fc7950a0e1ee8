"""Groups of the cluster: who is in them, how far they are, and how to forget one."""

from collections.abc import Sequence
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition

from onward.brokers.base import GroupInfo
from onward.brokers.kafka import marks
from onward.brokers.kafka.client import REQUEST_S, explained
from onward.brokers.kafka.topics import Catalogue
from onward.errors import BrokerError


class Groups:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def of(self, topic: str) -> list[GroupInfo]:
        """Those that have progress in the topic."""
        admin = self._catalogue.admin
        try:
            listing = self._catalogue.answer(admin.list_consumer_groups(request_timeout=REQUEST_S), "listing groups")
        except KafkaException as error:
            raise explained(error, "listing groups") from error
        found = []
        for group in sorted(each.group_id for each in listing.valid):
            marks = self._offsets(group).get(topic)
            if marks:
                found.append(GroupInfo(group, topic, self._members(group, topic), marks))
        return found

    def drop(self, topic: str, group: str) -> None:
        offsets = self._offsets(group)
        if topic not in offsets:
            return
        members = self._members(group, None)
        if members:
            raise BrokerError(f"group {group} of topic {topic} is in use by {', '.join(members)}; stop them first")
        forgotten = [TopicPartition(topic, index, 0, marks.FORGOTTEN) for index in offsets[topic]]
        asked = [ConsumerGroupTopicPartitions(group, forgotten)]
        try:
            if offsets.keys() == {topic}:
                futures = self._catalogue.admin.delete_consumer_groups([group], request_timeout=REQUEST_S)
            else:  # the client cannot delete the commits of one topic
                futures = self._catalogue.admin.alter_consumer_group_offsets(asked, request_timeout=REQUEST_S)
            answer = self._catalogue.answer(futures[group], f"forgetting group {group}")
            for place in answer.topic_partitions if answer is not None else ():
                if place.error is not None:
                    raise KafkaException(place.error)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
                raise explained(error, f"forgetting group {group}") from error

    def _offsets(self, group: str) -> dict[str, dict[int, int]]:
        asked = [ConsumerGroupTopicPartitions(group)]
        try:
            futures = self._catalogue.admin.list_consumer_group_offsets(asked, request_timeout=REQUEST_S)
            doing = f"reading the progress of group {group}"
            places = self._catalogue.answer(futures[group], doing).topic_partitions
        except KafkaException as error:
            raise explained(error, f"reading the progress of group {group}") from error
        found: dict[str, dict[int, int]] = {}
        for place in places:
            if place.offset >= 0 and place.metadata != marks.FORGOTTEN:
                found.setdefault(place.topic, {})[place.partition] = place.offset
        return found

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


def _concerns(assignment: Any, topic: str) -> bool:
    places = assignment.topic_partitions
    return not places or any(place.topic == topic for place in places)
