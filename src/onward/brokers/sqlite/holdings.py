"""What a subscription holds: its partitions, what was read of them, and the messages that wait to be received.

The writer's thread changes ownership, the reader's thread fills, the caller's loop collects; one lock guards it all.
"""

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from onward.brokers.base import Assigned, Fenced, Message, Progress, Reached, Revoked
from onward.brokers.sqlite.log import Rows
from onward.event import Delivery, Event, Partition


class Hold:
    """One ownership of a partition."""

    __slots__ = (
        "damage",
        "deadline",
        "epoch",
        "fence",
        "log_id",
        "out",
        "part",
        "partition",
        "paused",
        "read",
        "ready_at",
        "rests_until",
        "revoking",
        "rows",
        "stored",
        "unclean",
        "withheld",
    )

    def __init__(
        self, partition: Partition, part: int, *, log_id: str, fence: int, stored: Progress | None, unclean: bool
    ) -> None:
        self.partition = partition
        self.part = part
        self.log_id = log_id
        self.fence = fence
        self.stored = stored
        self.unclean = unclean
        self.epoch = 0  # 0: not announced yet, so nothing of it can have run
        self.ready_at = 0.0  # not announced before
        self.withheld = False  # not announced any more: it is being given back
        self.paused = False
        self.revoking = False
        self.deadline = math.inf
        self.read = self.out = stored.watermark if stored else 0  # next to be read from the log; to be handed out
        self.rows: deque[Rows] = deque()  # read and not handed out
        self.damage = ""  # why it cannot be read on, and when that is tried again
        self.rests_until = 0.0

    @property
    def flows(self) -> bool:
        return self.epoch > 0 and not self.paused and not self.revoking

    @property
    def stocked(self) -> int:
        return sum([len(rows.events) for rows in self.rows])


class Holdings:
    def __init__(self, epochs: Iterator[int], revoke_grace_s: float) -> None:
        self.lock = threading.Lock()
        self.held: dict[Partition, Hold] = {}
        self.mail: deque[Message] = deque()
        self.closed = False
        self._epochs = epochs
        self._revoke_grace_s = revoke_grace_s
        self._turn = 0

    def is_stocked(self, limit: int, max_bytes: int) -> bool:
        """Is enough read already for a receive of this size?"""
        count = size = 0
        with self.lock:
            for hold in self.held.values():
                if hold.flows:
                    count += hold.stocked
                    size += sum([rows.size for rows in hold.rows])
        return count >= limit or size >= max_bytes

    def flowing(self, now: float) -> list[tuple[Hold, int]]:
        """The partitions to read from, and how many of their events are read already.

        Each call begins with another one, so that none is always the last.
        """
        with self.lock:
            holds = [(hold, hold.stocked) for hold in self.held.values() if hold.flows and hold.rests_until <= now]
        self._turn += 1
        start = self._turn % len(holds) if holds else 0
        return holds[start:] + holds[:start]

    def stock(self, hold: Hold, rows: Rows) -> None:
        """Put aside what was read, for the next collect."""
        with self.lock:
            if hold.flows or hold.paused:
                hold.rows.append(rows)
        hold.read = rows.start + len(rows.events)

    def ripe_at(self) -> float:
        """When the next partition can be announced."""
        with self.lock:
            return min(
                (hold.ready_at for hold in self.held.values() if not hold.epoch and not hold.withheld), default=math.inf
            )

    def collect(self, limit: int, max_bytes: int, now: float, *, sure: bool) -> list[Message]:
        """Everything that happened, then new ownerships, then events. Never an event of what is not ours any more.

        Unless it is sure that all of it is still ours, ownerships and events wait: what was read after a lease ran
        out may be somebody else's.
        """
        with self.lock:
            if self.closed:
                return []
            messages = list(self.mail)
            self.mail.clear()
            for message in messages:
                if isinstance(message, Revoked):
                    self._start_deadlines(message.partitions, now + message.deadline_s)
            if sure:
                self._announce(messages, now)
                self._deliver(messages, limit, max_bytes)
            return messages

    def revoke(self, holds: Sequence[Hold]) -> None:
        """Ask for these back. The lock is held."""
        for hold in holds:
            hold.revoking = True
            hold.rows.clear()
        if holds:
            self.mail.append(Revoked([hold.partition for hold in holds], self._revoke_grace_s))

    def drop(self, holds: Sequence[Hold], *, fenced: bool) -> None:
        """These are not held any more. The lock is held."""
        known = []
        for hold in holds:
            if self.held.get(hold.partition) is hold:
                del self.held[hold.partition]
                if hold.epoch:
                    known.append(hold.partition)
        if known and fenced:
            self.mail.append(Fenced(known))

    def deadline(self) -> float:
        """When the first revoked partition must be back."""
        with self.lock:
            return min((hold.deadline for hold in self.held.values()), default=math.inf)

    def _start_deadlines(self, partitions: Sequence[Partition], deadline: float) -> None:
        for partition in partitions:
            hold = self.held.get(partition)
            if hold is not None and hold.revoking:
                hold.deadline = deadline

    def _announce(self, messages: list[Message], now: float) -> None:
        for hold in self.held.values():
            if not hold.epoch and not hold.withheld and hold.ready_at <= now:
                hold.epoch = next(self._epochs)
                messages.append(_assigned(hold))

    def _deliver(self, messages: list[Message], limit: int, max_bytes: int) -> None:
        holds = [hold for hold in self.held.values() if hold.flows and hold.rows]
        start = self._turn % len(holds) if holds else 0
        first = True
        for hold in holds[start:] + holds[:start]:
            while hold.rows and limit > 0 and (first or max_bytes > 0):
                waiting = len(hold.rows)
                count, size = _hand_out(hold, messages, limit, max_bytes, always=first)
                limit -= count
                max_bytes -= size
                first = first and not count
                if not count and len(hold.rows) == waiting:
                    return  # the next event does not fit


def _hand_out(hold: Hold, messages: list[Message], limit: int, max_bytes: int, *, always: bool) -> tuple[int, int]:
    """Hand out what fits of the first record batch; answers how many events, and their bytes."""
    start, events, size = hold.rows.popleft()
    partition, epoch, fence, log_id = hold.partition, hold.epoch, hold.fence, hold.log_id
    if start > hold.out:
        messages.append(Reached(partition, epoch, start))
    if len(events) > limit or size > max_bytes:
        fits, used = _fitting(events, limit, max_bytes, always=always)
        if fits < len(events):
            hold.rows.appendleft(Rows(start + fits, events[fits:], size - used))
            events = events[:fits]
        size = used
    messages += [
        Delivery(event, partition, position, epoch, 1, fence, log_id) for position, event in enumerate(events, start)
    ]
    hold.out = start + len(events)
    return len(events), size


def _fitting(events: Sequence[Event], limit: int, max_bytes: int, *, always: bool) -> tuple[int, int]:
    used = 0
    for count, event in enumerate(events[:limit]):
        if used + event.size > max_bytes and not (always and count == 0):
            return count, used
        used += event.size
    return min(limit, len(events)), used


def _assigned(hold: Hold) -> Assigned:
    stored = hold.stored
    if stored is not None:
        stored = Progress(hold.partition, hold.epoch, stored.watermark, stored.done_above, tries=stored.tries)
    return Assigned(hold.partition, hold.epoch, hold.fence, hold.log_id, stored, hold.unclean)
