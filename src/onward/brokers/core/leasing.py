"""What a member does about its leases in one turn. Pure: a store reads the view, carries the decisions out in one step
of its own, and memory follows when that is stored."""

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from onward.brokers.core.holdings import Hold
from onward.brokers.core.share import Seat, wish
from onward.event import Partition

T = TypeVar("T")


class TopicView(NamedTuple):
    """A topic's partitions and members, as the store has them.

    `owner` of a seat is set while its lease counts. A store that lets an owner renew a lease that has ended, while no
    other member has claimed the partition, sets it for such a seat too."""

    topic: str
    seats: Sequence[Seat]
    members: Mapping[str, bool]  # who is listed; whether its lease counts


class Situation(NamedTuple, Generic[T]):
    """What this member knows of itself."""

    me: str
    held: Mapping[Partition, Hold[T]]
    asked: Mapping[Hold[T], bool]  # to be released, and whether they are drained
    retiring: bool  # it released unasked: it keeps what it has, claims nothing and counts no more


class Decisions(msgspec.Struct, Generic[T]):
    """What to store, and what to report once that is stored."""

    released: dict[Hold[T], bool] = {}  # give back, clean or not, as asked
    overdue: list[Hold[T]] = []  # give back uncleanly and report as lost: their deadline has passed
    lost: list[Hold[T]] = []  # report as lost: the store has another owner
    renewed: list[Hold[T]] = []
    claims: list[Seat] = []
    revoked: list[Hold[T]] = []  # ask for these back
    unannounced: list[Hold[T]] = []  # give back as they came: nothing of them can have run
    struck: dict[str, list[str]] = {}  # by topic: members to take off the list
    retires: bool = False


def released(situation: Situation[T], now: float) -> Decisions[T]:
    """The first half of a turn: what was asked for, and what is overdue. A member on which receive is not called does
    this half alone, so that its leases end."""
    decisions: Decisions[T] = Decisions(retires=situation.retiring)
    for hold in situation.held.values():
        if hold in situation.asked:
            decisions.released[hold] = situation.asked[hold]
            decisions.retires |= not hold.revoking
        elif hold.deadline <= now:
            decisions.overdue.append(hold)
    return decisions


def decide(situation: Situation[T], views: Sequence[TopicView], now: float) -> Decisions[T]:
    """A whole turn: release what was asked for, notice what was lost, renew the rest, then balance."""
    decisions = released(situation, now)
    going = {*decisions.released, *decisions.overdue}
    kept = {partition: hold for partition, hold in situation.held.items() if hold not in going}
    for view in views:
        _keep_topic(situation.me, view, kept, decisions)
    return decisions


def _keep_topic(me: str, view: TopicView, kept: Mapping[Partition, Hold[T]], decisions: Decisions[T]) -> None:
    seats, mine = [], []
    for seat in view.seats:
        hold = kept.get(seat.partition)
        if hold is not None and (seat.owner, seat.fence) == (me, hold.fence):
            mine.append(hold)
            seats.append(seat)
            continue
        if hold is not None:
            decisions.lost.append(hold)
        # A seat of ours that we do not hold is left from an earlier ownership: it is free.
        seats.append(seat._replace(owner=None) if seat.owner == me else seat)
    decisions.renewed += mine
    if decisions.retires:
        decisions.struck[view.topic] = [me]
    else:
        _balance(me, view, seats, mine, decisions)


def _balance(me: str, view: TopicView, seats: Sequence[Seat], mine: Sequence[Hold[T]], decisions: Decisions[T]) -> None:
    decisions.struck[view.topic] = [name for name, alive in view.members.items() if not alive and name != me]
    alive = sorted({*(name for name, alive in view.members.items() if alive), me})
    wanted = wish(view.topic, me, seats, alive, leaving=sum(hold.revoking for hold in mine))
    decisions.claims += wanted.claim
    # First what is not announced yet, which is free at once, then the last partitions.
    spare = sorted(
        (hold for hold in mine if not hold.revoking), key=lambda hold: (hold.announced, -hold.partition.index)
    )
    for hold in spare[: wanted.surplus]:
        (decisions.revoked if hold.announced else decisions.unannounced).append(hold)
