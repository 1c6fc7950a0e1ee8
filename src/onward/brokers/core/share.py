"""The fair share of partitions: how many each member should own. Pure: values in, values out."""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onward.event import Partition


class Seat(NamedTuple):
    """A partition of a group, as it is in the store."""

    partition: Partition
    owner: str | None  # the owner with a valid lease; None: the partition is free
    fence: int  # the fence of the last ownership
    clean: bool = True  # the last ownership ended with a drained release
    is_gone: bool = False  # all processes of the last owner have ended


class Wish(NamedTuple):
    """What a member should do about a topic."""

    claim: list[Seat]
    surplus: int  # how many partitions to give back


def quotas(topic: str, partitions: int, members: Sequence[str], held: Mapping[str, int]) -> dict[str, int]:
    """How many partitions each live member should own. Together they own all partitions.

    If the partitions cannot be divided equally, some members own one more. Those that already do keep it, so that a
    join moves as few partitions as possible. The rest is decided by rank. Ranks are rotated by the topic's name, so
    that topics with one partition are not all owned by the same member.
    """
    base, extra = divmod(partitions, len(members))
    ranked = sorted(members)
    turn = zlib.crc32(topic.encode()) % len(ranked)
    ranked = ranked[turn:] + ranked[:turn]
    # sorted is stable, so the rank decides between equal members
    ranked = sorted(ranked, key=lambda member: -min(held.get(member, 0), base + 1))
    return {member: base + (rank < extra) for rank, member in enumerate(ranked)}


def wish(topic: str, me: str, seats: Sequence[Seat], members: Sequence[str], leaving: int) -> Wish:
    """What `me` should claim or give back. It is already giving back `leaving` of its partitions."""
    held: dict[str, int] = {}
    for seat in seats:
        if seat.owner is not None:
            held[seat.owner] = held.get(seat.owner, 0) + 1
    quota = quotas(topic, len(seats), members, held)[me]
    have = held.get(me, 0) - leaving
    free = [seat for seat in seats if seat.owner is None]
    return Wish(free[: max(0, quota - have)], max(0, have - quota))
