"""What the server says of a group's partitions and members, and whose leases count. Pure.

A lease is over when the member that holds it has not renewed it for its own lease time on *our* clock."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from onward.brokers.base import MemberInfo
from onward.brokers.core.observed import Observed
from onward.brokers.core.share import Seat
from onward.brokers.redis.positions import position_of
from onward.event import Partition

UNKNOWN = "?"  # the owner of a partition whose last claim may be lost
_SLACK = 1.05  # clocks of two machines run at slightly different speeds
_SLACK_S = 0.05


class LeaseView(NamedTuple):
    """A group's partition as the server has it. `incarnation` is empty if the group is not there."""

    incarnation: str
    owner: str  # a token, empty or UNKNOWN
    beat: str
    lease_s: float
    clean: bool
    fence: int
    gone: str
    log: str  # the one that the group's progress belongs to
    current_log: str  # empty: the partition's own entry is not there
    has_stream: bool
    notices: int = 0  # of moved records, for the owner
    last_id: bytes = b""  # that a stream of others has given; empty: not asked

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "LeaseView":
        """ValueError: a field is damaged."""
        texts = [(field or b"").decode() for field in reply[:9]]
        inc, owner, beat, lease_ms, clean, fence, gone, log, current = texts
        lease_s, has_stream, notices = _number("lease", lease_ms) / 1000, bool(reply[9]), int(reply[10])
        last_id = reply[11] if len(reply) > 11 else b""
        return cls(
            *(inc, owner, beat, lease_s, clean == "1", _number("fence", fence), gone, log, current),
            *(has_stream, notices, last_id),
        )

    @property
    def is_there(self) -> bool:
        return self.incarnation != ""

    def has_given(self, position: int) -> bool:
        """Whether the stream has given all ids below this position. One that was replaced has not."""
        last = position_of(self.last_id) if self.last_id else None
        return last is None or position <= last + 1


class ListedMember(NamedTuple):
    beat: str
    lease_s: float
    at_ms: int  # when it renewed last, on the server's clock; only shown, never compared with a lease

    @classmethod
    def of(cls, value: bytes) -> "ListedMember":
        """ValueError: it is damaged."""
        beat, lease_ms, at_ms = value.decode().split()
        return cls(beat, int(lease_ms) / 1000, int(at_ms))


class MemberList(NamedTuple):
    members: dict[str, ListedMember]
    damaged: list[str]  # fields that are no members

    @classmethod
    def of(cls, pairs: Sequence[bytes]) -> "MemberList":
        found = cls({}, [])
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            try:
                found.members[name.decode()] = ListedMember.of(value)
            except ValueError:
                found.damaged.append(name.decode(errors="backslashreplace"))
        return found


def _number(field: str, text: str) -> int:
    try:
        return int(text or 0)
    except ValueError:
        raise ValueError(f"its field {field} is {text!r}, not a number") from None


def owner_of(token: str) -> str:
    """The member of a token, with the suffix that makes each subscription unique."""
    return token.partition(":")[2]


def member_of(owner: str) -> MemberInfo:
    return MemberInfo.parse(owner.rpartition(":")[0])


def member_place(topic: str, owner: str) -> str:
    """Its name among what is observed."""
    return f"{topic} {owner}"


class GroupWatch:
    """What one member has seen of its group."""

    def __init__(self, me: str, lease_s: float) -> None:
        self._me = me
        self._lease_s = lease_s
        self._observed = Observed()
        # By partition: our token, which other partitions may have too, and the incarnation that confirmed it last.
        self._confirmed: dict[Partition, tuple[str, str]] = {}
        self._fences: dict[Partition, int] = {}  # the highest ever seen
        self.next_expiry = math.inf  # of another member's lease

    def begin(self) -> None:
        """A new look follows."""
        self.next_expiry = math.inf

    def seat(self, partition: Partition, view: LeaseView, incarnation: str, now: float) -> Seat:
        self.saw_fence(partition, view.fence)
        is_gone = view.owner == "" and view.gone == str(view.fence)
        owner = self._counting(partition, view, incarnation, now)
        return Seat(partition, owner, view.fence, view.clean, is_gone)

    def members(self, topic: str, listed: Mapping[str, ListedMember], now: float) -> dict[str, bool]:
        """Who is listed, and whether its lease counts."""
        alive = {}
        for name, member in listed.items():
            place = member_place(topic, name)
            self._observed.saw(place, member.beat, now)
            alive[name] = name == self._me or not self._is_over(place, member.lease_s, now)
        return alive

    def confirmed(self, partition: Partition, token: str, incarnation: str) -> None:
        """The server accepted our claim, or our renewal before the lease had lapsed."""
        self._confirmed[partition] = token, incarnation

    def forget(self, partitions: Iterable[Partition], members: Iterable[str] = ()) -> None:
        for partition in partitions:
            self._confirmed.pop(partition, None)
        self._observed.forget(set(members))

    def is_certain(self, partition: Partition, token: str, incarnation: str) -> bool:
        """No claim of another member can be lost: the server has been the same one since it confirmed ours."""
        return self._confirmed.get(partition) == (token, incarnation)

    def highest_fence(self, partition: Partition) -> int:
        return self._fences.get(partition, 0)

    def saw_fence(self, partition: Partition, fence: int) -> None:
        self._fences[partition] = max(fence, self._fences.get(partition, 0))

    def _counting(self, partition: Partition, view: LeaseView, incarnation: str, now: float) -> str | None:
        """The owner whose lease counts; None: the partition is free."""
        if view.owner == "":
            return None
        owner = UNKNOWN if view.owner == UNKNOWN else owner_of(view.owner)
        if owner == self._me and self.is_certain(partition, view.owner, incarnation):
            return owner  # leasing compares the fence: what we do not hold any more is free
        lease_s = view.lease_s if owner != UNKNOWN else max(view.lease_s, self._lease_s)
        self._observed.saw(str(partition), (view.incarnation, view.owner, view.beat), now)
        if self._is_over(str(partition), lease_s, now):
            return None
        return UNKNOWN if owner == self._me else owner

    def _is_over(self, name: str, lease_s: float, now: float) -> bool:
        lease_s = lease_s * _SLACK + _SLACK_S
        over_at = self._observed.over_at(name, lease_s)
        if over_at is not None and over_at > now:
            self.next_expiry = min(self.next_expiry, over_at)
        return self._observed.is_over(name, lease_s, now)
