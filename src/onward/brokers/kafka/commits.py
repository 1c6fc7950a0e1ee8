"""Sends commits: between polls asynchronously, one request at a time; within a callback at once, with a deadline."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from onward import clock
from onward.brokers.kafka import commit_metadata
from onward.brokers.kafka.commit_metadata import TextLimit
from onward.brokers.kafka.commit_queue import CommitOrder, CommitQueue, WaitingSettle
from onward.brokers.kafka.hold import KafkaHold, KafkaHoldings
from onward.event import Partition

_AGAIN_S = 0.1
_FORGET_S = 5.0  # a request to a coordinator that died is never answered
_CONFIRM_S = 5.0

# The group is rebalancing, or has done so without us. Wait: a callback will report which partitions are ours.
_REBALANCING = frozenset(
    {
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError._STATE,
    }
)
# No coordinator answers: wait, up to the caller's deadline.
_AWAY = frozenset(
    {
        KafkaError._WAIT_COORD,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.REQUEST_TIMED_OUT,
    }
)
_GONE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID})
_SMALLEST_CHARS = 64


class Commits:
    """Only the member's thread calls it."""

    def __init__(self, consumer: Consumer, holdings: KafkaHoldings, timeout_s: float) -> None:
        self._consumer = consumer
        self._holdings = holdings
        self._queue = CommitQueue(holdings, timeout_s)
        self._limit = self._tried = TextLimit()
        self._under_way: dict[Partition, CommitOrder] = {}
        self._sent_at = 0.0
        self._not_before = 0.0
        self.accepted_at = 0.0  # when the last request was sent that the coordinator accepted from us as a member
        self.answered_at = 0.0  # when the last request was sent that it answered at all

    # -- entering -------------------------------------------------------------------------------------------------

    def settle(self, call: WaitingSettle) -> None:
        self._queue.enter(call)

    def fence(self, hold: KafkaHold, then: Callable[[KafkaHold, KafkaError | None], None]) -> None:
        """Store that the partition has a new owner. Until a drained release the commit is not clean."""
        self._queue.order(CommitOrder(hold, hold.own.latest, partial(then, hold)))

    def prove(self) -> None:
        """Send something whose answer proves that we are members."""
        self._queue.prove()

    def withdraw(self, holds: Iterable[KafkaHold]) -> None:
        """These are no longer ours: do not send what waits for them."""
        self._queue.withdraw(holds)

    def release(self, holds: Sequence[KafkaHold], *, drained: bool, then: Callable[[], None]) -> None:
        """If `drained`, store that these ended clean. Then call `then`, even if that could not be stored."""
        left = {hold.partition for hold in holds if drained}
        if not left:
            return then()

        def stored(partition: Partition, _: KafkaError | None) -> None:
            left.discard(partition)
            if not left:
                then()

        for hold in holds:
            self._queue.order(CommitOrder(hold, hold.own.latest, partial(stored, hold.partition), clean=True))

    def fail_all(self) -> None:
        self._queue.fail_all()

    # -- between polls --------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Send what waits, if no request is under way; fail calls that have waited too long."""
        now = clock.now()
        if self._under_way and now > self._sent_at + _FORGET_S:
            self._finish(KafkaError(KafkaError._TIMED_OUT), {})
        if not self._under_way and now >= self._not_before:
            self._queue.keep_alive(now)
            self._send(self._queue.next())
        self._queue.expire(now)

    def answered(self, error: KafkaError | None, places: Sequence[TopicPartition]) -> None:
        """Called within a poll when the coordinator has answered."""
        mine = {Partition(place.topic, place.partition): place for place in places or ()}
        if mine.keys() == self._under_way.keys() and all(
            place.offset == self._under_way[each].progress.watermark for each, place in mine.items()
        ):
            self._finish(error, {each: place.error for each, place in mine.items()})

    def _send(self, orders: dict[Partition, CommitOrder]) -> None:
        if not orders:
            return
        self._under_way, self._sent_at = orders, clock.now()
        try:
            self._consumer.commit(offsets=self._places(orders.values()), asynchronous=True)
        except KafkaException as error:
            self._finish(error.args[0], {})

    def _finish(self, error: KafkaError | None, errors: dict[Partition, KafkaError | None]) -> None:
        orders, self._under_way = self._under_way, {}
        if any(not (errors.get(each) or error) for each in orders):
            self.accepted_at = self.answered_at = self._sent_at
        for partition, order in orders.items():
            self._resolve(order, errors.get(partition) or error)

    # -- within a callback, where no asynchronous request is answered ---------------------------------------------

    def work_at_once(self, deadline: float) -> None:
        orders = self._queue.next()
        if orders:
            self._at_once(orders, deadline)
        self._queue.expire(clock.now())

    def put_back(self, holds: Sequence[KafkaHold]) -> None:
        """These were never announced, so none of their events has run: their commits become clean again."""
        orders = {
            hold.partition: CommitOrder(hold, hold.own.latest, clean=True)
            for hold in holds
            if not hold.assigned.unclean
        }
        if orders:
            self._at_once(orders, clock.now() + _CONFIRM_S)

    def _at_once(self, orders: dict[Partition, CommitOrder], deadline: float) -> None:
        """Commit, then read what is stored: the coordinator answers in order, and reading has a time limit."""
        places, sent_at = self._places(orders.values()), clock.now()
        wait_s = max(0.1, min(_CONFIRM_S, deadline - clock.now()))
        try:
            self._consumer.commit(offsets=places, asynchronous=True)
            stored = self._consumer.committed([TopicPartition(p.topic, p.partition) for p in places], wait_s)
        except KafkaException as error:
            for order in orders.values():
                self._resolve(order, error.args[0])
            return
        self.answered_at = sent_at
        found = {(place.topic, place.partition): (place.offset, place.metadata) for place in stored}
        for place, order in zip(places, orders.values(), strict=True):
            same = found.get((place.topic, place.partition)) == (place.offset, place.metadata)
            # The cause of a refusal is not visible here. We assume that the text was too large.
            self._resolve(order, None if same else KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE))

    # -- both -----------------------------------------------------------------------------------------------------

    def _places(self, orders: Iterable[CommitOrder]) -> list[TopicPartition]:
        places = []
        self._tried = self._limit
        for order in orders:
            hold = order.hold
            owner = hold.own.mark if hold.announced else hold.own.wait or hold.own.mark
            text, encoded = commit_metadata.write(
                order.progress, hold.fence, clean=order.clean, owner=owner, suffix=hold.own.suffix, limit=self._limit
            )
            self._holdings.throttle(hold, throttled=encoded.done_dropped > 0)
            places.append(TopicPartition(*hold.partition, order.progress.watermark, text))
        return places

    def _resolve(self, order: CommitOrder, error: KafkaError | None) -> None:
        """Handle the answer to one partition's part of a request."""
        partition, code = order.hold.partition, error.code() if error is not None else KafkaError.NO_ERROR
        if code == KafkaError.OFFSET_METADATA_TOO_LARGE and self._limit.chars > _SMALLEST_CHARS:
            if self._limit == self._tried:  # once for all partitions of a request
                self._limit = self._limit.smaller()
            self._queue.again(order)
        elif error is None:
            self._queue.stored(order)
        elif order.then is not None:
            order.then(error)
        elif code in _GONE:
            self._queue.lost(partition)
        elif code not in _REBALANCING and code not in _AWAY:
            self._queue.refused(partition, f"progress could not be committed: {error.str()}")
        else:
            self._not_before = clock.now() + _AGAIN_S
