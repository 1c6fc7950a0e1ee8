"""What a subscription holds: its partitions, what was read of them, and the messages that wait to be received.

The membership's thread changes ownership, the reader's thread fills, the caller's loop collects; one lock guards it.
"""

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onward.brokers.base import Assigned, Fenced, Message, Moved, Progress, Reached, Revoked
from onward.brokers.kafka.marks import Origin
from onward.event import Delivery, Partition


class Part(NamedTuple):
    """What one look at the log brought of one partition."""

    deliveries: list[Delivery]
    size: int


class Hold:
    """One ownership of a partition."""

    __slots__ = (
        "announced",
        "buffered",
        "buffered_bytes",
        "deadline",
        "epoch",
        "latest",
        "log_id",
        "marked_at",
        "out",
        "partition",
        "paused",
        "position",
        "queue",
        "ready_at",
        "revoking",
        "source",
        "suffix",
        "throttled",
    )

    def __init__(self, partition: Partition, source: Origin, *, log_id: str, suffix: str, epoch: int) -> None:
        self.partition = partition
        self.source = source
        self.log_id = log_id
        self.suffix = suffix
        self.epoch = epoch
        self.marked_at = 0  # where its aside's log says that it is ours
        self.ready_at = 0.0  # not announced before
        self.announced = False  # until then nothing of it can have run
        self.paused = False  # by the plane
        self.throttled = False  # by us: its progress does not fit into a commit
        self.revoking = False
        self.deadline = math.inf
        self.latest = source.stored or Progress(partition, epoch, source.position)  # as last committed
        self.position = source.position  # next to be read from the log
        self.out = source.position  # next to be handed out
        self.queue: deque[Part | int] = deque()  # read and not handed out; a number: reached
        self.buffered = 0  # events in the queue
        self.buffered_bytes = 0

    @property
    def flows(self) -> bool:
        return self.announced and not self.paused and not self.throttled and not self.revoking

    def put(self, part: Part) -> None:
        self.queue.append(part)
        self.buffered += len(part.deliveries)
        self.buffered_bytes += part.size

    def clear(self) -> None:
        self.queue.clear()
        self.buffered = self.buffered_bytes = 0


class Holdings:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: dict[Partition, Hold] = {}
        self.closed = False
        self.version = 0  # grows with every change that the reader must follow
        self.hungry = threading.Event()
        self._mail: deque[Message | tuple[Hold, ...]] = deque()
        self._turn = 0
        self._ahead = 1_000
        self._ahead_bytes = 1 << 20
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    # The loop

    def collect(self, limit: int, max_bytes: int, now: float) -> list[Message]:
        """Everything that happened, then new ownerships, then events. Never an event of what is not ours any more."""
        with self.lock:
            if self.closed:
                return []
            messages = [_told(each, now) for each in self._mail]
            self._mail.clear()
            self._announce(messages, now)
            self._deliver(messages, limit, max_bytes)
            if limit > 0:  # twice: while one batch is worked on, the next is read
                self._ahead, self._ahead_bytes = 2 * max(limit, 100), max_bytes
            if not self._is_full():
                self.hungry.set()
            return messages

    def waiter(self, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[None]":
        """Done when there is something to collect, from now on."""
        with self.lock:
            future = loop.create_future()
            self._waiter = (loop, future)
            return future

    def ripe_at(self) -> float:
        """When the next partition can be announced."""
        with self.lock:
            return min((hold.ready_at for hold in self.held.values() if not hold.announced), default=math.inf)

    @property
    def has_stock(self) -> bool:
        with self.lock:
            return bool(self._mail) or any(hold.flows and hold.queue for hold in self.held.values())

    @property
    def has_untold_loss(self) -> bool:
        with self.lock:
            return any(isinstance(each, Fenced) for each in self._mail)

    def known(self, partitions: Iterable[Partition]) -> list[Hold]:
        """What the caller knows of: an ownership that receive has not told yet cannot be meant."""
        with self.lock:
            holds = [self.held.get(partition) for partition in partitions]
            return [hold for hold in holds if hold is not None and hold.announced]

    def set_paused(self, holds: Sequence[Hold], *, paused: bool) -> None:
        with self.lock:
            for hold in holds:
                hold.paused = paused
            self.version += 1
        self.nudge()

    def current(self, progress: Progress) -> Hold | None:
        with self.lock:
            hold = self.held.get(progress.partition)
        return hold if hold is not None and hold.announced and hold.epoch == progress.epoch else None

    # The membership's thread

    def add(self, hold: Hold) -> None:
        with self.lock:
            self.held[hold.partition] = hold
            self.version += 1
        self.nudge()

    def revoke(self, holds: Sequence[Hold], deadline: float) -> None:
        """Ask for these back; no event of them follows."""
        with self.lock:
            for hold in holds:
                hold.revoking = True
                hold.deadline = deadline
                hold.clear()
            if holds:
                self._mail.append(tuple(holds))
            self.version += 1
        self.nudge()

    def drop(self, holds: Sequence[Hold], *, fenced: bool) -> None:
        """These are not held any more."""
        with self.lock:
            known = []
            for hold in holds:
                if self.held.get(hold.partition) is hold:
                    del self.held[hold.partition]
                    if hold.announced:
                        known.append(hold.partition)
            if known and fenced:
                self._mail.append(Fenced(known))
            self.version += 1
        self.nudge()

    def tell(self, moved: Moved) -> None:
        with self.lock:
            self._mail.append(moved)
        self.nudge()

    def throttle(self, hold: Hold, *, throttled: bool) -> None:
        with self.lock:
            if hold.throttled == throttled:
                return
            hold.throttled = throttled
            self.version += 1
        self.nudge()

    def all(self) -> list[Hold]:
        with self.lock:
            return list(self.held.values())

    def nudge(self) -> None:
        """Wake the receiver, if one waits."""
        with self.lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                waiter[0].call_soon_threadsafe(_resolve, waiter[1])

    # The reader's thread

    def stock(self, found: dict[Hold, list[Delivery]], reached: dict[Hold, int]) -> None:
        """Put aside what was read, for the next collect."""
        parts = {
            hold: Part(deliveries, sum([delivery.event.size for delivery in deliveries]))
            for hold, deliveries in found.items()
        }
        with self.lock:
            for hold, part in parts.items():
                hold.position = part.deliveries[-1].position + 1
                if not hold.revoking:
                    hold.put(part)
            for hold, position in reached.items():
                if position > hold.position:
                    hold.position = position
                    if not hold.revoking:
                        hold.queue.append(position)
            full = self._is_full()
            if full:
                self.hungry.clear()
        self.nudge()

    def _is_full(self) -> bool:
        flowing = [hold for hold in self.held.values() if hold.flows]
        return (
            sum(hold.buffered for hold in flowing) >= self._ahead
            or sum(hold.buffered_bytes for hold in flowing) >= self._ahead_bytes
        )

    # With the lock held

    def _announce(self, messages: list[Message], now: float) -> None:
        for hold in self.held.values():
            if not hold.announced and not hold.revoking and hold.ready_at <= now:
                hold.announced = True
                source = hold.source
                messages.append(
                    Assigned(hold.partition, hold.epoch, source.fence, hold.log_id, source.stored, source.unclean)
                )

    def _deliver(self, messages: list[Message], limit: int, max_bytes: int) -> None:
        holds = [hold for hold in self.held.values() if hold.flows and hold.queue]
        self._turn += 1
        first = self._turn % len(holds) if holds else 0
        room = (limit, max_bytes)
        for hold in holds[first:] + holds[:first]:
            room = _take(hold, messages, room, forced=room == (limit, max_bytes))
            if room[0] <= 0 or room[1] <= 0:
                return


def _take(hold: Hold, messages: list[Message], room: tuple[int, int], *, forced: bool) -> tuple[int, int]:
    """Move what fits from the hold's queue; with `forced` the first event always fits."""
    limit, max_bytes = room
    while hold.queue and limit > 0:
        part = hold.queue[0]
        if isinstance(part, int):
            hold.out = part
            messages.append(Reached(hold.partition, hold.epoch, part))
            hold.queue.popleft()
            continue
        taken, rest = _split(part, limit, max_bytes, forced=forced)
        if not taken.deliveries:
            return limit, 0
        forced = False
        messages.extend(taken.deliveries)
        limit -= len(taken.deliveries)
        max_bytes -= taken.size
        hold.out = taken.deliveries[-1].position + 1
        hold.buffered -= len(taken.deliveries)
        hold.buffered_bytes -= taken.size
        if rest is not None:
            hold.queue[0] = rest
            return limit, 0
        hold.queue.popleft()
    return limit, max_bytes


def _split(part: Part, limit: int, max_bytes: int, *, forced: bool) -> tuple[Part, Part | None]:
    """What fits, and what is left of it."""
    deliveries, size = part
    if len(deliveries) <= limit and size <= max_bytes:
        return part, None
    sizes = [delivery.event.size for delivery in deliveries]
    count = max(_fitting(sizes, limit, max_bytes), forced)
    taken = sum(sizes[:count])
    rest = Part(deliveries[count:], size - taken) if count < len(deliveries) else None
    return Part(deliveries[:count], taken), rest


def _fitting(sizes: Sequence[int], limit: int, max_bytes: int) -> int:
    for count, size in enumerate(sizes[:limit]):
        max_bytes -= size
        if max_bytes < 0:
            return count
    return min(limit, len(sizes))


def _told(mail: Message | tuple[Hold, ...], now: float) -> Message:
    if isinstance(mail, tuple):
        return Revoked([hold.partition for hold in mail], max(0.0, mail[0].deadline - now))
    return mail


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
