"""Tenure: how a member joins, keeps, gains and gives up partitions.

Everything about ownership happens in a turn: one piece of work in a transaction of the writer, one at a time. A turn
gives back what was asked for, renews the leases, notices what was lost, claims what is free and due to this member,
asks for what is not due to it any more, and hears of moved records. Memory follows only after the commit.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from onward import clock
from onward.brokers.base import Fenced, Moved, State
from onward.brokers.sqlite import leases, progress, roster
from onward.brokers.sqlite.holdings import Hold, Holdings
from onward.brokers.sqlite.membership import Lease, Seat, wish
from onward.brokers.sqlite.topics import Topic
from onward.brokers.sqlite.transaction import Transaction
from onward.event import Partition
from onward.settings import Settings

_EXPIRY_SLACK_S = 0.02

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Turn:
    """What one turn did to the store, to be done to memory after the commit."""

    def __init__(self, now: float, lease: Lease, asked: Mapping[Hold, bool], waiters: Sequence[Waiter]) -> None:
        self.now = now
        self.lease = lease
        self.asked = asked
        self.waiters = waiters
        self.renewed = False
        self.lost: list[Hold] = []
        self.returned: list[Hold] = []
        self.overdue: list[Hold] = []
        self.revoked: list[Hold] = []
        self.claimed: list[Hold] = []
        self.moved: list[tuple[Hold, str, str | None, float | None]] = []
        self.retires = False
        self.dropped = ""  # the topic in which the group is no more
        self.next_expiry = math.inf  # of somebody else's lease
        self.version = 0

    @property
    def has_news(self) -> bool:
        return bool(self.lost or self.overdue or self.revoked or self.claimed or self.moved or self.dropped)


class Tenure:
    """The chore of one subscription. `kick` makes the writer take a turn, `nudge` wakes the receiver."""

    def __init__(
        self,
        member: tuple[str, str],
        topics: Sequence[Topic],
        holdings: Holdings,
        settings: Settings,
        kick: Callable[["Tenure", float], None],
        nudge: Callable[[], None],
    ) -> None:
        self.due = math.inf
        self.group, self.owner = member
        self._topics = topics
        self._holdings = holdings
        self._settings = settings
        self._kick = kick
        self._nudge = nudge
        self._boot = clock.boot_id()
        self._sure = 0.0
        self._version = 0
        self._polled = clock.now()
        self._asked: dict[Hold, bool] = {}  # by ownership: a later one of the same partition was not meant
        self._waiters: list[Waiter] = []
        self._retiring = False  # it released unasked: it keeps what it has, claims no more and counts no more
        self._leaving = False
        self.dropped = ""  # why this member is none any more

    # Called by the subscription

    def polled(self) -> None:
        """Receive is being called, so the leases are worth keeping."""
        now = clock.now()
        if now - self._polled > self._settings.max_poll_gap_s:
            self._kick(self, now)
        self._polled = now

    def sure_until(self) -> float:
        with self._holdings.lock:
            untold = any(isinstance(message, Fenced) for message in self._holdings.mail)
            if self._holdings.closed or untold:  # whoever has not heard of a loss is sure of nothing
                return 0.0
            held = self._holdings.held.values()
            # What should have been released by now may be free in the store before memory follows.
            return (
                min([self._sure, *[hold.deadline for hold in held]]) if held else clock.now() + self._settings.lease_s
            )

    def saw(self, version: int) -> None:
        """The group's version as a reader saw it: another one than in our last turn is worth a turn."""
        if version != self._version:
            self._kick(self, 0.0)

    def ask(self, holds: Mapping[Hold, bool]) -> "asyncio.Future[None]":
        """Give these back, drained or not; done with the turn that did it."""
        with self._holdings.lock:
            self._asked.update(holds)
        return self._turned()

    def leave(self) -> "asyncio.Future[None]":
        self._leaving = True
        return self._turned()

    def _turned(self) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        turned: asyncio.Future[None] = loop.create_future()
        with self._holdings.lock:
            self._waiters.append((loop, turned))
        self._kick(self, 0.0)
        return turned

    # Called by the writer

    def work(self, tx: Transaction) -> Callable[[], None]:
        lease = Lease(tx.now + self._settings.lease_s, self._settings.lease_s, self._boot)
        with self._holdings.lock:
            turn = Turn(tx.now, lease, dict(self._asked), list(self._waiters))
            turn.retires = self._retiring
            held = dict(self._holdings.held)
        turn.dropped = self._dropped_topic(tx)
        if self._leaving or turn.dropped:
            self._leave(tx, turn, held)
        else:
            self._give_back(tx, turn, held)
            if tx.now - self._polled <= self._settings.max_poll_gap_s:
                self._keep(tx, turn, held)
        return lambda: self._apply(turn)

    def _dropped_topic(self, tx: Transaction) -> str:
        """Only a join makes a group: whoever slept while it was dropped must not make it anew at some position."""
        known = {topic.name: leases.is_known(tx.db, self.group, topic.id) for topic in self._topics}
        return next((name for name, there in known.items() if not there), "")

    def failed(self, error: Exception) -> None:
        with self._holdings.lock:
            for hold in self._holdings.held.values():
                hold.withheld = False

    def _leave(self, tx: Transaction, turn: Turn, held: Mapping[Partition, Hold]) -> None:
        for hold in held.values():
            # What was never announced cannot have run: it goes back as it came.
            clean = not hold.unclean if not hold.epoch else turn.asked.get(hold, False)
            leases.give_back(tx.db, self.group, self.owner, (hold.part, hold.fence), clean=clean)
            (turn.lost if turn.dropped else turn.returned).append(hold)
        for topic in self._topics:
            leases.strike(tx.db, self.group, topic.id, [self.owner])
        roster.bump(tx, self.group)

    def _give_back(self, tx: Transaction, turn: Turn, held: dict[Partition, Hold]) -> None:
        for hold in tuple(held.values()):
            asked = hold in turn.asked
            if not asked and hold.deadline > tx.now:
                continue
            clean = turn.asked.get(hold, False)
            leases.give_back(tx.db, self.group, self.owner, (hold.part, hold.fence), clean=clean)
            (turn.returned if asked else turn.overdue).append(hold)
            turn.retires |= asked and not hold.revoking
            del held[hold.partition]
        if turn.returned or turn.overdue:
            roster.bump(tx, self.group)

    def _keep(self, tx: Transaction, turn: Turn, held: Mapping[Partition, Hold]) -> None:
        for topic in self._topics:
            mine = {hold.part: hold for hold in held.values() if hold.partition.topic == topic.name}
            self._keep_topic(tx, turn, topic, mine)
        kept = {hold.part: hold for hold in held.values() if hold not in turn.lost}
        for part, name, state, due in leases.moved(tx.db, self.group, frozenset(kept)):
            turn.moved.append((kept[part], name, state, due))
        turn.version = roster.version(tx.db, self.group)
        turn.renewed = True

    def _keep_topic(self, tx: Transaction, turn: Turn, topic: Topic, mine: dict[int, Hold]) -> None:
        rows, counting = leases.seats(tx.db, self.group, topic.id, tx.now, self._boot)
        seats = []
        for row in rows:
            hold = mine.get(row.part)
            if hold is not None and (row.owner, row.fence) == (self.owner, hold.fence):
                seats.append(row)
                continue
            if hold is not None:
                turn.lost.append(mine.pop(row.part))
            others = row.owner != self.owner and row.part in counting
            seats.append(row if others else row._replace(owner=None))
            if others:
                turn.next_expiry = min(turn.next_expiry, counting[row.part].until)
        leases.renew(tx.db, self.group, mine, turn.lease)
        if turn.retires:
            leases.strike(tx.db, self.group, topic.id, [self.owner])
        else:
            self._balance(tx, turn, topic, seats, mine)

    def _balance(
        self, tx: Transaction, turn: Turn, topic: Topic, seats: Sequence[Seat], mine: Mapping[int, Hold]
    ) -> None:
        leaving = sum(hold.revoking for hold in mine.values())
        wanted = wish(topic.name, self.owner, seats, self._roll_call(tx, turn, topic), leaving)
        turn.claimed += [self._claim(tx, turn, topic, seat) for seat in wanted.claim]
        if wanted.surplus:
            self._give_up(tx, turn, [hold for hold in mine.values() if not hold.revoking], wanted.surplus)

    def _roll_call(self, tx: Transaction, turn: Turn, topic: Topic) -> list[str]:
        """The live members, ourselves among them; the dead are struck off."""
        listed = leases.members(tx.db, self.group, topic.id)
        alive = {name: lease for name, lease in listed.items() if lease.counts(tx.now, self._boot)}
        leases.strike(tx.db, self.group, topic.id, [name for name in listed if name not in alive])
        leases.enlist(tx.db, self.group, topic.id, self.owner, turn.lease)
        others = [lease.until for name, lease in alive.items() if name != self.owner]
        turn.next_expiry = min(turn.next_expiry, *others, math.inf)
        if self.owner not in alive or len(alive) < len(listed):
            roster.bump(tx, self.group)
        return sorted({*alive, self.owner})

    def _claim(self, tx: Transaction, turn: Turn, topic: Topic, seat: Seat) -> Hold:
        claim = leases.claim(tx.db, self.group, seat.part, self.owner, turn.lease)
        partition = Partition(topic.name, seat.index)
        stored = progress.decoded(partition, claim.watermark, claim.done_above, claim.tries)
        return Hold(partition, seat.part, log_id=topic.log_id, fence=claim.fence, stored=stored, unclean=not seat.clean)

    def _give_up(self, tx: Transaction, turn: Turn, holds: Sequence[Hold], count: int) -> None:
        """Give up so many of these: first what was not announced yet, which is free at once, then the last ones."""
        for hold in sorted(holds, key=lambda hold: (hold.epoch > 0, -hold.partition.index))[:count]:
            with self._holdings.lock:
                hold.withheld = not hold.epoch
            if hold.withheld:
                leases.give_back(tx.db, self.group, self.owner, (hold.part, hold.fence), clean=not hold.unclean)
                turn.returned.append(hold)
                roster.bump(tx, self.group)
            else:
                turn.revoked.append(hold)

    def _apply(self, turn: Turn) -> None:
        """The turn is committed: memory follows."""
        holdings = self._holdings
        now = clock.now()
        with holdings.lock:
            holdings.drop(turn.lost, fenced=True)
            holdings.drop(turn.overdue, fenced=True)
            holdings.drop(turn.returned, fenced=False)
            holdings.revoke(turn.revoked)
            for hold in turn.claimed:
                hold.ready_at = now + self._settings.takeover_grace_s if hold.unclean else now
                holdings.held[hold.partition] = hold
            holdings.mail.extend(_moved(turn))
            for hold in turn.asked:
                self._asked.pop(hold, None)
            self._waiters = [waiter for waiter in self._waiters if waiter not in turn.waiters]
            self._retiring = turn.retires
            if turn.dropped:
                self.dropped = _obituary(self.group, turn.dropped)
            lapsed = self._sure <= now
            if turn.renewed:
                self._sure = turn.lease.until
                self._version = turn.version
        if turn.has_news or lapsed:
            self._nudge()
        self._answer(turn.waiters)
        if not self._leaving and not self.dropped:
            self._kick(self, self._next_due(turn))

    def _next_due(self, turn: Turn) -> float:
        renewal = turn.now + self._settings.lease_s / 3
        return min(renewal, turn.next_expiry + _EXPIRY_SLACK_S, self._holdings.deadline())

    def _answer(self, waiters: Sequence[Waiter]) -> None:
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_resolve, future)


def _obituary(group: str, topic: str) -> str:
    return (
        f"group {group} of topic {topic} was dropped while this member was away; what it had not settled is void. "
        "Start it again if the group shall exist: it begins where `start` says"
    )


def _moved(turn: Turn) -> list[Moved]:
    """Neighbouring notices of one partition and one kind as one message; the unannounced are loaded later anyway."""
    known = [notice for notice in turn.moved if notice[0].epoch]
    messages = []
    for (hold, state, due), notices in itertools.groupby(known, key=lambda notice: (notice[0], *notice[2:])):
        ids = [name for _, name, _, _ in notices]
        messages.append(Moved(hold.partition, hold.epoch, ids, State(state) if state else None, due))
    return messages


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
