"""The fair share of partitions: how many each member should own. Pure: values in, values out."""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onward.event import Partition


class Seat(NamedTuple):
    """A partition of a group, as the store has it."""

    partition: Partition
    owner: str | None  # whose lease counts; None: it is free
    fence: int  # of the last ownership
    clean: bool = True  # the last ownership ended with a drained release
    is_gone: bool = False  # no process of its last owner is left


class Wish(NamedTuple):
    """What a member should do about a topic."""

    claim: list[Seat]
    surplus: int  # how many to give up


def quotas(topic: str, partitions: int, members: Sequence[str], held: Mapping[str, int]) -> dict[str, int]:
    """How many partitions each live member should own; the sum is all of them.

    A member that already owns one more keeps it, so that a join moves no more than it must. The rest goes by rank.
    Ranks are rotated by the topic's name, so that topics of one partition do not all end up with the same member.
    """
    base, extra = divmod(partitions, len(members))
    ranked = sorted(members)
    turn = zlib.crc32(topic.encode()) % len(ranked)
    ranked = ranked[turn:] + ranked[:turn]
    # sorted is stable: among equals the rank decides
    ranked = sorted(ranked, key=lambda member: -min(held.get(member, 0), base + 1))
    return {member: base + (rank < extra) for rank, member in enumerate(ranked)}


def wish(topic: str, me: str, seats: Sequence[Seat], members: Sequence[str], leaving: int) -> Wish:
    """What `me` should claim or give up; `leaving` of its partitions are being given up already."""
    held: dict[str, int] = {}
    for seat in seats:
        if seat.owner is not None:
            held[seat.owner] = held.get(seat.owner, 0) + 1
    quota = quotas(topic, len(seats), members, held)[me]
    have = held.get(me, 0) - leaving
    free = [seat for seat in seats if seat.owner is None]
    return Wish(free[: max(0, quota - have)], max(0, have - quota))
