"""The simulated broker: logs with holes, one group with owners, leases and fences, and an aside. It keeps the
contract to the letter, and does what the contract leaves open in every way it may."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from onward.brokers.base import (
    AsideRecord,
    Assigned,
    Fenced,
    Message,
    Moved,
    Progress,
    Reached,
    Revoked,
    State,
)
from onward.brokers.core.progress_codec import LIMIT_CHARS, decode, encode
from onward.event import Delivery, Event, Partition

if TYPE_CHECKING:
    from onward.testing.simulator.process import Process
    from onward.testing.simulator.world import World

LOG_ID = "log"


class Claim:
    """One partition: its log, and what the group has stored about it."""

    def __init__(self, partition: Partition, start: int) -> None:
        self.partition = partition
        self.positions: list[int] = []
        self.events: list[Event | None] = []  # beside the positions; None: compacted away
        self.end = start  # of the log; markers at its tail take positions too
        self.owner: Session | None = None
        self.target: Session | None = None  # who should own it
        self.epoch = 0  # the owner's
        self.fence = 0
        self.next = start  # to read
        self.paused = False
        self.revoking = False
        self.unclean = False
        self.killed = False  # the last owner was killed by an event
        self.free_at = 0.0  # nobody else may own it before
        self.stored: Progress | None = None
        self.records: dict[int, AsideRecord] = {}

    def append(self, event: Event, gap: int) -> int:
        position = self.end + gap
        self.positions.append(position)
        self.events.append(event)
        self.end = position + 1
        return position

    def trim(self) -> int:
        """Retention: what is settled leaves the log."""
        count = bisect_left(self.positions, self.watermark)
        del self.positions[:count]
        del self.events[:count]
        return count

    @property
    def watermark(self) -> int:
        return self.stored.watermark if self.stored else 0

    @property
    def readable(self) -> bool:
        return not self.paused and not self.revoking and self.next < self.end


class Session:
    """One member of the group: what the broker, and the subscription in the member's process, know of it."""

    def __init__(self, process: "Process", broker: "Broker", lease_until: float) -> None:
        self.process = process
        self.broker = broker
        self.name = process.name
        self.queue: deque[Message] = deque()
        self.lease_until = lease_until
        self.epochs = 0
        self.closed = False
        self.leaving = False
        self.expelled: list[Partition] | None = None  # what it lost and has not been told
        self._unheard = 0  # Fenced messages on their way
        self._frozen = 0.0

    def owns(self, partition: Partition, epoch: int) -> bool:
        claim = self.broker.claims[partition]
        return claim.owner is self and claim.epoch == epoch

    def sure_until(self) -> float:
        """Not later than the first loss that the process has not heard of."""
        return self._frozen if self._unheard else self.lease_until

    def lose(self) -> None:
        if not self._unheard:
            self._frozen = self.lease_until
        self._unheard += 1

    def heard(self) -> None:
        self._unheard -= 1


class Broker:
    def __init__(self, world: "World", partitions: Sequence[Partition]) -> None:
        self.world = world
        first = world.profile.first_position
        self.claims = {p: Claim(p, first + world.rng.choice((0, 0, 37))) for p in partitions}
        self.sessions: list[Session] = []  # those that take part

    # -- logs ---------------------------------------------------------------------------------------------------

    def publish(self, partition: Partition, event: Event, gap: int) -> int:
        claim = self.claims[partition]
        position = claim.append(event, gap)
        self.ring(claim)
        return position

    def marker(self, partition: Partition, count: int) -> None:
        claim = self.claims[partition]
        claim.end += count
        self.ring(claim)

    def ring(self, claim: Claim) -> None:
        if claim.owner is not None:
            claim.owner.process.ring()

    # -- members ------------------------------------------------------------------------------------------------

    def join(self, process: "Process") -> Session:
        session = Session(process, self, self.world.now + self.world.profile.lease_s)
        self.sessions.append(session)
        self.rebalance()
        return session

    def renew(self, session: Session) -> None:
        """The member's broker thread has called."""
        if session.expelled is not None:
            lost, session.expelled = session.expelled, None
            session.queue.append(Fenced(lost))
            self.sessions.append(session)
            session.process.ring()
            session.lease_until = self.world.now + self.world.profile.lease_s
            self.rebalance()
        session.lease_until = self.world.now + self.world.profile.lease_s

    def expire(self, session: Session) -> None:
        """Its lease has run out, or its connection has closed."""
        if session.expelled is not None or session.closed:
            return
        session.expelled = [claim.partition for claim in self.claims.values() if claim.owner is session]
        session.lose()
        self.sessions.remove(session)
        for partition in session.expelled:
            self._vacate(self.claims[partition], unclean=True)
        self.rebalance()

    def close(self, session: Session) -> None:
        """It leaves; what it has not released is told unclean to the next."""
        session.closed = True
        if session in self.sessions:
            self.sessions.remove(session)
        for claim in self.claims.values():
            if claim.owner is session:
                self._vacate(claim, unclean=True)
        self.rebalance()

    def rebalance(self) -> None:
        takers = [session for session in self.sessions if not session.leaving]
        shift = self.world.rng.randrange(4)
        asked: dict[Session, list[Partition]] = {}
        for index, claim in enumerate(self.claims.values()):
            claim.target = takers[(index + shift) % len(takers)] if takers else None
            if claim.owner is None:
                self._offer(claim)
            elif claim.owner is not claim.target and claim.target is not None and not claim.revoking:
                claim.revoking = True
                asked.setdefault(claim.owner, []).append(claim.partition)
        for session, partitions in asked.items():
            self.world.counts["revoked"] += 1
            session.queue.append(Revoked(partitions, self.world.profile.revoke_s))
            session.process.ring()

    def heard(self, session: Session, message: Revoked) -> None:
        """The process was told: its time to release begins."""
        for partition in message.partitions:
            epoch = self.claims[partition].epoch
            self.world.after(message.deadline_s + 0.5, self._overdue, session, partition, epoch)

    def _overdue(self, session: Session, partition: Partition, epoch: int) -> None:
        if session.owns(partition, epoch) and self.claims[partition].revoking:
            self.world.counts["overdue"] += 1
            self.fence(partition)

    def fence(self, partition: Partition, *, again: bool = False) -> None:
        """Take a partition away without asking; `again`: the same member has it back at once (a reconnect)."""
        claim = self.claims[partition]
        session = claim.owner
        if session is None:
            return
        session.queue.append(Fenced([partition]))
        session.lose()
        session.process.ring()
        until = 0.0 if again else session.lease_until
        self._vacate(claim, unclean=True, free_at=until)
        claim.target = session if again else claim.target
        self._offer(claim)

    def release(self, session: Session, partition: Partition, epoch: int, drained: bool) -> None:
        if session.owns(partition, epoch):
            self._vacate(self.claims[partition], unclean=not drained)
            if session.leaving:
                self.rebalance()
            else:
                self._offer(self.claims[partition])

    def _vacate(self, claim: Claim, *, unclean: bool, free_at: float = 0.0) -> None:
        owner = claim.owner
        assert owner is not None
        if self.world.tracing:
            self.world.say("broker", f"{claim.partition} leaves {owner.name} {'unclean' if unclean else 'clean'}")
        claim.killed = owner.process.killed
        claim.owner, claim.revoking, claim.unclean, claim.free_at = None, False, unclean, free_at

    def _offer(self, claim: Claim) -> None:
        target = claim.target
        if claim.owner is not None or target is None or target.leaving or target not in self.sessions:
            return
        if self.world.now < claim.free_at:
            self.world.after(claim.free_at - self.world.now, self._offer, claim)
            return
        target.epochs += 1
        claim.owner, claim.epoch, claim.fence = target, target.epochs, claim.fence + 1
        claim.next = claim.watermark
        claim.paused = False
        self.world.witness.owned(claim)
        target.queue.append(
            Assigned(claim.partition, claim.epoch, claim.fence, LOG_ID, claim.stored, claim.unclean, shared=False)
        )
        target.process.ring()

    # -- receiving ----------------------------------------------------------------------------------------------

    def receive(self, session: Session, limit: int, max_bytes: int) -> list[Message]:
        messages: list[Message] = list(session.queue)
        session.queue.clear()
        claims = [claim for claim in self.claims.values() if claim.owner is session and claim.readable]
        if len(claims) > 1:
            turn = self.world.rng.randrange(len(claims))
            claims = claims[turn:] + claims[:turn]
        for claim in claims:
            limit, max_bytes = self._read(claim, limit, max_bytes, messages)
        return messages

    def _read(self, claim: Claim, limit: int, max_bytes: int, messages: list[Message]) -> tuple[int, int]:
        index = bisect_left(claim.positions, claim.next)
        whole = max_bytes
        while limit > 0 and index < len(claim.positions):
            event = claim.events[index]
            if event is not None:
                if event.size > max_bytes and whole != max_bytes:
                    return 0, 0
                messages.append(Delivery(event, claim.partition, claim.positions[index], claim.epoch))
                limit -= 1
                max_bytes -= event.size
            claim.next = claim.positions[index] + 1
            index += 1
            if max_bytes <= 0:
                return 0, 0
        if limit > 0:
            claim.next = claim.end
        if claim.next == claim.end or self.world.rng.random() < 0.1:
            messages.append(Reached(claim.partition, claim.epoch, claim.next))
        return limit, max_bytes

    def waits(self, session: Session) -> bool:
        """Is there something to receive?"""
        if session.queue:
            return True
        return any(claim.owner is session and claim.readable for claim in self.claims.values())

    # -- settling -----------------------------------------------------------------------------------------------

    def write(self, session: Session, epochs: dict[Partition, int], records: Sequence[AsideRecord]) -> None:
        for record in records:
            if session.owns(record.partition, epochs[record.partition]):
                self.world.witness.written(record)
                self.claims[record.partition].records[record.position] = record

    def commit(self, session: Session, progress: Sequence[Progress]) -> list[Partition]:
        """Answers the partitions that are not this member's any more."""
        lost = []
        for told in progress:
            claim = self.claims[told.partition]
            if session.owns(told.partition, told.epoch):
                claim.stored = self._fitted(told)
                self.world.witness.progress(claim.stored, claim.end)
            else:
                self.world.counts["fenced settles"] += 1
                lost.append(told.partition)
        return lost

    def _fitted(self, told: Progress) -> Progress:
        """What comes back of it, where there is little room."""
        limit = self.world.profile.metadata
        if limit >= LIMIT_CHARS or not told.done_above:
            return told
        done = msgspec.structs.replace(told, tries={})
        encoded = encode(done, fence=self.claims[told.partition].fence, clean=False, log_id=LOG_ID, limit=limit)
        self.world.counts["truncated"] += encoded.done_dropped > 0
        above = decode(encoded.text, told.watermark, log_id=LOG_ID).done_above
        self.world.counts["sparse intervals stored"] += bool(above) and self.world.profile.stride > 1
        return msgspec.structs.replace(told, done_above=above)

    def erase(self, session: Session, epochs: dict[Partition, int], ids: Sequence[tuple[Partition, int]]) -> None:
        for partition, position in ids:
            claim = self.claims[partition]
            if partition in epochs and session.owns(partition, epochs[partition]) and position in claim.records:
                del claim.records[position]
                self.world.witness.gone(partition, position)

    # -- the aside ----------------------------------------------------------------------------------------------

    def load(self, partition: Partition, after: int | None, limit: int, max_bytes: int) -> list[AsideRecord]:
        dead = self.world.profile.limits.on_dead == "hold"
        page: list[AsideRecord] = []
        records = self.claims[partition].records
        for position in sorted(records):
            record = records[position]
            if (after is not None and position <= after) or (record.state is State.DEAD and not dead):
                continue
            if len(page) == limit or (page and record.event.size > max_bytes):
                break
            page.append(record)
            max_bytes -= record.event.size
        return page

    def move(self, records: Sequence[AsideRecord], to: State | None, due: float | None) -> None:
        """An operator's compare and set: of records of one partition."""
        claim = self.claims[records[0].partition]
        for record in records:
            if to is None:
                del claim.records[record.position]
                self.world.witness.moved(record, None)
                continue
            moved = record.moved(to, due)
            claim.records[record.position] = moved
            self.world.witness.moved(record, moved)
        if claim.owner is not None:
            ids = [record.id for record in records]
            claim.owner.queue.append(Moved(claim.partition, claim.epoch, ids, to, due))
            claim.owner.process.ring()
