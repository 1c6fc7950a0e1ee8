"""Reads the bodies of records again, at their offsets in the log."""

import threading
from collections.abc import Collection, Iterator, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from onward import clock
from onward.brokers.kafka.client import ClientFactory
from onward.brokers.kafka.closing import close_in_background
from onward.errors import BrokerError

_GAP = 50  # up to so many entries between two wanted ones are read and dropped; more are skipped with a seek
_WAIT_S = 0.1
_READ_S = 30.0  # for the entries of one call
_AWAY = frozenset({KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._TIMED_OUT})


class RecordBodies:
    """Safe to call from any thread. Calls block."""

    def __init__(self, factory: ClientFactory, group: str) -> None:
        self._factory = factory
        self._group = group
        self._lock = threading.Lock()
        self._consumer: Consumer | None = None

    def read(self, topic: str, index: int, wanted: Collection[int]) -> dict[int, bytes]:
        """The values by offset, without those that the log no longer has. BrokerError: the cluster does not answer."""
        end = clock.now() + _READ_S
        with self._lock:
            consumer = self._opened()
            try:
                found: dict[int, bytes] = {}
                for run in _runs(sorted(set(wanted))):
                    consumer.assign([TopicPartition(topic, index, run[0])])
                    found |= {at: value for at, value in _values(consumer, run[-1], end) if at in wanted}
                return found
            except (KafkaException, BrokerError) as error:
                close_in_background(consumer.close)  # a new client may succeed, see stall_check.py
                self._consumer = None
                why = error.args[0].str() if isinstance(error, KafkaException) else str(error)
                raise BrokerError(f"Kafka: records of {topic}/{index} cannot be read: {why}") from error
            finally:
                if self._consumer is not None:
                    consumer.unassign()

    def close(self) -> None:
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None

    def _opened(self) -> Consumer:
        if self._consumer is None:
            more = {"auto.offset.reset": "earliest", "enable.partition.eof": True, "queued.max.messages.kbytes": 2_048}
            self._consumer = self._factory.consumer(**{"group.id": self._group, "fetch.wait.max.ms": 100}, **more)
        return self._consumer


def _runs(offsets: Sequence[int]) -> Iterator[list[int]]:
    """Offsets that are near enough to each other to be read in one go."""
    run: list[int] = []
    for offset in offsets:
        if run and offset - run[-1] > _GAP:
            yield run
            run = []
        run.append(offset)
    if run:
        yield run


def _values(consumer: Consumer, last: int, end: float) -> Iterator[tuple[int, bytes]]:
    """From the consumer's position up to an offset, or to the end of the log."""
    while True:
        for message in consumer.consume(_GAP, _WAIT_S):
            error = message.error()
            if error is not None and error.code() in _AWAY:
                continue
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                return
            if error is not None:
                raise KafkaException(error)
            offset = message.offset() or 0
            if offset <= last:
                yield offset, message.value() or b""
            if offset >= last:
                return
        if clock.now() > end:
            raise BrokerError(f"no answer in {_READ_S:g} s")
