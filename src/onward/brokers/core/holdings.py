"""What a member holds: its partitions, what was read of them, and the messages that wait to be received.

One thread changes ownership, another reads, the caller's event loop collects. One lock guards it all; it may be taken
around several calls, so that they take effect together.
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
    """Deliveries of one partition that were read together, and their bytes, as stored or as counted."""

    deliveries: list[Delivery]
    size: int


class ReadAhead:
    """What was read of a partition and not handed out."""

    __slots__ = ("bytes", "chunks", "events", "next_out", "position")

    def __init__(self, position: int) -> None:
        self.position = position  # next to be read from the log
        self.next_out = position  # next to be handed out
        self.chunks: deque[Chunk | int] = deque()  # a number: the log was read up to there
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
    """One ownership of a partition. `own` is what the broker itself keeps with it."""

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
        self.ready_at = ready_at  # it is not announced before
        self.announced = False  # until then nothing of it can have run
        self.withheld = False  # it is not announced any more: it is being given back
        self.paused = False  # by the plane
        self.throttled = False  # by the broker
        self.revoking = False
        self.deadline = math.inf  # when a revoked partition must be released

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
    """A Revoked message that is not received yet."""

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
        self.hungry = threading.Event()  # clear: enough was read ahead
        self.deadline = math.inf  # when the first revoked partition must be released
        self._mail: deque[Message | _Revoking[T]] = deque()
        self._turn = 0
        self._wanted = (1_000, 1 << 20)  # events and bytes to read ahead

    # -- receiving ----------------------------------------------------------------------------------------------

    def collect(self, limit: int, max_bytes: int, now: float, *, sure: bool) -> list[Message]:
        """Everything that happened, then new ownerships, then events. Never an event of what is no longer ours.

        While it is not sure that everything held is still ours, ownerships and events wait: what was read after a
        lease ended may belong to another member.
        """
        with self.lock:
            if self.closed:
                return []
            messages = [self._received(each, now) for each in self._mail]
            self._mail.clear()
            if sure:
                self._announce(messages, now)
                self._deliver(messages, limit, max_bytes)
            if limit > 0:  # twice: while one batch is worked on, the next is read
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
        """Was enough read for a receive of this size?"""
        with self.lock:
            flowing = [hold.ahead for hold in self.held.values() if hold.flows]
        return sum([each.events for each in flowing]) >= limit or sum([each.bytes for each in flowing]) >= max_bytes

    # -- what the caller means ------------------------------------------------------------------------------------

    def all(self) -> list[Hold[T]]:
        with self.lock:
            return list(self.held.values())

    def announced(self) -> list[Hold[T]]:
        return [hold for hold in self.all() if hold.announced]

    def known(self, partitions: Iterable[Partition]) -> list[Hold[T]]:
        """The holds that the caller means: it cannot mean an ownership that receive has not reported."""
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
        """The holds that a settle may write to, and the partitions of the call that are no longer ours: those whose
        progress has an old epoch."""
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
        """Ask for these back; no event of them follows. They must be released `grace_s` after the message was
        received, and by the deadline."""
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
        """Do not announce this one any more. False: it is announced already."""
        with self.lock:
            hold.withheld = not hold.announced
            return hold.withheld

    def restore(self) -> None:
        """What was withheld is not given back after all."""
        with self.lock:
            for hold in self.held.values():
                hold.withheld = False

    def drop(self, holds: Sequence[Hold[T]], *, fenced: bool) -> None:
        """These are no longer held. `fenced`: the caller gets Fenced for those it knows of."""
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
        """An operator moved records: the caller gets Moved, if it knows of the ownership."""
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
        """The partitions to read from. Each call begins with another one, so that none is always the last."""
        with self.lock:
            holds = [hold for hold in self.held.values() if hold.flows]
            self._turn += 1
        return _rotated(holds, self._turn)

    def stock(self, found: Iterable[tuple[Hold[T], Chunk]], reached: Iterable[tuple[Hold[T], int]] = ()) -> None:
        """Keep what was read for the next collect. `reached`: how far the logs were read, holes included. A thread that
        reads beside a waiting receive rings the bell afterwards."""
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
    """Move what fits from what was read ahead; with `always_one` the first event always fits. Returns the room left."""
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
    """What fits, and the rest."""
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
