"""What a member should do about its leases in one turn. Pure: a store reads the view, writes the decisions in one
atomic step, and then updates the state in memory."""

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from onward.brokers.core.holdings import Hold
from onward.brokers.core.share import Seat, wish
from onward.event import Partition

T = TypeVar("T")


class TopicView(NamedTuple):
    """The partitions and members of a topic, as they are in the store.

    A seat has an `owner` while the owner's lease is valid. Some stores let an owner renew a lease that has ended, if no
    other member has claimed the partition. Such a store sets our `owner` on these seats too."""

    topic: str
    seats: Sequence[Seat]
    members: Mapping[str, bool]  # by name of each listed member: whether its lease is valid


class Situation(NamedTuple, Generic[T]):
    """The state of this member."""

    me: str
    held: Mapping[Partition, Hold[T]]
    asked: Mapping[Hold[T], bool]  # the partitions to release, and whether they are drained
    # It released partitions that were not revoked. It keeps its other partitions, claims none, and no longer counts as
    # a member.
    retiring: bool


class Decisions(msgspec.Struct, Generic[T]):
    """What to write to the store, and what to report after that."""

    released: dict[Hold[T], bool] = {}  # give back as requested, clean or not
    overdue: list[Hold[T]] = []  # give back as unclean and report as lost, because their deadline has passed
    lost: list[Hold[T]] = []  # report as lost, because the store has another owner
    renewed: list[Hold[T]] = []
    claims: list[Seat] = []
    revoked: list[Hold[T]] = []  # report as revoked, so that the member releases them
    unannounced: list[Hold[T]] = []  # give back unchanged, because none of their events can have run
    struck: dict[str, list[str]] = {}  # by topic: members to remove from the list
    retires: bool = False


def released(situation: Situation[T], now: float) -> Decisions[T]:
    """The first half of a turn: give back the requested and the overdue partitions. If `receive` is no longer called, a
    member does only this half, so that its leases end."""
    decisions: Decisions[T] = Decisions(retires=situation.retiring)
    for hold in situation.held.values():
        if hold in situation.asked:
            decisions.released[hold] = situation.asked[hold]
            decisions.retires |= not hold.revoking
        elif hold.deadline <= now:
            decisions.overdue.append(hold)
    return decisions


def decide(situation: Situation[T], views: Sequence[TopicView], now: float) -> Decisions[T]:
    """A whole turn: release the requested partitions, find the lost ones, renew the others, then balance."""
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
        # A seat that has our name but that we do not hold is from an earlier ownership. It is free.
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
    # First those that are not announced yet, which are free at once, then those with the highest index.
    spare = sorted(
        (hold for hold in mine if not hold.revoking), key=lambda hold: (hold.announced, -hold.partition.index)
    )
    for hold in spare[: wanted.surplus]:
        (decisions.revoked if hold.announced else decisions.unannounced).append(hold)
