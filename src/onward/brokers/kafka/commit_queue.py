"""What waits to be committed: calls to settle, in their order, and our own orders, one per partition."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from confluent_kafka import KafkaError

from onward import clock
from onward.brokers.base import Progress
from onward.brokers.kafka.hold import KafkaHold, KafkaHoldings
from onward.errors import BrokerError, Closed
from onward.event import Partition

_IDLE_S = 3_600.0  # commit idle partitions again, long before the coordinator forgets them (a week by default)


class WaitingSettle:
    """A call to settle, until it is answered."""

    def __init__(self, progress: Sequence[Progress], future: "Future[list[Partition]]") -> None:
        self.left = {each.partition: each for each in progress}
        self.lost: dict[Partition, None] = {}
        self.entered = clock.now()
        self._future = future

    def answer(self) -> None:
        if not self._future.done():
            self._future.set_result(list(self.lost))

    def fail(self, error: BrokerError) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class CommitOrder:
    """One partition's part of a commit request. `then` is called with the answer. An order without `then` belongs to
    calls to settle."""

    __slots__ = ("clean", "hold", "progress", "then")

    def __init__(
        self,
        hold: KafkaHold,
        progress: Progress,
        then: Callable[[KafkaError | None], None] | None = None,
        *,
        clean: bool = False,
    ) -> None:
        self.hold = hold
        self.progress = progress
        self.then = then
        self.clean = clean


class CommitQueue:
    def __init__(self, holdings: KafkaHoldings, timeout_s: float) -> None:
        self._holdings = holdings
        self._timeout_s = timeout_s
        self._calls: deque[WaitingSettle] = deque()
        self._orders: dict[Partition, CommitOrder] = {}  # fences and releases
        self._proving = False
        self._committed_at: dict[Partition, float] = {}

    # -- entering -------------------------------------------------------------------------------------------------

    def enter(self, call: WaitingSettle) -> None:
        self._calls.append(call)

    def order(self, order: CommitOrder) -> None:
        self._orders[order.hold.partition] = order

    def again(self, order: CommitOrder) -> None:
        """Send this order again. An order of a call to settle needs nothing: the call is still waiting."""
        if order.then is not None:
            self._orders.setdefault(order.hold.partition, order)

    def prove(self) -> None:
        """Send a request even if nothing waits: its answer proves that we are members."""
        self._proving = True

    def withdraw(self, holds: Iterable[KafkaHold]) -> None:
        """These are no longer ours, so their orders must not be sent: the coordinator accepts a commit of any member,
        and it would set the next owner's progress back."""
        for hold in holds:
            order = self._orders.get(hold.partition)
            if order is not None and order.hold is hold:
                del self._orders[hold.partition]
                if order.then is not None:
                    order.then(KafkaError(KafkaError._STATE))

    # -- sending --------------------------------------------------------------------------------------------------

    def next(self) -> dict[Partition, CommitOrder]:
        """The next request: the oldest call to settle, and every order whose partition has no waiting call."""
        orders: dict[Partition, CommitOrder] = {}
        while self._calls and not orders:
            orders = self._of_call(self._calls[0])
            self._close(self._calls[0])
        busy = {partition for call in self._calls for partition in call.left}
        for partition in self._orders.keys() - busy:
            order = orders[partition] = self._orders.pop(partition)
            if order.clean:
                order.progress = order.hold.own.latest
        if not orders and self._proving:
            by_topic = {hold.partition.topic: hold for hold in self._holdings.all()}  # a topic may be deleted
            orders = {hold.partition: _repeated(hold) for hold in by_topic.values()}
        self._proving = False
        return orders

    def _of_call(self, call: WaitingSettle) -> dict[Partition, CommitOrder]:
        orders: dict[Partition, CommitOrder] = {}
        for partition, progress in tuple(call.left.items()):
            hold = self._holdings.current(progress)
            if hold is None:
                call.lost[partition] = None
                del call.left[partition]
            elif progress.watermark < hold.own.latest.watermark:
                del call.left[partition]  # a later call has already stored more
            else:
                orders[partition] = CommitOrder(hold, progress)
        return orders

    def keep_alive(self, now: float) -> None:
        """Commit partitions again whose last commit is old, so that the coordinator does not forget it."""
        for hold in self._holdings.all():
            if now > self._committed_at.setdefault(hold.partition, now) + _IDLE_S:
                self._committed_at[hold.partition] = now
                self._orders.setdefault(hold.partition, _repeated(hold))

    # -- answers --------------------------------------------------------------------------------------------------

    def stored(self, order: CommitOrder) -> None:
        hold = order.hold
        hold.own.latest = order.progress
        self._committed_at[hold.partition] = clock.now()
        for call in tuple(self._calls):
            if call.left.get(hold.partition) is order.progress:
                del call.left[hold.partition]
                self._close(call)
        if order.then is not None:
            order.then(None)

    def lost(self, partition: Partition) -> None:
        """The partition no longer exists."""
        for call in tuple(self._calls):
            if call.left.pop(partition, None) is not None:
                call.lost[partition] = None
            self._close(call)

    def refused(self, partition: Partition, why: str) -> None:
        for call in tuple(self._calls):
            if partition in call.left:
                self._calls.remove(call)
                call.fail(BrokerError(f"{partition}: {why}"))

    def expire(self, now: float) -> None:
        for call in tuple(self._calls):
            if now > call.entered + self._timeout_s:
                self._calls.remove(call)
                call.fail(
                    BrokerError(f"Kafka: the group's coordinator has not answered a commit in {self._timeout_s:g} s")
                )

    def fail_all(self) -> None:
        for call in self._calls:
            call.fail(Closed("the subscription is closed"))
        self._calls.clear()

    def _close(self, call: WaitingSettle) -> None:
        if not call.left and call in self._calls:
            self._calls.remove(call)
            call.answer()


def _repeated(hold: KafkaHold) -> CommitOrder:
    return CommitOrder(hold, hold.own.latest, lambda _: None)
