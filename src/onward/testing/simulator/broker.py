"""The simulated broker whose partitions have owners: logs with holes, fences and an aside.

It keeps the contract exactly. Where the contract leaves a choice, it chooses at random."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from onward.brokers.base import AsideRecord, Assigned, Message, Moved, Progress, Reached, State
from onward.brokers.core.progress_codec import LIMIT_CHARS, decode, encode
from onward.event import Delivery, Event, Partition
from onward.testing.simulator.group import Group, Session, move_all, partition_of

if TYPE_CHECKING:
    from onward.testing.simulator.world import World

LOG_ID = "log"


class OwnedPartition:
    """One partition: its log, and what the group has stored about it."""

    def __init__(self, partition: Partition, start: int) -> None:
        self.partition = partition
        self.positions: list[int] = []
        self.events: list[Event | None] = []  # one per position; None: compacted away
        self.end = start  # of the log; markers at its end take positions too
        self.owner: Session | None = None
        self.target: Session | None = None  # the member that should own it
        self.epoch = 0  # of the owner
        self.fence = 0
        self.next = start  # the next position to read
        self.paused = False
        self.revoking = False
        self.unclean = False
        self.killed = False  # the last owner was killed by an event
        self.free_at = 0.0  # no other member may own it before this time
        self.stored: Progress | None = None
        self.records: dict[str, AsideRecord] = {}  # by id

    def append(self, event: Event, gap: int) -> int:
        position = self.end + gap
        self.positions.append(position)
        self.events.append(event)
        self.end = position + 1
        return position

    def trim(self) -> int:
        """Retention: remove the settled events from the log. Returns how many."""
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


class OwnedBroker(Group):
    """Every partition has one owner at a time."""

    def __init__(self, world: "World", partitions: Sequence[Partition]) -> None:
        super().__init__(world, partitions)
        first = world.profile.first_position
        self.claims = {p: OwnedPartition(p, first + world.rng.choice((0, 0, 37))) for p in partitions}

    # -- logs ---------------------------------------------------------------------------------------------------

    def publish(self, partition: Partition, event: Event, gap: int) -> int:
        claim = self.claims[partition]
        position = claim.append(event, gap)
        self._ring(claim)
        return position

    def marker(self, partition: Partition, count: int) -> None:
        claim = self.claims[partition]
        claim.end += count
        self._ring(claim)

    def _ring(self, claim: OwnedPartition) -> None:
        if claim.owner is not None:
            claim.owner.process.ring()

    # -- ownership ----------------------------------------------------------------------------------------------

    def owns(self, session: Session, partition: Partition, epoch: int) -> bool:
        claim = self.claims[partition]
        return claim.owner is session and claim.epoch == epoch

    def held(self, session: Session) -> list[Partition]:
        return [claim.partition for claim in self.claims.values() if claim.owner is session]

    def is_revoking(self, session: Session, partition: Partition) -> bool:
        return self.claims[partition].revoking

    def rebalance(self) -> None:
        candidates = self.candidates()
        shift = self.world.rng.randrange(4)
        revoked: dict[Session, list[Partition]] = {}
        for index, claim in enumerate(self.claims.values()):
            claim.target = candidates[(index + shift) % len(candidates)] if candidates else None
            if claim.owner is None:
                self.offer(claim.partition)
            elif claim.owner is not claim.target and claim.target is not None and not claim.revoking:
                claim.revoking = True
                revoked.setdefault(claim.owner, []).append(claim.partition)
        for session, partitions in revoked.items():
            self.revoke(session, partitions)

    def fence(self, partition: Partition, *, again: bool = False) -> None:
        owner = self.claims[partition].owner
        if owner is not None:
            self.take_away(owner, partition, again=again)

    def release(self, session: Session, partition: Partition, epoch: int, drained: bool) -> None:
        if session.owns(partition, epoch):
            self.vacate(session, partition, unclean=not drained)
            if session.leaving:
                self.rebalance()
            else:
                self.offer(partition)

    def vacate(self, session: Session, partition: Partition, *, unclean: bool, free_at: float = 0.0) -> None:
        claim = self.claims[partition]
        assert claim.owner is session
        if self.world.tracing:
            self.world.trace(
                "broker", f"{session.name} no longer owns {partition}, {'unclean' if unclean else 'clean'}"
            )
        claim.killed = session.process.killed
        claim.owner, claim.revoking, claim.unclean, claim.free_at = None, False, unclean, free_at

    def offer(self, partition: Partition, target: Session | None = None) -> None:
        claim = self.claims[partition]
        target = claim.target = target or claim.target
        if claim.owner is not None or target is None or target.leaving or target not in self.sessions:
            return
        if self.world.now < claim.free_at:
            self.world.after(claim.free_at - self.world.now, self.offer, partition)
            return
        target.epochs += 1
        claim.owner, claim.epoch, claim.fence = target, target.epochs, claim.fence + 1
        claim.next = claim.watermark
        claim.paused = False
        self.world.witness.owned(claim)
        target.send(Assigned(partition, claim.epoch, claim.fence, LOG_ID, claim.stored, claim.unclean))

    def pause(self, session: Session, partition: Partition, epoch: int, *, paused: bool) -> None:
        if session.owns(partition, epoch):
            self.claims[partition].paused = paused

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

    def _read(self, claim: OwnedPartition, limit: int, max_bytes: int, messages: list[Message]) -> tuple[int, int]:
        index = bisect_left(claim.positions, claim.next)
        allowed = max_bytes
        while limit > 0 and index < len(claim.positions):
            event = claim.events[index]
            if event is not None:
                if event.size > max_bytes and allowed != max_bytes:
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

    # -- faults -------------------------------------------------------------------------------------------------

    def faults(self) -> Sequence[Callable[[], None]]:
        return self.duplicate, self.stale_delivery, self.trim, self.compact

    def _claim(self) -> OwnedPartition:
        return self.world.rng.choice(list(self.claims.values()))

    def duplicate(self) -> None:
        """Deliver an event a second time."""
        self._deliver_out_of_turn("duplicate", ahead=0, epochs_ago=0)

    def stale_delivery(self) -> None:
        """Deliver an event under an epoch that has ended. The current ownership may not have read this event yet."""
        self._deliver_out_of_turn("stale delivery", ahead=15, epochs_ago=1)

    def _deliver_out_of_turn(self, what: str, *, ahead: int, epochs_ago: int) -> None:
        """Deliver an event that was read, or one of the next `ahead` events."""
        claim = self._claim()
        end = bisect_left(claim.positions, claim.next) + ahead
        seen = [(p, event) for p, event in zip(claim.positions[:end], claim.events[:end], strict=True) if event]
        if claim.owner is None or not seen:
            return
        self.world.note("broker", what)
        position, event = self.world.rng.choice(seen[-5:])
        claim.owner.send(Delivery(event, claim.partition, position, claim.epoch - epochs_ago))

    def trim(self) -> None:
        """Retention removes settled events from the log."""
        self.world.counts["trimmed"] += self._claim().trim()

    def compact(self) -> None:
        """Remove some events that are settled above the watermark: the log gets holes where a member may still read."""
        claim = self._claim()
        for start, stop in claim.stored.done_above if claim.stored else ():
            for index, position in enumerate(claim.positions):
                event = claim.events[index]
                if event is not None and start <= position < stop and self.world.rng.random() < 0.5:
                    self.world.counts["compacted"] += 1
                    self.world.ledger.story(event).compacted = True
                    claim.events[index] = None

    # -- settling -----------------------------------------------------------------------------------------------

    def write(self, session: Session, epochs: dict[Partition, int], records: Sequence[AsideRecord]) -> None:
        for record in records:
            if session.owns(record.partition, epochs[record.partition]):
                self.world.witness.written(record)
                self.claims[record.partition].records[record.id] = record

    def commit(self, session: Session, progress: Sequence[Progress]) -> list[Partition]:
        lost = []
        for each in progress:
            claim = self.claims[each.partition]
            if session.owns(each.partition, each.epoch):
                claim.stored = self._fitted(each)
                self.world.witness.progress(claim.stored, claim.end)
            else:
                self.world.counts["fenced settles"] += 1
                lost.append(each.partition)
        return lost

    def _fitted(self, progress: Progress) -> Progress:
        """The part of the progress that fits into the broker's metadata."""
        limit = self.world.profile.metadata
        if limit >= LIMIT_CHARS or not progress.done_above:
            return progress
        done = msgspec.structs.replace(progress, tries={})
        encoded = encode(done, fence=self.claims[progress.partition].fence, clean=False, log_id=LOG_ID, limit=limit)
        self.world.counts["truncated"] += encoded.done_dropped > 0
        above = decode(encoded.text, progress.watermark, log_id=LOG_ID).done_above
        self.world.counts["sparse intervals stored"] += bool(above) and self.world.profile.stride > 1
        return msgspec.structs.replace(progress, done_above=above)

    def erase(self, session: Session, epochs: dict[Partition, int], ids: Sequence[str]) -> None:
        for id_ in ids:
            partition = partition_of(id_)
            if partition in epochs and session.owns(partition, epochs[partition]):
                record = self.claims[partition].records.pop(id_, None)
                if record is not None:
                    self.world.witness.gone(record)

    def stored(self, partition: Partition) -> Progress | None:
        return self.claims[partition].stored

    def standings(self) -> list[tuple[Partition, int, int]]:
        return [(claim.partition, claim.watermark, claim.end) for claim in self.claims.values()]

    # -- the aside ----------------------------------------------------------------------------------------------

    def records(self, partition: Partition) -> Collection[AsideRecord]:
        return self.claims[partition].records.values()

    def load(self, partition: Partition, after: int | None, limit: int, max_bytes: int) -> list[AsideRecord]:
        dead = self.world.profile.limits.on_dead == "hold"
        page: list[AsideRecord] = []
        for record in sorted(self.records(partition), key=lambda each: each.position):
            if (after is not None and record.position <= after) or (record.state is State.DEAD and not dead):
                continue
            if len(page) == limit or (page and record.event.size > max_bytes):
                break
            page.append(record)
            max_bytes -= record.event.size
        return page

    def move(self, records: Sequence[AsideRecord], to: State | None, due: float | None) -> None:
        claim = self.claims[records[0].partition]
        move_all(self.world, claim.records, records, to, due)
        if claim.owner is not None:
            ids = [record.id for record in records]
            claim.owner.send(Moved(claim.partition, claim.epoch, ids, to, due))
