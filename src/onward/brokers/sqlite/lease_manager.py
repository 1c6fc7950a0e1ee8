"""How a member joins a group, and gains, renews and gives back partitions.

Ownership changes only in a *turn*, a piece of work inside a transaction of the writer. One turn runs at a time. It
reads the store, `core.leasing` decides, and the turn writes the decisions. The state in memory changes after the
commit.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onward import clock
from onward.brokers.base import Assigned, Moved, State
from onward.brokers.core import leasing
from onward.brokers.core.holdings import Hold, Holdings
from onward.brokers.core.lease_requests import Requests, answer
from onward.brokers.core.leasing import Decisions, Situation
from onward.brokers.core.share import Seat
from onward.brokers.sqlite import group_version, leases, progress
from onward.brokers.sqlite.bells import Bells
from onward.brokers.sqlite.leases import Lease, MovedRow
from onward.brokers.sqlite.topics import Topic
from onward.brokers.sqlite.transaction import Transaction
from onward.errors import GroupDropped, OnwardError, StoreLost
from onward.event import Partition
from onward.settings import Settings

_EXPIRY_SLACK_S = 0.02


class LogPlace:
    """What this broker remembers about one ownership."""

    __slots__ = ("damage", "grace_s", "is_gone", "part", "rests_until")

    def __init__(self, part: int) -> None:
        self.part = part  # the partition's id in the store
        self.grace_s = 0.0  # how long to wait before the ownership is announced
        self.is_gone = False  # all processes of the last owner have ended
        self.damage = ""  # why the log cannot be read further
        self.rests_until = 0.0  # when to try to read a damaged log again


Held = Hold[LogPlace]


class SqliteMember(NamedTuple):
    """A member, and the group and topics that it joins."""

    group: str
    owner: str  # the member's name with a unique suffix
    topics: Sequence[Topic]
    epochs: Iterator[int]
    gone: frozenset[str]  # the names of members whose processes have all ended
    bells: Bells

    @property
    def parts(self) -> dict[Partition, int]:
        return {Partition(topic.name, index): part for topic in self.topics for index, part in enumerate(topic.parts)}


class LeaseTurn:
    """What one turn changed in the store. The state in memory follows after the commit."""

    def __init__(self, now: float, lease: Lease, requests: Requests[LogPlace]) -> None:
        self.now = now
        self.lease = lease
        self.requests = requests
        self.decisions: Decisions[LogPlace] = Decisions(retires=requests.retiring)
        self.claimed: list[Held] = []
        self.moved: list[tuple[Held, MovedRow]] = []
        self.dropped = ""  # the topic in which the group no longer exists
        self.next_expiry = math.inf  # when the first lease of another member ends
        self.version: int | None = None  # the version of the group; None: no lease was renewed

    @property
    def has_news(self) -> bool:
        done = self.decisions
        return bool(done.lost or done.overdue or done.revoked or self.claimed or self.moved or self.dropped)


class LeaseManager:
    """The chore of one subscription, which renews its membership and its leases. `kick` makes the writer run a turn."""

    def __init__(
        self,
        enrolment: SqliteMember,
        holdings: Holdings[LogPlace],
        settings: Settings,
        kick: Callable[["LeaseManager", float], None],
    ) -> None:
        self.due = math.inf
        self.enrolment = enrolment
        self.failure: OnwardError | None = None
        self._holdings = holdings
        self._settings = settings
        self._kick = kick
        self._requests: Requests[LogPlace] = Requests()
        self._sure = 0.0
        self._version = 0
        self._polled = clock.now()

    # -- called by the subscription -------------------------------------------------------------------------------

    @property
    def group(self) -> str:
        return self.enrolment.group

    @property
    def sure_until(self) -> float:
        return self._sure if self._holdings.held else clock.now() + self._lease_s

    @property
    def renewal_s(self) -> float:
        """The time between two renewals of the leases."""
        return self._lease_s / 3

    @property
    def is_overdue(self) -> bool:
        """Whether a renewal is so late that the next one is already due."""
        return self.failure is None and self.sure_until - clock.now() < self.renewal_s

    @property
    def troubles(self) -> list[str]:
        if self.failure is not None:
            return [str(self.failure)]
        damaged = [hold for hold in self._holdings.all() if hold.own.damage]
        return [f"{hold.partition} of group {self.group} is stopped: {hold.own.damage}" for hold in damaged]

    def polled(self) -> None:
        now = clock.now()
        if now - self._polled > self._settings.max_poll_gap_s:
            self._kick(self, now)
        self._polled = now

    def saw(self, version: int) -> None:
        """Take a turn if the group's version, as a reader saw it, differs from the version of our last turn."""
        if version != self._version:
            self._kick(self, 0.0)

    def look_at(self, time: float) -> None:
        """Take a turn at this time or earlier."""
        self._kick(self, time)

    def release(self, holds: Mapping[Held, bool]) -> "asyncio.Future[None]":
        """Give these partitions back, each drained or not. The future is done after the turn that does it."""
        with self._holdings.lock:
            self._requests.asked.update(holds)
        return self._next_turn()

    def leave(self) -> "asyncio.Future[None]":
        self._requests.leaving = True
        return self._next_turn()

    def lose(self, error: StoreLost) -> None:
        """The store is lost, so nothing can be settled. Fence all partitions, and let no release or leave wait for a
        turn."""
        with self._holdings.lock:
            self.failure = error
            self._holdings.drop(list(self._holdings.held.values()), fenced=True)
            waiters, self._requests.waiters = self._requests.waiters, []
        answer(waiters)

    def _next_turn(self) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        turned: asyncio.Future[None] = loop.create_future()
        with self._holdings.lock:
            self._requests.waiters.append((loop, turned))
        self._kick(self, 0.0)
        return turned

    # -- called by the writer -------------------------------------------------------------------------------------

    @property
    def _lease_s(self) -> float:
        return self._settings.lease_s

    def join(self, tx: Transaction) -> Callable[[], None]:
        """The first turn. It frees all partitions of the gone members, also those that other members will claim."""
        for topic in self.enrolment.topics:
            if leases.free_gone(tx.db, self.group, topic.id, self.enrolment.gone):
                group_version.bump(tx, self.group)
        return self.work(tx)

    def work(self, tx: Transaction) -> Callable[[], None]:
        with self._holdings.lock:
            turn = LeaseTurn(tx.now, Lease.of(tx.now, self._lease_s), self._requests.taken())
            held = dict(self._holdings.held)
        turn.dropped = self._dropped_topic(tx)
        situation = Situation(self.enrolment.owner, held, turn.requests.asked, turn.requests.retiring)
        if turn.requests.leaving or turn.dropped:
            self._leave(tx, turn, held)
        elif tx.now - self._polled > self._settings.max_poll_gap_s:
            turn.decisions = leasing.released(situation, tx.now)
            self._give_back(tx, turn)
        else:
            self._keep(tx, turn, situation)
        return lambda: self._follow(turn)

    def failed(self, error: Exception) -> None:
        self._holdings.restore()
        if isinstance(error, StoreLost):
            self.lose(error)

    def _dropped_topic(self, tx: Transaction) -> str:
        """The topic in which the group was dropped, or "".

        Only a join creates a group. A member that was suspended while the group was dropped must not create it again,
        because it would start at a wrong position."""
        for topic in self.enrolment.topics:
            if not leases.is_known(tx.db, self.group, topic.id):
                return topic.name
        return ""

    def _leave(self, tx: Transaction, turn: LeaseTurn, held: Mapping[Partition, Held]) -> None:
        for hold in held.values():
            clean = turn.requests.asked.get(hold, False) if hold.announced else not hold.assigned.unclean
            if hold.announced:
                self._free(tx, hold, clean=clean)
            else:
                self._put_back(tx, hold)
            if turn.dropped:
                turn.decisions.lost.append(hold)
            else:
                turn.decisions.released[hold] = clean
        for topic in self.enrolment.topics:
            leases.strike(tx.db, self.group, topic.id, [self.enrolment.owner])
        self.enrolment.bells.take_down(self.enrolment.owner)
        group_version.bump(tx, self.group)

    def _keep(self, tx: Transaction, turn: LeaseTurn, situation: Situation[LogPlace]) -> None:
        self._check_ends(tx, situation.held)
        me = self.enrolment.owner
        moment = (tx.now, turn.lease.boot)
        views = {topic: leases.view(tx.db, self.group, topic, me, moment) for topic in self.enrolment.topics}
        turn.next_expiry = min([expiry for _, expiry in views.values()], default=math.inf)
        turn.decisions = leasing.decide(situation, [view for view, _ in views.values()], tx.now)
        self._give_back(tx, turn)
        kept = {hold.own.part: hold for hold in turn.decisions.renewed if hold not in turn.decisions.unannounced}
        waits = {part: hold.own.grace_s > 0 and not hold.announced for part, hold in kept.items()}
        leases.renew(tx.db, self.group, waits, turn.lease)
        for topic, (view, _) in views.items():
            self._list(tx, turn, topic, view.members)
        parts = self.enrolment.parts
        turn.claimed = [self._claim(tx, turn, seat, parts[seat.partition]) for seat in turn.decisions.claims]
        if turn.claimed or any(turn.decisions.struck.values()):  # the last owners may be dead
            self.enrolment.bells.sweep(leases.known_names(tx.db))
        turn.moved = [(kept[row.part], row) for row in leases.moved(tx.db, self.group, frozenset(kept))]
        turn.version = group_version.read(tx.db, self.group)

    def _check_ends(self, tx: Transaction, held: Mapping[Partition, Held]) -> None:
        """Raise StoreLost if a log ends below the position up to which we have read it. A reader cannot check this,
        because its transaction may see an older moment."""
        ends = {part: end for topic in self.enrolment.topics for part, end in leases.ends(tx.db, topic.id).items()}
        for hold in held.values():
            end = ends.get(hold.own.part, hold.ahead.position)  # a missing partition was dropped
            if end < hold.ahead.position:
                raise StoreLost(f"{hold.partition} was read up to position {hold.ahead.position} but now ends at {end}")

    def _give_back(self, tx: Transaction, turn: LeaseTurn) -> None:
        done = turn.decisions
        for hold, clean in done.released.items():
            self._free(tx, hold, clean=clean)
        for hold in done.overdue:
            self._free(tx, hold, clean=False)
        for hold in tuple(done.unannounced):
            if self._holdings.withhold(hold):
                self._put_back(tx, hold)
            else:  # it was announced after we looked
                done.unannounced.remove(hold)
                done.revoked.append(hold)
        if done.released or done.overdue or done.unannounced:
            group_version.bump(tx, self.group)

    def _list(self, tx: Transaction, turn: LeaseTurn, topic: Topic, members: Mapping[str, bool]) -> None:
        """Update the list of members: remove dead members, and ourselves if we retire."""
        me, struck = self.enrolment.owner, turn.decisions.struck.get(topic.name, [])
        leases.strike(tx.db, self.group, topic.id, struck)
        if not turn.decisions.retires:
            leases.enlist(tx.db, self.group, topic.id, me, turn.lease)
            if struck or not members.get(me, False):
                group_version.bump(tx, self.group)
                self.enrolment.bells.hang(me)

    def _claim(self, tx: Transaction, turn: LeaseTurn, seat: Seat, part: int) -> Held:
        own = LogPlace(part)
        own.is_gone = seat.is_gone
        own.grace_s = 0.0 if seat.clean or seat.is_gone else self._settings.takeover_grace_s
        waits = own.grace_s > 0
        claim = leases.claim(tx.db, self.group, part, self.enrolment.owner, turn.lease, waits=waits)
        epoch = next(self.enrolment.epochs)
        stored = progress.decoded(seat.partition, epoch, claim)
        log_id = next(topic.log_id for topic in self.enrolment.topics if topic.name == seat.partition.topic)
        assigned = Assigned(seat.partition, epoch, claim.fence, log_id, stored, not seat.clean)
        return Hold(assigned, own, position=claim.watermark)

    def _free(self, tx: Transaction, hold: Held, *, clean: bool) -> None:
        leases.give_back(tx.db, self.group, self.enrolment.owner, (hold.own.part, hold.fence), clean=clean)

    def _put_back(self, tx: Transaction, hold: Held) -> None:
        """Give back a partition that was never announced. None of its events can have run, so it goes back with the
        marks that it had before the claim."""
        place, clean = (hold.own.part, hold.fence), not hold.assigned.unclean
        leases.give_back(tx.db, self.group, self.enrolment.owner, place, clean=clean, is_gone=hold.own.is_gone)

    def _follow(self, turn: LeaseTurn) -> None:
        """Apply a committed turn to the state in memory."""
        now, done, holdings = clock.now(), turn.decisions, self._holdings
        with holdings.lock:
            holdings.drop([*done.lost, *done.overdue], fenced=True)
            holdings.drop([*done.released, *done.unannounced], fenced=False)
            holdings.revoke(done.revoked, grace_s=self._settings.revoke_grace_s)
            for hold in turn.claimed:
                hold.ready_at = now + hold.own.grace_s
                holdings.add(hold)
            for message in _moved(turn):
                holdings.report(message)
            self._requests.done(turn.requests)
            self._requests.retiring = done.retires
            if turn.dropped:
                self.failure = GroupDropped(_dropped(self.group, turn.dropped))
            lapsed = self._sure <= now
            if turn.version is not None:
                self._sure, self._version = turn.lease.until, turn.version
        if turn.has_news or lapsed:
            holdings.bell.ring()
        answer(turn.requests.waiters)
        if not self._requests.leaving and self.failure is None:
            renewal = turn.now + self.renewal_s
            self._kick(self, min(renewal, turn.next_expiry + _EXPIRY_SLACK_S, holdings.deadline))


def _dropped(group: str, topic: str) -> str:
    return (
        f"group {group} of topic {topic}, or the topic itself, was dropped after the lease of this member had ended; "
        "it can settle nothing any more. Start it again to create the group again: it begins at the handler's `start`"
    )


def _moved(turn: LeaseTurn) -> list[Moved]:
    """One message for consecutive notices of the same partition, state and due time."""
    messages = []
    for (hold, state, due), notices in itertools.groupby(
        turn.moved, key=lambda notice: (notice[0], notice[1].state, notice[1].due)
    ):
        ids = [row.id for _, row in notices]
        messages.append(Moved(hold.partition, hold.epoch, ids, State(state) if state else None, due))
    return messages
