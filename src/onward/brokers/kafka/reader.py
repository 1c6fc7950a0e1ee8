"""The thread that reads events ahead of `receive`, with its own client that is assigned by hand.

This client is not in the group, so it goes on reading our partitions during a rebalance.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage

from onward import clock
from onward.brokers.core.holdings import Chunk
from onward.brokers.kafka.client import poll
from onward.brokers.kafka.closing import close_in_background
from onward.brokers.kafka.hold import KafkaHold, KafkaHoldings
from onward.brokers.kafka.message import received
from onward.brokers.kafka.stall_check import PartitionId, StallCheck
from onward.brokers.kafka.topics import Cluster
from onward.event import Delivery

log = logging.getLogger("onward")

_BATCH = 1_000
_POLL_S = 0.05
_LOOK_S = 0.1  # between two looks at how far the log was read
_WARM_UP_S = 5.0
_AHEAD = 1_000  # events of a paused partition that are read before its fetching stops
_LOST_PLACE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})


class LogReader:
    """Ends when the holdings are closed. `displaced` is called with a hold whose next position is not in the log."""

    def __init__(
        self,
        cluster: Cluster,
        holdings: KafkaHoldings,
        *,
        group: str,
        topics: Sequence[str],
        displaced: Callable[[KafkaHold], None],
    ) -> None:
        conf = {"group.id": group, "queued.max.messages.kbytes": 32_768, "fetch.wait.max.ms": 100}
        self._connect = partial(cluster.factory.consumer, **conf)
        self._consumer: Consumer = self._connect()
        self._stall_check = StallCheck(cluster.admin.client)
        self._holdings = holdings
        self._displaced = displaced
        self._reading: dict[PartitionId, KafkaHold] = {}
        self._stopped: set[KafkaHold] = set()
        self._version = -1
        self._looked = 0.0
        self._thread = threading.Thread(
            target=self._run, args=(topics,), name=f"onward-kafka-reader-{group}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Wait until the thread has ended. The holdings must be closed before."""
        self._thread.join()

    def _run(self, topics: Sequence[str]) -> None:
        try:
            self._warm_up(topics)
            while not self._holdings.closed:
                try:
                    self._follow()
                    if self._holdings.hungry.wait(_POLL_S):
                        self._read()
                        self._replace_if_stalled()
                    else:
                        self._stall_check.rest()
                except KafkaException as error:
                    log.warning("Kafka: reading failed, trying again: %s", error.args[0].str())
                    self._holdings.hungry.wait(_POLL_S)
        finally:
            self._consumer.close()

    def _warm_up(self, topics: Sequence[str]) -> None:
        """Find the leaders before we own the first partition. Otherwise the client begins to read up to a second
        late."""
        for topic in topics:
            with contextlib.suppress(KafkaException):
                self._consumer.list_topics(topic, _WARM_UP_S)

    def _read(self) -> None:
        first = poll(self._consumer, _POLL_S)
        if first is None:
            self._look()
            return
        messages = [first, *self._consumer.consume(_BATCH - 1, 0)]
        self._holdings.stock(self._sorted(messages))
        self._holdings.bell.ring()
        if len(messages) < _BATCH:
            self._look()

    def _sorted(self, messages: list[KafkaMessage]) -> list[tuple[KafkaHold, Chunk]]:
        """The deliveries by the holds that they belong to."""
        found: dict[KafkaHold, list[Delivery]] = {}
        place: PartitionId | None = None
        into: list[Delivery] | None = None
        for message in messages:
            if message.error() is not None:
                self._failed(message)
                continue
            topic, index = message.topic(), message.partition()
            if place is None or index != place[1] or topic != place[0]:
                place, into = (topic, index), None
                hold = self._reading.get(place)
                if hold is not None:
                    into = found.setdefault(hold, [])
                    partition, epoch, fence, log_id = hold.partition, hold.epoch, hold.fence, hold.log_id
            if into is not None:
                into.append(Delivery(received(message, topic), partition, message.offset(), epoch, 1, fence, log_id))
        return [
            (hold, Chunk(deliveries, sum([delivery.event.size for delivery in deliveries])))
            for hold, deliveries in found.items()
            if deliveries
        ]

    def _look(self) -> None:
        """Report how far the log was read: holes and transaction markers at its end count as read."""
        now = clock.now()
        if now < self._looked + _LOOK_S or not self._reading:
            return
        self._looked = now
        places = [TopicPartition(*place) for place in self._reading]
        reached = []
        for found in self._consumer.position(places):
            hold = self._reading[found.topic, found.partition]
            if found.offset > hold.ahead.position:
                reached.append((hold, found.offset))
        if reached:
            self._holdings.stock((), reached)
            self._holdings.bell.ring()

    def _replace_if_stalled(self) -> None:
        stuck = self._stall_check.look(self._reading, clock.now())
        if stuck:
            names = ", ".join(f"{topic}/{index}" for topic, index in stuck)
            log.warning("Kafka: %s: the client has stopped reading although there are more events: replacing it", names)
            close_in_background(self._consumer.close)
            self._consumer = self._connect()
            self._reading, self._stopped, self._version = {}, set(), -1

    # -- which partitions are read --------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Read the partitions that are held, and no others. Stop fetching a paused partition that has enough events."""
        if self._version != self._holdings.version:
            self._version = self._holdings.version
            held = {hold.partition: hold for hold in self._holdings.all() if not hold.revoking}
            gone = [place for place, hold in self._reading.items() if held.get(hold.partition) is not hold]
            if gone:
                self._unassign(gone)
            new = [hold for hold in held.values() if tuple(hold.partition) not in self._reading]
            if new:
                self._consumer.incremental_assign([_next_place(hold) for hold in new])
                self._reading |= {(hold.partition.topic, hold.partition.index): hold for hold in new}
        self._stop_or_resume()

    def _unassign(self, gone: list[PartitionId]) -> None:
        places = [TopicPartition(*place) for place in gone]
        self._consumer.resume(places)  # a pause outlives its assignment, and would stop the next one
        self._consumer.incremental_unassign(places)
        for place in gone:
            self._stopped.discard(self._reading.pop(place))

    def _stop_or_resume(self) -> None:
        for hold in self._reading.values():
            has_enough = not hold.flows and hold.ahead.events >= _AHEAD
            if has_enough == (hold in self._stopped):
                continue
            place = [TopicPartition(*hold.partition)]
            if has_enough:
                self._consumer.pause(place)
                self._stopped.add(hold)
            else:
                self._consumer.resume(place)
                self._stopped.discard(hold)

    def _failed(self, message: KafkaMessage) -> None:
        error = message.error()
        assert error is not None, "called only for errors"
        hold = self._reading.get((message.topic() or "", message.partition()))
        if hold is not None and error.code() in _LOST_PLACE:
            self._displaced(hold)
        else:
            log.warning("Kafka: reading %s: %s", hold.partition if hold else "", error.str())


def _next_place(hold: KafkaHold) -> TopicPartition:
    return TopicPartition(*hold.partition, hold.ahead.position)
