"""Commits: asynchronous and one at a time in the flow, confirmed at once within a deadline where a callback waits."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from onward import clock
from onward.brokers.base import Progress
from onward.brokers.kafka import marks
from onward.brokers.kafka.holdings import Hold, Holdings
from onward.brokers.kafka.marks import Limit
from onward.errors import BrokerError, Closed
from onward.event import Partition

log = logging.getLogger("onward")

_AGAIN_S = 0.1
_FORGET_S = 5.0  # a request that went to a coordinator that died is never answered
_CONFIRM_S = 5.0
_IDLE_S = 3_600.0  # commit again what stands still, long before the coordinator forgets it (a week by default)

# The group moves or has moved on: what is ours will be told by a callback, so wait for that and do not insist.
_MOVING = frozenset(
    {
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError._STATE,
    }
)
# Nobody is there to answer: wait, up to the caller's deadline.
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


class Commit:
    """A call to settle, until it is answered."""

    def __init__(self, progress: Sequence[Progress], future: "Future[list[Partition]]", entered: float) -> None:
        self.left = {each.partition: each for each in progress}
        self.future = future
        self.lost: dict[Partition, None] = {}
        self.entered = entered

    def answer(self) -> None:
        if not self.left and not self.future.done():
            self.future.set_result(list(self.lost))


class Order:
    """What one request carries for one partition."""

    __slots__ = ("clean", "hold", "progress", "then")

    def __init__(
        self,
        hold: Hold,
        progress: Progress,
        then: Callable[[KafkaError | None], None] | None = None,
        *,
        clean: bool = False,
    ) -> None:
        self.hold = hold
        self.progress = progress
        self.then = then
        self.clean = clean


class Commits:
    def __init__(self, consumer: Consumer, holdings: Holdings, timeout_s: float) -> None:
        self._consumer = consumer
        self._holdings = holdings
        self._timeout_s = timeout_s
        self._limit = self._tried = Limit()
        self._waiting: deque[Commit] = deque()
        self._orders: dict[Partition, Order] = {}  # fences and releases, which go before settles
        self._under_way: dict[Partition, Order] = {}
        self._sent_at = 0.0
        self.taken_at = 0.0  # when that was sent which the coordinator took last, as from a member of the group
        self.heard_at = 0.0  # when that was sent which it answered last
        self._not_before = 0.0
        self._proving = False
        self._committed_at: dict[Partition, float] = {}

    # Entering

    def enter(self, commit: Commit) -> None:
        self._waiting.append(commit)

    def fence(self, hold: Hold, then: Callable[[Hold, KafkaError | None], None]) -> None:
        """Store that the partition has a new owner, which has not ended cleanly yet."""
        self._orders[hold.partition] = Order(hold, hold.latest, lambda error: then(hold, error))

    def prove(self) -> None:
        """Have the coordinator take something: what waits, or else what it took last."""
        self._proving = True

    def withdraw(self, holds: Iterable[Hold]) -> None:
        """These are not ours any more. What waits to be said of them must not be: it would be taken from any member,
        and set their next owner's progress back."""
        for hold in holds:
            order = self._orders.get(hold.partition)
            if order is not None and order.hold is hold:
                del self._orders[hold.partition]
                if order.then is not None:
                    order.then(KafkaError(KafkaError._STATE))

    def release(self, holds: Sequence[Hold], *, drained: bool, then: Callable[[], None]) -> None:
        """Store how these were left, then call `then`, also when that could not be stored: unclean is the default."""
        left = {hold.partition for hold in holds if drained}
        if not left:
            return then()

        def stored(partition: Partition, _: KafkaError | None) -> None:
            left.discard(partition)
            if not left:
                then()

        for hold in holds:
            self._orders[hold.partition] = Order(hold, hold.latest, partial(stored, hold.partition), clean=True)

    # Between polls

    def work(self) -> None:
        """Send what waits, if nothing is under way; give up on what waited too long."""
        now = clock.now()
        if self._under_way and now > self._sent_at + _FORGET_S:
            self._finish(KafkaError(KafkaError._TIMED_OUT), {})
        if not self._under_way and now >= self._not_before:
            self._keep_alive(now)
            self._send(self._chosen())
        self._expire(now)

    def answered(self, error: KafkaError | None, places: Sequence[TopicPartition]) -> None:
        """The coordinator has answered; called within a poll."""
        mine = {Partition(place.topic, place.partition): place for place in places or ()}
        if mine.keys() == self._under_way.keys() and all(
            place.offset == self._under_way[each].progress.watermark for each, place in mine.items()
        ):
            self._finish(error, {each: place.error for each, place in mine.items()})

    def _send(self, orders: dict[Partition, Order]) -> None:
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
            self.taken_at = self.heard_at = self._sent_at
        for partition, order in orders.items():
            self._settle(order, errors.get(partition) or error)

    # Within a callback, where nothing asynchronous is answered

    def work_at_once(self, deadline: float) -> None:
        orders = self._chosen()
        if orders:
            self._at_once(orders, deadline)
        self._expire(clock.now())

    def put_back(self, holds: Sequence[Hold]) -> None:
        """These were never told of: they go back as they came."""
        orders = {hold.partition: Order(hold, hold.latest, clean=True) for hold in holds if not hold.source.unclean}
        if orders:
            self._at_once(orders, clock.now() + _CONFIRM_S)

    def _at_once(self, orders: dict[Partition, Order], deadline: float) -> None:
        """Commit, then ask for what is stored: the coordinator answers in turn, and this has a time limit."""
        places, sent_at = self._places(orders.values()), clock.now()
        wait_s = max(0.1, min(_CONFIRM_S, deadline - clock.now()))
        try:
            self._consumer.commit(offsets=places, asynchronous=True)
            stored = self._consumer.committed([TopicPartition(p.topic, p.partition) for p in places], wait_s)
        except KafkaException as error:
            for order in orders.values():
                self._settle(order, error.args[0])
            return
        self.heard_at = sent_at
        said = {(place.topic, place.partition): (place.offset, place.metadata) for place in stored}
        for place, order in zip(places, orders.values(), strict=True):
            same = said.get((place.topic, place.partition)) == (place.offset, place.metadata)
            # Why it was refused is not told here; the text is the one thing of it that may not fit.
            self._settle(order, None if same else KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE))

    # Both

    def _chosen(self) -> dict[Partition, Order]:
        """The next request: the oldest settle, and what goes with it; a release goes behind its partition's settles."""
        orders: dict[Partition, Order] = {}
        while self._waiting and not orders:
            commit = self._waiting[0]
            for partition, progress in tuple(commit.left.items()):
                hold = self._holdings.current(progress)
                if hold is None:
                    commit.lost[partition] = None
                    del commit.left[partition]
                elif progress.watermark < hold.latest.watermark:
                    del commit.left[partition]  # it comes late and says less than is stored
                else:
                    orders[partition] = Order(hold, progress)
            self._close(commit)
        self._add_own(orders)
        if not orders and self._proving:
            by_topic = {hold.partition.topic: hold for hold in self._holdings.all()}  # one may be deleted
            orders = {hold.partition: _repeated(hold) for hold in by_topic.values()}
        self._proving = False
        return orders

    def _add_own(self, orders: dict[Partition, Order]) -> None:
        busy = {partition for commit in self._waiting for partition in commit.left}
        for partition in self._orders.keys() - busy:
            order = orders[partition] = self._orders.pop(partition)
            if order.clean:
                order.progress = order.hold.latest

    def _places(self, orders: Iterable[Order]) -> list[TopicPartition]:
        places = []
        self._tried = self._limit
        for order in orders:
            hold = order.hold
            text, encoded = marks.written(
                order.progress, hold.source.fence, clean=order.clean, suffix=hold.suffix, limit=self._limit
            )
            self._holdings.throttle(hold, throttled=encoded.done_dropped > 0)
            places.append(TopicPartition(*hold.partition, order.progress.watermark, text))
        return places

    def _settle(self, order: Order, error: KafkaError | None) -> None:
        """One partition's part of a request is answered."""
        partition, code = order.hold.partition, error.code() if error is not None else KafkaError.NO_ERROR
        if code == KafkaError.OFFSET_METADATA_TOO_LARGE and self._limit.chars > _SMALLEST_CHARS:
            if self._limit == self._tried:  # once for all partitions of a request
                self._limit = self._limit.smaller()
            self._again(order)
        elif error is None:
            self._stored(order)
        elif order.then is not None:
            order.then(error)
        elif code in _GONE:
            self._dismiss(partition, lost=True)
        elif code not in _MOVING and code not in _AWAY:
            self._refuse(partition, f"progress could not be committed: {error.str()}")
        else:
            self._not_before = clock.now() + _AGAIN_S

    def _again(self, order: Order) -> None:
        if order.then is not None:
            self._orders.setdefault(order.hold.partition, order)

    def _stored(self, order: Order) -> None:
        hold = order.hold
        hold.latest = order.progress
        self._committed_at[hold.partition] = clock.now()
        for commit in tuple(self._waiting):
            if commit.left.get(hold.partition) is order.progress:
                del commit.left[hold.partition]
                self._close(commit)
        if order.then is not None:
            order.then(None)

    def _dismiss(self, partition: Partition, *, lost: bool) -> None:
        for commit in tuple(self._waiting):
            if commit.left.pop(partition, None) is not None and lost:
                commit.lost[partition] = None
            self._close(commit)

    def _refuse(self, partition: Partition, why: str) -> None:
        for commit in tuple(self._waiting):
            if partition in commit.left:
                self._waiting.remove(commit)
                if not commit.future.done():
                    commit.future.set_exception(BrokerError(f"{partition}: {why}"))

    def _close(self, commit: Commit) -> None:
        if not commit.left and commit in self._waiting:
            self._waiting.remove(commit)
            commit.answer()

    def _expire(self, now: float) -> None:
        for commit in tuple(self._waiting):
            if now > commit.entered + self._timeout_s:
                self._waiting.remove(commit)
                if not commit.future.done():
                    why = f"the group's coordinator has not answered a commit in {self._timeout_s:g} s"
                    commit.future.set_exception(BrokerError(f"Kafka: {why}"))

    def _keep_alive(self, now: float) -> None:
        for hold in self._holdings.all():
            if now > self._committed_at.setdefault(hold.partition, now) + _IDLE_S:
                self._committed_at[hold.partition] = now
                self._orders.setdefault(hold.partition, _repeated(hold))

    def fail_all(self) -> None:
        for commit in self._waiting:
            if not commit.future.done():
                commit.future.set_exception(Closed("the subscription is closed"))
        self._waiting.clear()


def _repeated(hold: Hold) -> Order:
    return Order(hold, hold.latest, lambda _: None)
