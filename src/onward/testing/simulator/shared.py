"""The simulated broker whose partitions are shared: work queues with competing members, and an aside that delivers
retries by itself. Positions count the deliveries of one ownership of one member: each begins at 1."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from onward.brokers.base import AsideRecord, Assigned, Message, Progress, State
from onward.event import Delivery, Event, Partition, Tries
from onward.testing.simulator.checkers import broken
from onward.testing.simulator.group import SKEW_S, WALL, Group, Session, move_all

if TYPE_CHECKING:
    from onward.testing.simulator.world import World


class Item:
    """An event that was not delivered yet, or was delivered and not settled."""

    __slots__ = ("event", "tries")

    def __init__(self, event: Event, tries: Tries | None = None) -> None:
        self.event = event
        self.tries = tries


class Share:
    """The share of one member in a queue, under one epoch."""

    __slots__ = ("epoch", "last", "log_id", "paused", "revoking", "unsettled")

    def __init__(self, epoch: int, log_id: str) -> None:
        self.epoch = epoch
        self.log_id = log_id
        self.last = 0  # the highest position so far
        self.unsettled: dict[int, Item] = {}  # by position
        self.paused = False
        self.revoking = False

    def take(self, item: Item) -> int:
        self.last += 1
        self.unsettled[self.last] = item
        return self.last


class SharedQueue:
    """One partition: the events to deliver, the members that share it, and its records."""

    def __init__(self) -> None:
        self.ready: deque[Item] = deque()
        self.shares: dict[Session, Share] = {}
        self.records: dict[str, AsideRecord] = {}  # by id
        self.accepted: list[Event] = []


class SharedBroker(Group):
    def __init__(self, world: "World", partitions: Sequence[Partition]) -> None:
        super().__init__(world, partitions)
        self.queues = {partition: SharedQueue() for partition in partitions}

    # -- events -------------------------------------------------------------------------------------------------

    def publish(self, partition: Partition, event: Event, gap: int) -> int:
        self.queues[partition].accepted.append(event)
        self._put(partition, Item(event))
        return len(self.queues[partition].accepted)

    def marker(self, partition: Partition, count: int) -> None:
        """A queue has no markers."""

    def _put(self, partition: Partition, item: Item, *, first: bool = False) -> None:
        queue = self.queues[partition]
        if first:
            queue.ready.appendleft(item)
        else:
            queue.ready.append(item)
        for session in queue.shares:
            session.process.ring()

    def receive(self, session: Session, limit: int, max_bytes: int) -> list[Message]:
        messages: list[Message] = list(session.queue)
        session.queue.clear()
        held = self.held(session)
        self.world.rng.shuffle(held)
        for partition in held:
            share = self.queues[partition].shares[session]
            if not share.paused and not share.revoking:
                limit, max_bytes = self._read(partition, share, limit, max_bytes, messages)
        return messages

    def _read(
        self, partition: Partition, share: Share, limit: int, max_bytes: int, messages: list[Message]
    ) -> tuple[int, int]:
        """Read only a few at a time, so that the other members get some too."""
        ready, few = self.queues[partition].ready, self.world.rng.choice((1, 3, limit))
        while ready and limit > 0 and few > 0 and max_bytes > 0:
            item = ready[0]
            if item.event.size > max_bytes and messages:
                return 0, 0
            ready.popleft()
            position = share.take(item)
            messages.append(
                Delivery(item.event, partition, position, share.epoch, log_id=share.log_id, tries=item.tries)
            )
            limit, few, max_bytes = limit - 1, few - 1, max_bytes - item.event.size
        return limit, max_bytes

    # -- ownership ----------------------------------------------------------------------------------------------

    def owns(self, session: Session, partition: Partition, epoch: int) -> bool:
        share = self.queues[partition].shares.get(session)
        return share is not None and share.epoch == epoch

    def held(self, session: Session) -> list[Partition]:
        return [partition for partition, queue in self.queues.items() if session in queue.shares]

    def is_revoking(self, session: Session, partition: Partition) -> bool:
        return self.queues[partition].shares[session].revoking

    def rebalance(self) -> None:
        """Give every member a share of every partition. Now and then revoke one."""
        for partition, queue in self.queues.items():
            self.offer(partition)
            revocable = [session for session, share in queue.shares.items() if not share.revoking]
            if len(revocable) > 1 and self.world.rng.random() < 0.3:
                session = self.world.rng.choice(revocable)
                queue.shares[session].revoking = True
                self.revoke(session, [partition])

    def offer(self, partition: Partition, target: Session | None = None) -> None:
        queue = self.queues[partition]
        for session in [target] if target is not None else self.candidates():
            if session in queue.shares or session.leaving or session not in self.sessions:
                continue
            session.epochs += 1
            share = queue.shares[session] = Share(session.epochs, f"{session.name}-{session.epochs}")
            self.world.counts["shared by several"] += len(queue.shares) > 1
            session.send(Assigned(partition, share.epoch, None, share.log_id, None, False, shared=True))

    def vacate(self, session: Session, partition: Partition, *, unclean: bool, free_at: float = 0.0) -> None:
        """Give the unsettled events of this member to the others."""
        share = self.queues[partition].shares.pop(session)
        if self.world.tracing:
            self.world.trace(
                "broker", f"{session.name} no longer holds {partition}, {len(share.unsettled)} events unsettled"
            )
        self.world.witness.left(partition, unclean=unclean)
        for item in reversed(share.unsettled.values()):
            self.world.witness.requeued(item.event, unclean=unclean)
            self._put(partition, item, first=True)
        if not self.queues[partition].shares:
            self.world.after(0.0, self.offer, partition)

    def fence(self, partition: Partition, *, again: bool = False) -> None:
        if shares := list(self.queues[partition].shares):
            self.take_away(self.world.rng.choice(shares), partition, again=again)

    def release(self, session: Session, partition: Partition, epoch: int, drained: bool) -> None:
        if session.owns(partition, epoch):
            self.vacate(session, partition, unclean=not drained)
            self.world.after(self.world.rng.uniform(0.0, 3.0), self.offer, partition)

    def pause(self, session: Session, partition: Partition, epoch: int, *, paused: bool) -> None:
        if session.owns(partition, epoch):
            self.queues[partition].shares[session].paused = paused

    # -- faults -------------------------------------------------------------------------------------------------

    def faults(self) -> Sequence[Callable[[], None]]:
        return self.stale_delivery, self.stale_delivery

    def stale_delivery(self) -> None:
        """Deliver an event under an epoch that has ended, at a position that the current ownership has or will have."""
        rng = self.world.rng
        partition, queue = rng.choice(list(self.queues.items()))
        if queue.shares and queue.accepted:
            self.world.note("broker", "stale delivery")
            session, share = rng.choice(list(queue.shares.items()))
            position = rng.randint(1, share.last + 3)
            session.send(Delivery(rng.choice(queue.accepted), partition, position, share.epoch - 1))

    # -- settling -----------------------------------------------------------------------------------------------

    def write(self, session: Session, epochs: dict[Partition, int], records: Sequence[AsideRecord]) -> None:
        """Store the records of unsettled events. For a settled event, an earlier call stored the record, and it may
        have been delivered again since."""
        for record in records:
            if not session.owns(record.partition, epochs[record.partition]):
                continue
            queue = self.queues[record.partition]
            if record.position in queue.shares[session].unsettled:
                self.world.witness.written(record)
                queue.records[record.id] = record
                self._watch(record)

    def commit(self, session: Session, progress: Sequence[Progress]) -> list[Partition]:
        lost = []
        for each in progress:
            if not session.owns(each.partition, each.epoch):
                self.world.counts["fenced settles"] += 1
                lost.append(each.partition)
                continue
            unsettled = self.queues[each.partition].shares[session].unsettled
            for position in each.fresh:
                item = unsettled.pop(position, None)
                if item is not None:
                    self.world.witness.acknowledged(item.event)
        return lost

    def erase(self, session: Session, epochs: dict[Partition, int], ids: Sequence[str]) -> None:
        if ids:
            broken("records", f"{session.name} removes records of a shared partition: {ids}")

    def stored(self, partition: Partition) -> Progress | None:
        return None

    def standings(self) -> list[tuple[Partition, int, int]]:
        found = []
        for partition, queue in self.queues.items():
            left = len(queue.ready) + sum(len(share.unsettled) for share in queue.shares.values())
            found.append((partition, len(queue.accepted) - left, len(queue.accepted)))
        return found

    # -- the aside ----------------------------------------------------------------------------------------------

    def records(self, partition: Partition) -> Collection[AsideRecord]:
        return self.queues[partition].records.values()

    def load(self, partition: Partition, after: int | None, limit: int, max_bytes: int) -> list[AsideRecord]:
        broken("loading", f"the plane loads records of {partition}, which is shared")

    def move(self, records: Sequence[AsideRecord], to: State | None, due: float | None) -> None:
        store = self.queues[records[0].partition].records
        move_all(self.world, store, records, to, due)
        for record in records:
            if record.id in store:
                self._watch(store[record.id])

    def _watch(self, record: AsideRecord) -> None:
        """Deliver a waiting record when it is due, not earlier."""
        if record.state is State.WAITING and record.due is not None:
            self.world.at(max(self.world.now, record.due - WALL + SKEW_S), self._deliver, record)

    def _deliver(self, record: AsideRecord) -> None:
        if self.queues[record.partition].records.get(record.id) is record:  # otherwise it was moved or stored again
            del self.queues[record.partition].records[record.id]
            self.world.counts["shared retries"] += 1
            self.world.witness.retried(record)
            self._put(record.partition, Item(record.event, record.tries))
