"""The members of the simulated group: their sessions, leases and losses.

The kind of broker decides how members get partitions: one owner each (broker.py), or shared by all (shared.py)."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from onward.brokers.base import AsideRecord, Fenced, Message, Progress, Revoked, State
from onward.event import Event, Partition

if TYPE_CHECKING:
    from onward.testing.simulator.process import SimulatedProcess
    from onward.testing.simulator.world import World


TOPIC = "t"
WALL = 1.0e9  # how far the wall clock is ahead of the simulated clock
SKEW_S = 0.25  # how far the wall clock of a process may be off


def partition_of(id_: str) -> Partition:
    """The partition of the record with this id."""
    return Partition(TOPIC, int(id_.rsplit(":", 2)[1]))


def move_all(
    world: "World",
    store: dict[str, AsideRecord],
    records: Sequence[AsideRecord],
    to: State | None,
    due: float | None,
) -> None:
    """Move records of a store, or remove them (`to` None), as an operator does."""
    for record in records:
        moved = record.moved(to, due) if to is not None else None
        if moved is None:
            del store[record.id]
        else:
            store[record.id] = moved
        world.witness.moved(record, moved)


class Session:
    """One member of the group: its state at the broker and in the subscription of its process."""

    def __init__(self, process: "SimulatedProcess", group: "Group", lease_until: float) -> None:
        self.process = process
        self.group = group
        self.name = process.name
        self.queue: deque[Message] = deque()
        self.lease_until = lease_until
        self.epochs = 0
        self.closed = False
        self.leaving = False
        self.expelled: list[Partition] | None = None  # what it lost when its lease ended, until it renews again
        self._undelivered = 0  # Fenced messages that its process has not received
        self._frozen = 0.0

    def owns(self, partition: Partition, epoch: int) -> bool:
        return self.group.owns(self, partition, epoch)

    def send(self, message: Message) -> None:
        self.queue.append(message)
        self.process.ring()

    def sure_until(self) -> float:
        """While a Fenced message is undelivered, this does not grow."""
        return self._frozen if self._undelivered else self.lease_until

    def lose(self) -> None:
        if not self._undelivered:
            self._frozen = self.lease_until
        self._undelivered += 1

    def loss_received(self) -> None:
        self._undelivered -= 1


class Group(ABC):
    def __init__(self, world: "World", partitions: Sequence[Partition]) -> None:
        self.world = world
        self.partitions = partitions
        self.sessions: list[Session] = []  # those that are members now

    # -- members ------------------------------------------------------------------------------------------------

    def join(self, process: "SimulatedProcess") -> Session:
        session = Session(process, self, self.world.now + self.world.profile.lease_s)
        self.sessions.append(session)
        self.rebalance()
        return session

    def renew(self, session: Session) -> None:
        """The member has renewed its lease."""
        if session.expelled is not None:
            lost, session.expelled = session.expelled, None
            self.sessions.append(session)
            session.send(Fenced(lost))
            session.lease_until = self.world.now + self.world.profile.lease_s
            self.rebalance()
        session.lease_until = self.world.now + self.world.profile.lease_s

    def expire(self, session: Session) -> None:
        """The lease of the member has ended, or its connection has closed."""
        if session.expelled is not None or session.closed:
            return
        session.expelled = self.held(session)
        session.lose()
        self.sessions.remove(session)
        for partition in session.expelled:
            self.vacate(session, partition, unclean=True)
        self.rebalance()

    def close(self, session: Session) -> None:
        """The member leaves. Ownerships that it has not released end unclean."""
        session.closed = True
        if session in self.sessions:
            self.sessions.remove(session)
        for partition in self.held(session):
            self.vacate(session, partition, unclean=True)
        self.rebalance()

    def candidates(self) -> list[Session]:
        return [session for session in self.sessions if not session.leaving]

    def revoke(self, session: Session, partitions: Sequence[Partition]) -> None:
        self.world.counts["revoked"] += 1
        session.send(Revoked(partitions, self.world.profile.revoke_s))

    def revocation_received(self, session: Session, message: Revoked, epochs: dict[Partition, int]) -> None:
        """The process has received the message under these epochs. Its time to release begins now."""
        for partition in message.partitions:
            if partition in epochs:
                delay_s = message.deadline_s + 0.5
                self.world.after(delay_s, self._overdue, session, partition, epochs[partition])

    def _overdue(self, session: Session, partition: Partition, epoch: int) -> None:
        if session.owns(partition, epoch) and self.is_revoking(session, partition):
            self.world.counts["overdue"] += 1
            self.take_away(session, partition)

    def take_away(self, session: Session, partition: Partition, *, again: bool = False) -> None:
        """Take a partition without Revoked before. `again`: the same member gets it back at once, as in a reconnect."""
        session.send(Fenced([partition]))
        session.lose()
        self.vacate(session, partition, unclean=True, free_at=0.0 if again else session.lease_until)
        self.offer(partition, session if again else None)

    # -- ownership ----------------------------------------------------------------------------------------------

    @abstractmethod
    def owns(self, session: Session, partition: Partition, epoch: int) -> bool: ...

    @abstractmethod
    def held(self, session: Session) -> list[Partition]: ...

    @abstractmethod
    def is_revoking(self, session: Session, partition: Partition) -> bool: ...

    @abstractmethod
    def rebalance(self) -> None: ...

    @abstractmethod
    def offer(self, partition: Partition, target: Session | None = None) -> None:
        """Give a partition to the members that should have it, or to `target` alone."""

    @abstractmethod
    def vacate(self, session: Session, partition: Partition, *, unclean: bool, free_at: float = 0.0) -> None: ...

    @abstractmethod
    def fence(self, partition: Partition, *, again: bool = False) -> None:
        """Take the partition away from a member that holds it."""

    @abstractmethod
    def release(self, session: Session, partition: Partition, epoch: int, drained: bool) -> None: ...

    @abstractmethod
    def pause(self, session: Session, partition: Partition, epoch: int, *, paused: bool) -> None: ...

    # -- events -------------------------------------------------------------------------------------------------

    @abstractmethod
    def publish(self, partition: Partition, event: Event, gap: int) -> int: ...

    @abstractmethod
    def marker(self, partition: Partition, count: int) -> None: ...

    @abstractmethod
    def receive(self, session: Session, limit: int, max_bytes: int) -> list[Message]: ...

    @abstractmethod
    def faults(self) -> Sequence[Callable[[], None]]:
        """The faults that only this kind of broker has."""

    # -- settling -----------------------------------------------------------------------------------------------

    @abstractmethod
    def write(self, session: Session, epochs: dict[Partition, int], records: Sequence[AsideRecord]) -> None: ...

    @abstractmethod
    def commit(self, session: Session, progress: Sequence[Progress]) -> list[Partition]:
        """Returns the partitions that this member no longer holds."""

    @abstractmethod
    def erase(self, session: Session, epochs: dict[Partition, int], ids: Sequence[str]) -> None: ...

    @abstractmethod
    def stored(self, partition: Partition) -> Progress | None: ...

    @abstractmethod
    def standings(self) -> list[tuple[Partition, int, int]]:
        """For each partition: how far it is settled, and where its log ends."""

    # -- the aside ----------------------------------------------------------------------------------------------

    @abstractmethod
    def records(self, partition: Partition) -> Collection[AsideRecord]: ...

    @abstractmethod
    def load(self, partition: Partition, after: int | None, limit: int, max_bytes: int) -> list[AsideRecord]: ...

    @abstractmethod
    def move(self, records: Sequence[AsideRecord], to: State | None, due: float | None) -> None:
        """Move records of one partition as an operator does, or remove them (`to` None)."""
