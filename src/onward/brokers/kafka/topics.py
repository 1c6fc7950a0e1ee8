"""Topics: their partition counts and log ids, as the cluster has them. What is asked is asked in a thread."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from onward import clock
from onward.brokers.base import Change, TopicSpec
from onward.brokers.kafka.client import REQUEST_S, Client, explained
from onward.errors import BrokerError, PartitionsDiffer
from onward.settings import Settings, check_name

log = logging.getLogger("onward")

DEFAULT_PARTITIONS = 8
_FRESH_S = 30.0  # how long a remembered topic is not asked for again
_OVERHEAD_BYTES = 65_536  # of headers and framing, beside what max_event_bytes counts
_APPEAR_S = 0.05
_FIRST_S = 3.0  # for a cluster that has never answered
_LIST_S = 1.0
_ELSEWHERE_S = 0.5  # without an answer: then it may be a dead node that is asked
_INCARNATION_S = 1.0
_LEAST_RETENTION_S = 3_600.0  # Kafka forgets by age alone, also what nobody has handled


_FORBIDDEN = frozenset(
    {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.POLICY_VIOLATION}
)


class Topic(NamedTuple):
    name: str
    log_id: str
    partitions: int


class Catalogue:
    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._admin = client.admin()
        self._settings = settings
        self._answered = False
        self._declared: dict[str, int] = {}  # counts that this process declared itself
        self._known: dict[str, tuple[Topic, float]] = {}

    @property
    def admin(self) -> AdminClient:
        return self._admin

    def remembered(self, name: str) -> Topic | None:
        known = self._known.get(name)
        return known[0] if known is not None and clock.now() - known[1] < _FRESH_S else None

    async def resolve(self, name: str) -> Topic:
        """The topic, created where that is allowed. PartitionsDiffer: not as this process must have it."""
        fresh = self.remembered(name)
        if fresh is not None:
            return fresh
        try:
            return await asyncio.to_thread(self.ask, name)
        except BrokerError:
            if name not in self._known:
                raise
            topic = self._known[name][0]  # nobody answers: it is still the best that we know
            self._known[name] = (topic, clock.now())
            return topic

    def ask(self, name: str) -> Topic:
        topic = self.described(name) or self._first_use(name)
        known = self._known.get(name)
        self._check_count(topic, known[0] if known else None)
        self._known[name] = (topic, clock.now())
        return topic

    def forget(self, name: str) -> None:
        """Ask anew at the next use; the count it had is still remembered."""
        if name in self._known:
            self._known[name] = (self._known[name][0], 0.0)

    def described(self, name: str) -> Topic | None:
        """The topic as the cluster has it now, None where there is none."""
        try:
            futures = self._admin.describe_topics(TopicCollection([name]), request_timeout=REQUEST_S)
            found = self.answer(futures[name], f"asking for topic {name}")
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise explained(error, f"asking for topic {name}") from error
        return Topic(name, str(found.topic_id), len(found.partitions))

    def names(self) -> list[str]:
        """Of all topics of the cluster."""
        since = clock.now()
        while True:
            try:
                return list(self._admin.list_topics(timeout=_LIST_S).topics)
            except KafkaException as error:
                self._be_patient(since, "listing topics")
                if error.args[0].code() not in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT):
                    raise explained(error, "listing topics") from error

    def answer(self, future: Any, doing: str) -> Any:
        """The future's result. BrokerError: there is none, and why."""
        since = looked = clock.now()
        while not future.done():
            self._be_patient(since, doing)
            if clock.now() > looked + _ELSEWHERE_S:
                self._look_around()
                looked = clock.now()
        result = future.result()
        self._answered, self._client.down = True, ""
        return result

    def _look_around(self) -> None:
        """Hear of any node who is there. The client asks only the one that it was once told is the controller, which
        in KRaft may be any, and waits for it also when it is dead."""
        with contextlib.suppress(KafkaException):
            self._admin.list_topics(timeout=_LIST_S)

    def _be_patient(self, since: float, doing: str) -> None:
        """Wait a moment for an answer; BrokerError where it is of no use to wait longer.

        A cluster that has never answered is the wrong one, or is not there; one that has may come back."""
        self._admin.poll(_APPEAR_S)
        waited_s = clock.now() - since
        where = f"Kafka at {self._client.servers}"
        if self._client.denied:
            raise BrokerError(f"{where}: {doing}: {self._client.denied}; check the user, password and TLS settings")
        if self._client.down and waited_s > (REQUEST_S if self._answered else _FIRST_S):
            raise BrokerError(
                f"{where} cannot be reached: {self._client.down} ({doing}); is it running, and are host and port right?"
            )
        if waited_s > REQUEST_S:
            raise BrokerError(f"{where}: {doing}: no answer in {REQUEST_S:g} s; is it a Kafka server, and well?")

    def declare(self, specs: Sequence[TopicSpec], *, apply: bool) -> list[Change]:
        changes = []
        for spec in specs:
            check_name("topic", spec.name)
            topic = self.described(spec.name)
            if topic is None:
                changes.append(Change(spec.name, "create", f"create {spec.name} with {spec.partitions} partitions"))
                if apply:
                    self.create(spec.name, spec.partitions)
            elif topic.partitions != spec.partitions:
                changes.append(Change(spec.name, "refuse", _differ(topic, spec.partitions)))
                continue
            if apply or topic is not None:
                self._declared[spec.name] = spec.partitions
        return changes

    def create(self, name: str, partitions: int, config: dict[str, str] | None = None) -> Topic:
        """Create the topic; one that somebody else created meanwhile will do."""
        settings = self._settings
        if config is None:
            config = {
                "retention.ms": str(int(max(settings.retention_s, _LEAST_RETENTION_S) * 1000)),
                "max.message.bytes": str(max(1_048_588, settings.max_event_bytes + _OVERHEAD_BYTES)),
            }
        new = NewTopic(name, partitions, settings.replication or -1, config=config)
        try:
            self.answer(self._admin.create_topics([new], request_timeout=REQUEST_S)[name], f"creating topic {name}")
        except KafkaException as error:
            if error.args[0].code() in _FORBIDDEN:
                raise explained(error, _not_allowed(name)) from error
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise explained(error, f"creating topic {name}") from error
        return self.appeared(name)

    def grow(self, name: str, partitions: int) -> Topic:
        try:
            new = NewPartitions(name, partitions)
            future = self._admin.create_partitions([new], request_timeout=REQUEST_S)[name]
            self.answer(future, f"adding partitions to topic {name}")
        except KafkaException as error:
            if error.args[0].code() != KafkaError.INVALID_PARTITIONS:  # somebody else has done it
                raise explained(error, f"adding partitions to topic {name}") from error
        end = clock.now() + REQUEST_S
        while (topic := self.appeared(name)).partitions < partitions and clock.now() < end:
            time.sleep(_APPEAR_S)
        return topic

    def delete(self, name: str) -> None:
        """Delete the topic; answers when nobody sees it any more."""
        try:
            self.answer(self._admin.delete_topics([name], request_timeout=REQUEST_S)[name], f"deleting topic {name}")
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise explained(error, f"deleting topic {name}") from error
        end = clock.now() + REQUEST_S
        while self.described(name) is not None and clock.now() < end:
            time.sleep(_APPEAR_S)

    def appeared(self, name: str) -> Topic:
        """The controller has made it; the broker that we ask hears of that a moment later.

        BrokerError: it does not."""
        end = clock.now() + REQUEST_S
        while (topic := self.described(name)) is None:
            if clock.now() > end:
                raise BrokerError(f"Kafka: topic {name} was created but is not to be seen; was it deleted?")
            time.sleep(_APPEAR_S)
        return topic

    def _first_use(self, name: str) -> Topic:
        check_name("topic", name)
        if not self._settings.auto_declare:
            raise BrokerError(
                f"topic {name} does not exist and auto_declare is off; declare it first, or turn auto_declare on"
            )
        return self.create(name, self._insisted(name) or DEFAULT_PARTITIONS)

    def _insisted(self, name: str) -> int | None:
        """The count that this process was told; None: whatever the cluster has will do."""
        return self._declared.get(name, self._settings.partitions)

    def _check_count(self, topic: Topic, known: Topic | None) -> None:
        same_log = known is not None and known.log_id == topic.log_id
        wanted = self._insisted(topic.name) or (known.partitions if known and same_log else topic.partitions)
        grown = topic.partitions > wanted and self._settings.on_partition_growth == "accept"
        if topic.partitions != wanted and not grown:
            raise PartitionsDiffer(_differ(topic, wanted))


def _not_allowed(name: str) -> str:
    return f"creating topic {name}, which is not there (let somebody who may do it create it, or allow this user to)"


def _differ(topic: Topic, wanted: int) -> str:
    return (
        f"topic {topic.name} has {topic.partitions} partitions, this process says {wanted}; a key would change its "
        f"partition and lose its order. Set partitions={topic.partitions} here, or use a new topic"
    )


class Incarnations:
    """Asks now and then which logs the topics are. Nobody waits: the answer is had by a later call."""

    def __init__(self, admin: AdminClient, topics: Sequence[str]) -> None:
        self._admin = admin
        self._topics = list(topics)
        self._asked: dict[str, Any] = {}
        self._ask_at = 0.0

    def answered(self) -> dict[str, str]:
        """The log ids by topic, once for each answer; a topic that is not there is not among them."""
        if self._asked and all(future.done() for future in self._asked.values()):
            asked, self._asked = self._asked, {}
            found = {name: future.result() for name, future in asked.items() if future.exception() is None}
            return {name: str(topic.topic_id) for name, topic in found.items()}
        if not self._asked and clock.now() >= self._ask_at:
            self._ask_at = clock.now() + _INCARNATION_S
            self._asked = self._admin.describe_topics(TopicCollection(self._topics), request_timeout=REQUEST_S)
        return {}


class Cluster(NamedTuple):
    """What everybody who works with the cluster needs."""

    client: Client
    catalogue: Catalogue
    settings: Settings
