"""The members of the simulated group: their sessions, leases and losses. How partitions are given to them is up to
the kind of broker: one owner each (broker.py), or shared by all (shared.py)."""

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
WALL = 1.0e9  # the wall clock is this far ahead of the other
SKEW_S = 0.25  # at the most, of a process's wall clock


def partition_of(id_: str) -> Partition:
    """Of a record."""
    return Partition(TOPIC, int(id_.rsplit(":", 2)[1]))


def move_all(
    world: "World",
    store: dict[str, AsideRecord],
    records: Sequence[AsideRecord],
    to: State | None,
    due: float | None,
) -> None:
    """Records of a store, as an operator moves or removes them."""
    for record in records:
        moved = record.moved(to, due) if to is not None else None
        if moved is None:
            del store[record.id]
        else:
            store[record.id] = moved
        world.witness.moved(record, moved)


class Session:
    """One member of the group: what the broker, and the subscription in the member's process, know of it."""

    def __init__(self, process: "SimulatedProcess", group: "Group", lease_until: float) -> None:
        self.process = process
        self.group = group
        self.name = process.name
        self.queue: deque[Message] = deque()
        self.lease_until = lease_until
        self.epochs = 0
        self.closed = False
        self.leaving = False
        self.expelled: list[Partition] | None = None  # what it lost and has not heard of
        self._unheard = 0  # Fenced messages on their way
        self._frozen = 0.0

    def owns(self, partition: Partition, epoch: int) -> bool:
        return self.group.owns(self, partition, epoch)

    def send(self, message: Message) -> None:
        self.queue.append(message)
        self.process.ring()

    def sure_until(self) -> float:
        """Not later than the first loss that the process has not heard of."""
        return self._frozen if self._unheard else self.lease_until

    def lose(self) -> None:
        if not self._unheard:
            self._frozen = self.lease_until
        self._unheard += 1

    def heard(self) -> None:
        self._unheard -= 1


class Group(ABC):
    def __init__(self, world: "World", partitions: Sequence[Partition]) -> None:
        self.world = world
        self.partitions = partitions
        self.sessions: list[Session] = []  # those that take part

    # -- members ------------------------------------------------------------------------------------------------

    def join(self, process: "SimulatedProcess") -> Session:
        session = Session(process, self, self.world.now + self.world.profile.lease_s)
        self.sessions.append(session)
        self.rebalance()
        return session

    def renew(self, session: Session) -> None:
        """The member's broker thread has called."""
        if session.expelled is not None:
            lost, session.expelled = session.expelled, None
            self.sessions.append(session)
            session.send(Fenced(lost))
            session.lease_until = self.world.now + self.world.profile.lease_s
            self.rebalance()
        session.lease_until = self.world.now + self.world.profile.lease_s

    def expire(self, session: Session) -> None:
        """Its lease has run out, or its connection has closed."""
        if session.expelled is not None or session.closed:
            return
        session.expelled = self.held(session)
        session.lose()
        self.sessions.remove(session)
        for partition in session.expelled:
            self.vacate(session, partition, unclean=True)
        self.rebalance()

    def close(self, session: Session) -> None:
        """It leaves. What it has not released ends unclean."""
        session.closed = True
        if session in self.sessions:
            self.sessions.remove(session)
        for partition in self.held(session):
            self.vacate(session, partition, unclean=True)
        self.rebalance()

    def takers(self) -> list[Session]:
        return [session for session in self.sessions if not session.leaving]

    def ask_back(self, session: Session, partitions: Sequence[Partition]) -> None:
        self.world.counts["revoked"] += 1
        session.send(Revoked(partitions, self.world.profile.revoke_s))

    def heard(self, session: Session, message: Revoked, epochs: dict[Partition, int]) -> None:
        """The process has received it, under these epochs: its time to release begins."""
        for partition in message.partitions:
            if partition in epochs:
                delay_s = message.deadline_s + 0.5
                self.world.after(delay_s, self._overdue, session, partition, epochs[partition])

    def _overdue(self, session: Session, partition: Partition, epoch: int) -> None:
        if session.owns(partition, epoch) and self.is_revoking(session, partition):
            self.world.counts["overdue"] += 1
            self.take_away(session, partition)

    def take_away(self, session: Session, partition: Partition, *, again: bool = False) -> None:
        """Without asking; `again`: the same member has it back at once (a reconnect)."""
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
        """Give a partition to those who should have it; `target`: to this one."""

    @abstractmethod
    def vacate(self, session: Session, partition: Partition, *, unclean: bool, free_at: float = 0.0) -> None: ...

    @abstractmethod
    def fence(self, partition: Partition, *, again: bool = False) -> None:
        """Take a partition away from a member that has it."""

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
        """What this kind of broker does besides."""

    # -- settling -----------------------------------------------------------------------------------------------

    @abstractmethod
    def write(self, session: Session, epochs: dict[Partition, int], records: Sequence[AsideRecord]) -> None: ...

    @abstractmethod
    def commit(self, session: Session, progress: Sequence[Progress]) -> list[Partition]:
        """Returns the partitions that are not this member's any more."""

    @abstractmethod
    def erase(self, session: Session, epochs: dict[Partition, int], ids: Sequence[str]) -> None: ...

    @abstractmethod
    def stored(self, partition: Partition) -> Progress | None: ...

    @abstractmethod
    def standings(self) -> list[tuple[Partition, int, int]]:
        """How far each partition is settled, and where its end is."""

    # -- the aside ----------------------------------------------------------------------------------------------

    @abstractmethod
    def records(self, partition: Partition) -> Collection[AsideRecord]: ...

    @abstractmethod
    def load(self, partition: Partition, after: int | None, limit: int, max_bytes: int) -> list[AsideRecord]: ...

    @abstractmethod
    def move(self, records: Sequence[AsideRecord], to: State | None, due: float | None) -> None:
        """An operator's compare and set: of records of one partition."""
