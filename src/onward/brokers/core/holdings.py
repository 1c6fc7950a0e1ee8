"""The state of a member: its partitions, the events that were read ahead, and the messages that wait to be received.

One thread changes ownership, another thread reads, and the caller's event loop collects. One lock guards everything. A
caller may hold it around several calls, so that they take effect together.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from onward.brokers.base import AsideRecord, Assigned, Fenced, Message, Moved, Progress, Reached, Revoked
from onward.brokers.core.bell import Bell
from onward.event import Delivery, Partition

T = TypeVar("T")


class Chunk(NamedTuple):
    """Deliveries of one partition that were read together, and their size in bytes, in the store or in memory."""

    deliveries: list[Delivery]
    size: int


class ReadAhead:
    """The events of a partition that were read and not yet handed out."""

    __slots__ = ("bytes", "chunks", "events", "next_out", "position")

    def __init__(self, position: int) -> None:
        self.position = position  # the next position to read from the log
        self.next_out = position  # the next position to hand out
        self.chunks: deque[Chunk | int] = deque()  # a number is a position up to which the log was read
        self.events = 0
        self.bytes = 0

    def put(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.events += len(chunk.deliveries)
        self.bytes += chunk.size

    def clear(self) -> None:
        self.chunks.clear()
        self.events = self.bytes = 0


class Hold(Generic[T]):
    """One ownership of a partition. `own` is the broker's own data about it."""

    __slots__ = (
        "ahead",
        "announced",
        "assigned",
        "deadline",
        "own",
        "paused",
        "ready_at",
        "revoking",
        "throttled",
        "withheld",
    )

    def __init__(self, assigned: Assigned, own: T, *, position: int, ready_at: float = 0.0) -> None:
        self.assigned = assigned
        self.own = own
        self.ahead = ReadAhead(position)
        self.ready_at = ready_at  # the earliest time to announce it
        self.announced = False  # receive has returned its Assigned; before that, none of its events can have run
        self.withheld = False  # it must not be announced, because it is being given back
        self.paused = False  # by the control plane
        self.throttled = False  # by the broker
        self.revoking = False
        self.deadline = math.inf  # the time by which a revoked partition must be released

    @property
    def partition(self) -> Partition:
        return self.assigned.partition

    @property
    def epoch(self) -> int:
        return self.assigned.epoch

    @property
    def fence(self) -> int:
        assert self.assigned.fence is not None, "an owned partition has a fence"
        return self.assigned.fence

    @property
    def log_id(self) -> str:
        return self.assigned.log_id

    @property
    def flows(self) -> bool:
        return self.announced and not self.paused and not self.throttled and not self.revoking


class _Revoking(NamedTuple, Generic[T]):
    """A Revoked message that receive has not returned yet."""

    holds: Sequence[Hold[T]]
    grace_s: float
    deadline: float


class Holdings(Generic[T]):
    def __init__(self, bell: Bell) -> None:
        self.lock = threading.RLock()
        self.bell = bell
        self.held: dict[Partition, Hold[T]] = {}
        self.closed = False
        self.version = 0  # grows with every change that a reader must follow
        self.hungry = threading.Event()  # cleared while enough was read ahead
        self.deadline = math.inf  # the time by which the first revoked partition must be released
        self._mail: deque[Message | _Revoking[T]] = deque()
        self._turn = 0
        self._wanted = (1_000, 1 << 20)  # events and bytes to read ahead

    # -- receiving ----------------------------------------------------------------------------------------------

    def collect(self, limit: int, max_bytes: int, now: float, *, sure: bool) -> list[Message]:
        """The messages that wait, then new ownerships, then events. It never returns an event of a lost partition.

        If it is not `sure` that we still own all partitions, new ownerships and events wait, because events that were
        read after a lease ended may belong to another member.
        """
        with self.lock:
            if self.closed:
                return []
            messages = [self._received(each, now) for each in self._mail]
            self._mail.clear()
            if sure:
                self._announce(messages, now)
                self._deliver(messages, limit, max_bytes)
            if limit > 0:  # twice the limit, so that the next batch is read while this one is handled
                self._wanted = 2 * max(limit, 100), max_bytes
            if not self._is_full():
                self.hungry.set()
            return messages

    def ripe_at(self) -> float:
        """When the next partition can be announced."""
        with self.lock:
            waiting = [hold.ready_at for hold in self.held.values() if not hold.announced and not hold.withheld]
            return min(waiting, default=math.inf)

    @property
    def has_unreported_loss(self) -> bool:
        with self.lock:
            return bool(self._mail) and any(type(each) is Fenced for each in self._mail)

    def is_stocked(self, limit: int, max_bytes: int) -> bool:
        """Whether enough was read ahead for a receive of this size."""
        with self.lock:
            flowing = [hold.ahead for hold in self.held.values() if hold.flows]
        return sum([each.events for each in flowing]) >= limit or sum([each.bytes for each in flowing]) >= max_bytes

    # -- looking up ownerships ------------------------------------------------------------------------------------

    def all(self) -> list[Hold[T]]:
        with self.lock:
            return list(self.held.values())

    def announced(self) -> list[Hold[T]]:
        return [hold for hold in self.all() if hold.announced]

    def known(self, partitions: Iterable[Partition]) -> list[Hold[T]]:
        """The ownerships of these partitions that receive has reported. The caller cannot mean any other."""
        with self.lock:
            holds = [self.held.get(partition) for partition in partitions]
        return [hold for hold in holds if hold is not None and hold.announced]

    def current(self, progress: Progress) -> Hold[T] | None:
        with self.lock:
            hold = self.held.get(progress.partition)
        return hold if hold is not None and hold.announced and hold.epoch == progress.epoch else None

    def settleable(
        self, progress: Sequence[Progress], aside: Sequence[AsideRecord]
    ) -> tuple[dict[Partition, Hold[T]], dict[Partition, None]]:
        """The ownerships that a settle may write to, and the partitions of the call that this member has lost, such as
        those whose progress has an old epoch."""
        lost = dict.fromkeys(each.partition for each in progress if self.current(each) is None)
        holds = {hold.partition: hold for hold in self.announced() if hold.partition not in lost}
        lost |= dict.fromkeys(record.partition for record in aside if record.partition not in holds)
        return holds, lost

    def set_paused(self, partitions: Iterable[Partition], *, paused: bool) -> None:
        with self.lock:
            for hold in self.known(partitions):
                hold.paused = paused
            self.version += 1
        self.bell.ring()

    # -- ownership ------------------------------------------------------------------------------------------------

    def add(self, hold: Hold[T]) -> None:
        with self.lock:
            self.held[hold.partition] = hold
            self.version += 1
        self.bell.ring()

    def revoke(self, holds: Sequence[Hold[T]], *, grace_s: float, deadline: float = math.inf) -> None:
        """Report these as revoked. No event of them follows. They must be released within `grace_s` after receive has
        returned the message, and by the deadline."""
        with self.lock:
            for hold in holds:
                hold.revoking = True
                hold.deadline = deadline
                hold.ahead.clear()
            if holds:
                self._mail.append(_Revoking(tuple(holds), grace_s, deadline))
            self._changed()
        self.bell.ring()

    def withhold(self, hold: Hold[T]) -> bool:
        """Never announce this ownership. False if it is already announced."""
        with self.lock:
            hold.withheld = not hold.announced
            return hold.withheld

    def restore(self) -> None:
        """Undo `withhold`, because these partitions were not given back after all."""
        with self.lock:
            for hold in self.held.values():
                hold.withheld = False

    def drop(self, holds: Sequence[Hold[T]], *, fenced: bool) -> None:
        """Remove ownerships. With `fenced`, receive reports Fenced for those that were announced."""
        with self.lock:
            known = []
            for hold in holds:
                if self.held.get(hold.partition) is hold:
                    del self.held[hold.partition]
                    if hold.announced:
                        known.append(hold.partition)
            if known and fenced:
                self._mail.append(Fenced(known))
            self._changed()
        self.bell.ring()

    def report(self, moved: Moved) -> None:
        """An operator moved records. Receive reports Moved if the ownership was announced."""
        with self.lock:
            hold = self.held.get(moved.partition)
            if hold is None or not hold.announced or hold.epoch != moved.epoch:
                return
            self._mail.append(moved)
        self.bell.ring()

    def throttle(self, hold: Hold[T], *, throttled: bool) -> None:
        with self.lock:
            if hold.throttled == throttled:
                return
            hold.throttled = throttled
            self.version += 1
        self.bell.ring()

    def close(self) -> None:
        with self.lock:
            self.closed = True
        self.hungry.set()
        self.bell.ring()

    # -- reading --------------------------------------------------------------------------------------------------

    def flowing(self) -> list[Hold[T]]:
        """The partitions to read from. Each call starts with a different one, so that none is always the last."""
        with self.lock:
            holds = [hold for hold in self.held.values() if hold.flows]
            self._turn += 1
        return _rotated(holds, self._turn)

    def stock(self, found: Iterable[tuple[Hold[T], Chunk]], reached: Iterable[tuple[Hold[T], int]] = ()) -> None:
        """Store events for the next collect. `reached`: positions up to which the logs were read, gaps included. If
        another thread reads while receive waits, it must ring the bell after this call."""
        with self.lock:
            for hold, chunk in found:
                hold.ahead.position = chunk.deliveries[-1].position + 1
                if not hold.revoking:
                    hold.ahead.put(chunk)
            for hold, position in reached:
                if position > hold.ahead.position:
                    hold.ahead.position = position
                    if not hold.revoking:
                        hold.ahead.chunks.append(position)
            if self._is_full():
                self.hungry.clear()

    # -- with the lock held ---------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self.version += 1
        self.deadline = min([hold.deadline for hold in self.held.values()], default=math.inf)

    def _is_full(self) -> bool:
        flowing = [hold.ahead for hold in self.held.values() if hold.flows]
        events, size = self._wanted
        return sum([each.events for each in flowing]) >= events or sum([each.bytes for each in flowing]) >= size

    def _received(self, mail: Message | _Revoking[T], now: float) -> Message:
        if not isinstance(mail, _Revoking):
            return mail
        deadline = min(mail.deadline, now + mail.grace_s)
        for hold in mail.holds:
            hold.deadline = deadline
        self._changed()
        return Revoked([hold.partition for hold in mail.holds], max(0.0, deadline - now))

    def _announce(self, messages: list[Message], now: float) -> None:
        for hold in self.held.values():
            if not hold.announced and not hold.withheld and not hold.revoking and hold.ready_at <= now:
                hold.announced = True
                messages.append(hold.assigned)

    def _deliver(self, messages: list[Message], limit: int, max_bytes: int) -> None:
        holds = [hold for hold in self.held.values() if hold.flows and hold.ahead.chunks]
        self._turn += 1
        room = (limit, max_bytes)
        for hold in _rotated(holds, self._turn):
            room = _hand_out(hold, messages, room, always_one=room == (limit, max_bytes))
            if room[0] <= 0 or room[1] <= 0:
                return


def _rotated(holds: list[Hold[T]], turn: int) -> list[Hold[T]]:
    first = turn % len(holds) if holds else 0
    return holds[first:] + holds[:first]


def _hand_out(hold: Hold[T], messages: list[Message], room: tuple[int, int], *, always_one: bool) -> tuple[int, int]:
    """Move as many events to `messages` as fit, with `always_one` at least one. Returns the room that is left."""
    limit, max_bytes = room
    ahead = hold.ahead
    while ahead.chunks and limit > 0:
        chunk = ahead.chunks[0]
        if isinstance(chunk, int):
            ahead.next_out = chunk
            messages.append(Reached(hold.partition, hold.epoch, chunk))
            ahead.chunks.popleft()
            continue
        taken, rest = _split(chunk, limit, max_bytes, always_one=always_one)
        if not taken.deliveries:
            return limit, 0
        always_one = False
        messages.extend(taken.deliveries)
        limit -= len(taken.deliveries)
        max_bytes -= taken.size
        ahead.next_out = taken.deliveries[-1].position + 1
        ahead.events -= len(taken.deliveries)
        ahead.bytes -= taken.size
        if rest is not None:
            ahead.chunks[0] = rest
            return limit, 0
        ahead.chunks.popleft()
    return limit, max_bytes


def _split(chunk: Chunk, limit: int, max_bytes: int, *, always_one: bool) -> tuple[Chunk, Chunk | None]:
    """The part of the chunk that fits, and the rest."""
    deliveries, size = chunk
    if len(deliveries) <= limit and size <= max_bytes:
        return chunk, None
    sizes = [delivery.event.size for delivery in deliveries]
    count = max(_fitting(sizes, limit, max_bytes), always_one)
    if count == len(deliveries):
        return chunk, None
    taken = sum(sizes[:count])
    return Chunk(deliveries[:count], taken), Chunk(deliveries[count:], size - taken)


def _fitting(sizes: Sequence[int], limit: int, max_bytes: int) -> int:
    for count, size in enumerate(sizes[:limit]):
        max_bytes -= size
        if max_bytes < 0:
            return count
    return min(limit, len(sizes))
