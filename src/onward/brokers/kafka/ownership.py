"""Changes the ownership of partitions: assigned, revoked by the group, lost to another member, released, handed over.

All of it runs in the member's thread: between polls or, while the group revokes partitions, within the callback for
that. The callback waits for the release, so the group waits too. The reader goes on reading meanwhile.
"""

import contextlib
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import Consumer

from onward import clock
from onward.brokers.kafka.arrivals import Arrivals
from onward.brokers.kafka.certainty import Certainty
from onward.brokers.kafka.commits import Commits
from onward.brokers.kafka.group_consumer import GroupConsumer, Places
from onward.brokers.kafka.hold import KafkaHold, KafkaHoldings
from onward.event import Partition

_POLL_S = 0.02
_MEMBER_LOOK_S = 0.1


Command = Callable[[], None]


class ThreadCommands:
    """Commands of other threads, which the member's thread runs."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def ask(self, work: Callable[["Future[Any]"], None]) -> "Future[Any]":
        """Queue work that resolves the returned future, at once or later."""
        future: Future[Any] = Future()
        self._queue.put(lambda: work(future))
        return future

    def serve(self) -> None:
        """Run all waiting commands."""
        while not self._queue.empty():
            self._queue.get()()

    def serve_one(self, wait_s: float) -> None:
        """Run the next command, if one arrives within this time."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=wait_s)()


class Ownership:
    """`is_retiring`: this member released partitions that the group had not revoked. It keeps its other partitions and
    accepts no more."""

    def __init__(
        self,
        consumer: GroupConsumer,
        commits: Commits,
        arrivals: Arrivals,
        certainty: Certainty,
        holdings: KafkaHoldings,
        *,
        revoke_grace_s: float,
    ) -> None:
        self._consumer = consumer
        self._commits = commits
        self._arrivals = arrivals
        self._certainty = certainty
        self._holdings = holdings
        self._revoke_grace_s = revoke_grace_s
        self.commands = ThreadCommands()
        self.is_retiring = False

    # -- the group ------------------------------------------------------------------------------------------------

    def on_assign(self, _: Consumer, places: Places) -> None:
        self._consumer.accept(places)
        if self._consumer.is_subscribed:
            self._arrivals.add(_partitions(places))

    def on_lost(self, _: Consumer, places: Places) -> None:
        partitions = _partitions(places)
        self._arrivals.take_back(partitions)
        self.lose(self._held(partitions))

    def on_revoke(self, _: Consumer, places: Places) -> None:
        """Report these as revoked and wait for their release. The group goes on when this returns."""
        partitions = _partitions(places)
        holds = self._held(partitions)
        unannounced = [hold for hold in holds if self._holdings.withhold(hold)]
        announced = [hold for hold in holds if hold not in unannounced]
        try:
            self._holdings.drop(unannounced, fenced=False)
            self._put_back([*unannounced, *self._arrivals.take_back(partitions)])
            if announced and not self._holdings.closed:
                self._hand_over(announced)
        finally:
            self._arrivals.take_back(partitions)
            self.lose(self._held(partitions))

    def _hand_over(self, holds: Sequence[KafkaHold]) -> None:
        deadline = clock.now() + self._revoke_grace_s
        member, looked = self._consumer.member_id, clock.now()
        self._holdings.revoke(holds, grace_s=self._revoke_grace_s, deadline=deadline)
        while clock.now() < deadline and not self._holdings.closed and not self._certainty.is_idle:
            if clock.now() > looked + _MEMBER_LOOK_S:
                looked = clock.now()
                if self._consumer.member_id != member or not self._consumer.has_assignment:
                    return  # the group did not wait for us
                self._certainty.look()
            self.commands.serve_one(_POLL_S)
            self._commits.work_at_once(deadline)
            if not any(self._is_held(hold) for hold in holds):
                return

    def _held(self, partitions: set[Partition]) -> list[KafkaHold]:
        return [hold for hold in self._holdings.all() if hold.partition in partitions]

    def _is_held(self, hold: KafkaHold) -> bool:
        return self._holdings.held.get(hold.partition) is hold

    def _put_back(self, holds: Sequence[KafkaHold]) -> None:
        """No event of these can have run, so they are given back as clean as they were."""
        if holds:
            self._commits.put_back(holds)

    # -- this member ----------------------------------------------------------------------------------------------

    def release(self, holds: Sequence[KafkaHold], future: "Future[None]", *, drained: bool) -> None:
        ours = [hold for hold in holds if self._is_held(hold)]
        if any(not hold.revoking for hold in ours):
            self.is_retiring = True
            self._arrivals.stop()

        def let_go() -> None:
            self._holdings.drop(ours, fenced=False)
            if not future.done():
                future.set_result(None)

        self._commits.release(ours, drained=drained, then=let_go)

    def lose(self, holds: Sequence[KafkaHold]) -> None:
        self._commits.withdraw(holds)
        self._holdings.drop(holds, fenced=True)

    def begin_again(self, hold: KafkaHold) -> None:
        """The log is not the one that was assigned: hold the partition again, under another epoch."""
        if self._is_held(hold):
            self.lose([hold])
            self._arrivals.retry(hold.partition)

    def lose_all(self) -> None:
        self._arrivals.take_back_all()
        self.lose(self._holdings.all())

    def drop_out(self) -> None:
        """Leave the group without a release."""
        self.lose_all()
        self._consumer.unsubscribe()

    def leave(self) -> None:
        """Leave the group for good. Partitions that were not released are unclean for their next owner."""
        unannounced = [hold for hold in self._holdings.all() if not hold.announced]
        self._put_back([*unannounced, *self._arrivals.take_back_all()])
        self.commands.serve()
        self._consumer.leave()


def _partitions(places: Places) -> set[Partition]:
    return {Partition(place.topic, place.partition) for place in places}
