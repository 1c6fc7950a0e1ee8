"""Topics that are deleted and created again while we hold their partitions."""

from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError, TopicCollection
from confluent_kafka.admin import AdminClient

from onward import clock
from onward.brokers.kafka.client import REQUEST_S
from onward.brokers.kafka.commits import Commits
from onward.brokers.kafka.hold import KafkaHold, KafkaHoldings
from onward.brokers.kafka.ownership import Ownership

_ASK_S = 1.0


class LogIds:
    """Asks once a second for the log ids of topics. No call waits: a later call returns the answer."""

    def __init__(self, admin: AdminClient, topics: Sequence[str]) -> None:
        self._admin = admin
        self._topics = list(topics)
        self._asked: dict[str, Any] = {}
        self._ask_at = 0.0

    def answered(self) -> dict[str, str]:
        """The log ids by topic, once for each answer; without topics that do not exist."""
        if self._asked and all(future.done() for future in self._asked.values()):
            asked, self._asked = self._asked, {}
            found = {name: future.result() for name, future in asked.items() if future.exception() is None}
            return {name: str(topic.topic_id) for name, topic in found.items()}
        if not self._asked and clock.now() >= self._ask_at:
            self._ask_at = clock.now() + _ASK_S
            self._asked = self._admin.describe_topics(TopicCollection(self._topics), request_timeout=REQUEST_S)
        return {}


class RecreatedTopics:
    """Reads topics that were created again from their beginning. The new log may be so long that the reader would just
    go on at its old position, past events that were not handled.

    Kafka removed the group's progress with the topic. We commit it again before we begin again; otherwise the group
    would start as a new one does, perhaps at the end."""

    def __init__(self, log_ids: LogIds, ownership: Ownership, commits: Commits, holdings: KafkaHoldings) -> None:
        self._log_ids = log_ids
        self._ownership = ownership
        self._commits = commits
        self._holdings = holdings
        self._outdated: set[KafkaHold] = set()  # whose progress is being committed again

    def look(self) -> None:
        """Call this in every turn of the member's thread."""
        if not self._holdings.held:
            return
        log_ids = self._log_ids.answered()
        for hold in self._holdings.all():
            if log_ids.get(hold.partition.topic, hold.log_id) == hold.log_id:
                continue
            if hold in self._outdated:
                self._ownership.begin_again(hold)  # calls to settle were sent first, and have committed it again
            elif not hold.revoking and not self._ownership.is_retiring:
                self._outdated.add(hold)
                self._commits.fence(hold, self._committed)

    def _committed(self, hold: KafkaHold, error: KafkaError | None) -> None:
        self._outdated.discard(hold)
        if error is None:
            self._ownership.begin_again(hold)
