"""Who should own how many partitions. Pure: values in, values out."""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A lease is written and judged by the same clock, but floating point may round its length up.
_ROUNDING_S = 1.0


class Lease(NamedTuple):
    until: float
    ttl: float
    boot: str

    def counts(self, now: float, boot: str) -> bool:
        """Is it valid? One that ends later than its own length from now was written in another boot."""
        return self.boot == boot and 0 < self.until - now <= self.ttl + _ROUNDING_S


class Seat(NamedTuple):
    """A partition as the group's table has it."""

    part: int
    index: int  # type: ignore[assignment]  # as in Partition
    owner: str | None  # of a lease that counts
    fence: int
    clean: bool


class Wish(NamedTuple):
    """What a member should do about a topic."""

    claim: list[Seat]
    surplus: int  # how many to give up


def quotas(topic: str, partitions: int, members: Sequence[str], held: Mapping[str, int]) -> dict[str, int]:
    """How many partitions each live member should own; the sum is all of them.

    Whoever owns one more already keeps it, so that a join moves no more than it must. The rest goes by rank, and
    ranks are turned by the topic, so that topics of one partition do not all end up with the same member.
    """
    base, extra = divmod(partitions, len(members))
    ranked = sorted(members)
    turn = zlib.crc32(topic.encode()) % len(ranked)
    ranked = ranked[turn:] + ranked[:turn]
    # sorted is stable: among equals the rank decides
    ranked = sorted(ranked, key=lambda member: -min(held.get(member, 0), base + 1))
    return {member: base + (rank < extra) for rank, member in enumerate(ranked)}


def wish(topic: str, me: str, seats: Sequence[Seat], members: Sequence[str], leaving: int) -> Wish:
    """What `me` should claim or give up; `leaving` of its partitions are on their way out already."""
    held: dict[str, int] = {}
    for seat in seats:
        if seat.owner is not None:
            held[seat.owner] = held.get(seat.owner, 0) + 1
    quota = quotas(topic, len(seats), members, held)[me]
    have = held.get(me, 0) - leaving
    free = [seat for seat in seats if seat.owner is None]
    return Wish(free[: max(0, quota - have)], max(0, have - quota))
