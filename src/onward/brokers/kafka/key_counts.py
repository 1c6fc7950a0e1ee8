"""How many partitions the keys of each topic use: stored in the cluster, once for each topic id.

A topic can get partitions while publishers run. If each publisher used the count that it sees, a key's events would go
to two partitions and overtake each other. So the first publisher stores the count that it sees, in the log of
COUNTS_TOPIC, and all publishers use it from then on. The first record of a topic id counts, so all readers agree.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from onward import clock
from onward.brokers.kafka.client import REQUEST_S, ClientFactory, explained, poll, produce
from onward.brokers.kafka.closing import close_in_background
from onward.brokers.kafka.topics import COUNTS_TOPIC, FORBIDDEN, KafkaTopic, KafkaTopics
from onward.errors import BrokerError

FOR_EVER = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
_DOING = f"reading topic {COUNTS_TOPIC}"
_POLL_S = 0.1
_CREATE = f"kafka-topics.sh --create --topic {COUNTS_TOPIC} --partitions 1 " + " ".join(
    f"--config {name}={value}" for name, value in FOR_EVER.items()
)
_NEEDED = (
    f"publishers store there how many partitions the keys of a topic use. Allow this user Describe, Read and Write on "
    f"topic {COUNTS_TOPIC}. If it does not exist, create it with `onward topology apply` or `{_CREATE}`"
)
# A record that is written twice counts once, so this producer needs no id from the cluster.
_PLAIN = {"enable.gapless.guarantee": False, "enable.idempotence": False, "acks": "all"}


class CountRecord(msgspec.Struct, frozen=True):
    """The value of a record. Its key is the topic's id; the name is for people and for a diagnosis."""

    topic: str
    partitions: int


class KeyCounts:
    """Calls block, and are safe from any thread. A count that was found is never read again."""

    def __init__(self, factory: ClientFactory, topics: KafkaTopics) -> None:
        self._factory = factory
        self._topics = topics
        self._one_call = threading.Lock()
        self._found: dict[str, CountRecord] = {}  # by topic id

    def stored(self, topic: KafkaTopic) -> int | None:
        """The stored count. None: no publisher has stored it yet. BrokerError: it cannot be read."""
        record = self._found.get(topic.log_id) or self.all().get(topic.log_id)
        return None if record is None else record.partitions

    def settled(self, topic: KafkaTopic, *, create: bool) -> int:
        """The stored count. If there is none, the topic's current count is stored now. `create`: COUNTS_TOPIC is
        created if it does not exist.

        BrokerError: the count can be neither read nor stored."""
        with self._one_call, _explained_refusals():
            if topic.log_id not in self._found:
                self._prepare(create=create)
                with self._reading() as log:
                    self._read(log, None)
                    if topic.log_id not in self._found:
                        self._read(log, self._write(topic))
            return self._found[topic.log_id].partitions

    def all(self) -> dict[str, CountRecord]:
        """All stored counts, by topic id."""
        with self._one_call, _explained_refusals():
            if self._topics.described(COUNTS_TOPIC) is not None:
                with self._reading() as log:
                    self._read(log, None)
            return dict(self._found)

    def _prepare(self, *, create: bool) -> None:
        if self._topics.described(COUNTS_TOPIC) is not None:
            return
        if not create:
            raise BrokerError(f"topic {COUNTS_TOPIC} does not exist and auto_declare is off: {_NEEDED}")
        self._topics.create(COUNTS_TOPIC, 1, FOR_EVER)

    @contextmanager
    def _reading(self) -> Iterator[Consumer]:
        """A reader at the beginning of the log. It joins no group, but librdkafka needs the name of one."""
        conf = {"group.id": COUNTS_TOPIC, "enable.partition.eof": True, "fetch.wait.max.ms": 10}
        consumer = self._factory.consumer(**conf, **{"auto.offset.reset": "earliest"})
        try:
            consumer.assign([TopicPartition(COUNTS_TOPIC, 0, 0)])  # OFFSET_BEGINNING takes half a second longer
            yield consumer
        finally:
            close_in_background(consumer.close)

    def _read(self, consumer: Consumer, last: int | None) -> None:
        """Read up to this offset, or (None) to the end of the log."""
        end_at = clock.now() + REQUEST_S
        while clock.now() < end_at:
            message = poll(consumer, _POLL_S)
            error = None if message is None else message.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF and last is None:
                return
            if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise KafkaException(error)
            if message is not None and error is None:
                self._apply(message)
                if last is not None and (message.offset() or 0) >= last:
                    return
        raise BrokerError(f"Kafka: {_DOING}: not read to its end in {REQUEST_S:g} s; are all its brokers up?")

    def _apply(self, message: Message) -> None:
        try:
            record = msgspec.json.decode(message.value() or b"", type=CountRecord)
        except msgspec.MsgspecError:
            return  # not ours
        if record.partitions > 0:
            self._found.setdefault(bytes(message.key() or b"").decode("utf-8", "replace"), record)

    def _write(self, topic: KafkaTopic) -> int:
        """Store the topic's count, and return the offset of the record. The record counts only if no other publisher's
        record is before it."""
        answers: list[tuple[KafkaError | None, Message]] = []
        producer = self._factory.producer(**_PLAIN, **{"message.timeout.ms": int(REQUEST_S * 1_000)})
        value = msgspec.json.encode(CountRecord(topic.name, topic.partitions))
        report = lambda error, message: answers.append((error, message))  # noqa: E731
        produce(producer, COUNTS_TOPIC, value, topic.log_id, 0, report, headers=None)
        producer.flush(2 * REQUEST_S)
        error, message = answers[0] if answers else (KafkaError(KafkaError._TIMED_OUT), None)
        if error is not None or message is None:
            raise KafkaException(error)
        return int(message.offset() or 0)


@contextmanager
def _explained_refusals() -> Iterator[None]:
    """BrokerError in place of KafkaException, and with the cure if this user lacks a permission."""
    try:
        yield
    except (KafkaException, BrokerError) as error:
        refusal = error.__cause__ if isinstance(error, BrokerError) else error
        if isinstance(refusal, KafkaException) and refusal.args[0].code() in FORBIDDEN:
            raise BrokerError(f"Kafka: topic {COUNTS_TOPIC}: {refusal.args[0].str()}; {_NEEDED}") from error
        if isinstance(error, KafkaException):
            raise explained(error, _DOING) from error
        raise
