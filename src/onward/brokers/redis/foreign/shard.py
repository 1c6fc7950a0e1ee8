"""An ownership of a partition whose stream belongs to other programs."""

from collections.abc import Mapping

import msgspec

from onward.brokers.base import Assigned, Moved, Progress, record_position
from onward.brokers.redis.foreign.entries import Misfit, StreamEntries
from onward.brokers.redis.foreign.leftovers import Leftovers
from onward.brokers.redis.foreign.projection import Projection
from onward.brokers.redis.foreign.streams import Streams
from onward.brokers.redis.positions import position_of
from onward.event import Delivery


class UnfitEntry(msgspec.Struct, frozen=True):
    """An entry that the field mapping does not fit. It becomes a dead letter."""

    position: int
    id: bytes
    fields: list[bytes]
    why: str


class DecodedEntries(msgspec.Struct):
    """What was read of a partition, as far as it can be passed on."""

    deliveries: list[Delivery] = []
    size: int = 0
    damage: str = ""  # why reading stops behind it
    unfit: list[UnfitEntry] = []
    missing: list[int] = []  # positions that were pending, and are not in the stream any more
    skipped: list[int] = []  # positions that other consumers have finished
    reached: int = 0  # where the next read begins

    @property
    def passed_on(self) -> tuple[list[Delivery], int, str, int]:
        """What the reader stores: `reached` only where entries were skipped."""
        skips = self.unfit or self.missing or self.skipped
        return self.deliveries, self.size, self.damage, self.reached if skips else 0

    @property
    def positions(self) -> list[int]:
        """Of all entries that were read or missed, in their order."""
        found = [each.position for each in self.deliveries]
        if not (self.unfit or self.missing or self.skipped):
            return found
        return sorted([*found, *(each.position for each in self.unfit), *self.missing, *self.skipped])

    def before(self, position: int, damage: str) -> "DecodedEntries":
        """Only what lies before this position, where reading stops."""
        deliveries = [each for each in self.deliveries if each.position < position]
        size = sum(each.event.size for each in deliveries)
        skipped = [each for each in self.skipped if each < position]
        return DecodedEntries(deliveries, size, damage, skipped=skipped, reached=position)


class StreamShard:
    """What a hold of ours has more if its stream belongs to others: how entries become events, and what the real group
    must show. A passing group has no real one, so its `projection` is None."""

    __slots__ = ("anchor", "assigned", "entries", "incarnation", "intruders", "leftovers", "projection")

    def __init__(self, assigned: Assigned, stream: str, streams: Streams, projection: Projection | None) -> None:
        self.assigned = assigned
        self.incarnation = ""  # of the server that has everything that was read
        self.anchor: tuple[bytes, str] | None = None  # the id and the hash of the entry that was read last
        self.entries = StreamEntries(assigned.partition.topic, stream, streams, assigned.log_id)
        self.projection = projection
        self.intruders = ""  # other consumers that read the group, or ""
        self.leftovers: Leftovers | None = None  # what was open when it was adopted, until all of that is read

    @property
    def stream(self) -> str:
        return self.entries.stream

    def adopted(self, progress: Progress, leftovers: Leftovers, pending: Mapping[int, int]) -> None:
        """`pending`: by position, how often it was delivered."""
        self.leftovers = leftovers
        if self.projection is not None:
            self.projection = Projection(progress, progress.watermark)
            self.projection.load(pending)

    def decoded(self, entries: list[tuple[bytes, list[bytes]]], start: int) -> DecodedEntries:
        """`start`: where they were read from."""
        partition, epoch, fence, log_id = (
            self.assigned.partition,
            self.assigned.epoch,
            self.assigned.fence,
            self.assigned.log_id,
        )
        found = DecodedEntries()
        leftovers, left = self._left(entries, start)
        for id_, fields in entries:
            position = position_of(id_)
            if position is None:
                found.damage = _too_large(self.stream, id_)
                return found
            found.reached = position + 1
            if leftovers is not None and leftovers.is_theirs(position):
                if position not in left:
                    found.skipped.append(position)
                    continue
                left.remove(position)
            try:
                event = self.entries.event(id_, fields)
            except Misfit as error:
                found.unfit.append(UnfitEntry(position, id_, fields, str(error)))
                continue
            found.deliveries.append(Delivery(event, partition, position, epoch, 1, fence, log_id))
            found.size += sum(map(len, fields))
        found.missing = sorted(each for each in left if each < found.reached)
        return found

    def _left(self, entries: list[tuple[bytes, list[bytes]]], start: int) -> tuple[Leftovers | None, set[int]]:
        """Where others have read, and what they have left of these entries."""
        leftovers = self.leftovers
        if leftovers is not None and start >= leftovers.until:
            leftovers = self.leftovers = None
        if leftovers is None or not entries:
            return None, set()
        last = position_of(entries[-1][0])
        return leftovers, leftovers.between(start, leftovers.until if last is None else last + 1)

    def moved(self, message: Moved) -> None:
        """An operator moved records."""
        if self.projection is not None:
            self.projection.moved([record_position(id_) for id_ in message.ids], message.to)


def _too_large(stream: str, id_: bytes) -> str:
    return (
        f"entry {id_.decode()} of stream {stream}: the id is too large for a position; stop the program that sets such "
        f"ids, and remove the entry: XDEL {stream} {id_.decode()}"
    )
