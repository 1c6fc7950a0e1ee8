"""The reader: a thread with a consumer of its own, assigned by hand, that reads ahead of what is received.

It is no member of the group, so nothing that happens there keeps it from reading what is still ours.
"""

import logging
import threading
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage

from onward import clock
from onward.brokers.kafka.holdings import Hold, Holdings
from onward.brokers.kafka.message import received
from onward.brokers.kafka.parting import dismiss
from onward.brokers.kafka.stall import Stall
from onward.brokers.kafka.topics import Cluster
from onward.event import Delivery

log = logging.getLogger("onward")

_BATCH = 1_000
_POLL_S = 0.05
_LOOK_S = 0.1  # between two looks at how far the log was read
_AHEAD = 1_000  # events read of a paused partition before its fetching stops
_LOST_PLACE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})


class Reader:
    def __init__(self, cluster: Cluster, holdings: Holdings, *, group: str, displaced: Callable[[Hold], None]) -> None:
        """`displaced` is told of a hold whose next position the log does not have any more."""
        self._client = cluster.client
        self._conf = {"group.id": group, "queued.max.messages.kbytes": 32_768, "fetch.wait.max.ms": 100}
        self._consumer: Consumer = self._client.consumer(**self._conf)
        self._stall = Stall(cluster.catalogue.admin)
        self._holdings = holdings
        self._displaced = displaced
        self._reading: dict[tuple[str, int], Hold] = {}
        self._stopped: set[Hold] = set()
        self._version = -1
        self._looked = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"onward-kafka-reader-{group}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._holdings.hungry.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._follow()
                    if self._holdings.hungry.wait(_POLL_S):
                        self._read()
                        self._go_on()
                    else:
                        self._stall.rest()
                except KafkaException as error:
                    log.warning("Kafka: reading failed, trying again: %s", error.args[0].str())
                    self._holdings.hungry.wait(_POLL_S)
        finally:
            self._consumer.close()

    def _read(self) -> None:
        first = self._consumer.poll(_POLL_S)
        if first is None:
            self._look()
            return
        messages = [first, *self._consumer.consume(_BATCH - 1, 0)]
        self._holdings.stock(self._sorted(messages), {})
        if len(messages) < _BATCH:
            self._look()

    def _go_on(self) -> None:
        """Read with another client where this one has ceased to."""
        stuck = self._stall.look(self._reading, clock.now())
        if stuck:
            names = ", ".join(f"{topic}/{index}" for topic, index in stuck)
            log.warning("Kafka: %s: there is more to read, and the client does not: it is replaced", names)
            dismiss(self._consumer.close)
            self._consumer = self._client.consumer(**self._conf)
            self._reading, self._stopped, self._version = {}, set(), -1

    def _sorted(self, messages: list[KafkaMessage]) -> dict[Hold, list[Delivery]]:
        found: dict[Hold, list[Delivery]] = {}
        place: tuple[str, int] | None = None
        hold: Hold | None = None
        into: list[Delivery] = []
        fence, log_id = 0, ""
        for message in messages:
            if message.error() is not None:
                self._complain(message)
                continue
            topic, index = message.topic(), message.partition()
            if place is None or index != place[1] or topic != place[0]:
                place = (topic, index)
                hold = self._reading.get(place)
                if hold is not None:
                    into, fence, log_id = found.setdefault(hold, []), hold.source.fence, hold.log_id
            if hold is not None:
                offset = message.offset()
                into.append(Delivery(received(message, topic), hold.partition, offset, hold.epoch, 1, fence, log_id))
        return {hold: deliveries for hold, deliveries in found.items() if deliveries}

    def _look(self) -> None:
        """How far the log was read: holes and transaction markers at its end count as read."""
        now = clock.now()
        if now < self._looked + _LOOK_S or not self._reading:
            return
        self._looked = now
        places = [TopicPartition(*place) for place in self._reading]
        reached = {}
        for found in self._consumer.position(places):
            hold = self._reading[found.topic, found.partition]
            if found.offset > hold.position:
                reached[hold] = found.offset
        if reached:
            self._holdings.stock({}, reached)

    def _follow(self) -> None:
        """Read what is held, and no more; rest where a paused partition has enough."""
        if self._version != self._holdings.version:
            self._version = self._holdings.version
            held = {hold.partition: hold for hold in self._holdings.all() if not hold.revoking}
            gone = [place for place, hold in self._reading.items() if held.get(hold.partition) is not hold]
            if gone:
                self._part_with(gone)
            new = [hold for hold in held.values() if tuple(hold.partition) not in self._reading]
            if new:
                self._consumer.incremental_assign([TopicPartition(*hold.partition, hold.position) for hold in new])
                self._reading |= {(hold.partition.topic, hold.partition.index): hold for hold in new}
        self._rest()

    def _part_with(self, gone: list[tuple[str, int]]) -> None:
        places = [TopicPartition(*place) for place in gone]
        self._consumer.resume(places)  # a pause outlives the assignment: it would hold back the next one
        self._consumer.incremental_unassign(places)
        for place in gone:
            self._stopped.discard(self._reading.pop(place))

    def _rest(self) -> None:
        for hold in self._reading.values():
            waits = not hold.flows and hold.buffered >= _AHEAD
            if waits == (hold in self._stopped):
                continue
            place = [TopicPartition(*hold.partition)]
            if waits:
                self._consumer.pause(place)
                self._stopped.add(hold)
            else:
                self._consumer.resume(place)
                self._stopped.discard(hold)

    def _complain(self, message: KafkaMessage) -> None:
        error = message.error()
        assert error is not None
        hold = self._reading.get((message.topic() or "", message.partition()))
        if hold is not None and error.code() in _LOST_PLACE:
            self._displaced(hold)
        else:
            log.warning("Kafka: reading %s: %s", hold.partition if hold else "", error.str())
