"""The broker contract. Every broker is partitions with an owner, an epoch and a position.

`onward.testing.BrokerSuite` proves each sentence below on every broker. All ends are exclusive: a watermark is the
next position not known to be done, intervals are [a, b). Positions are sparse: they ascend, over ownerships too, and
are never reused within a log id, but their differences count nothing. Times named `due` are Unix time; `sure_until`
is on the clock of `onward.clock.now`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal, Protocol, get_args

import msgspec

from onward import clock
from onward.event import Delivery, Event, Partition, Tries

__all__ = [
    "PASSING",
    "Aside",
    "AsideRecord",
    "Assigned",
    "Broker",
    "BrokerLag",
    "Change",
    "Count",
    "Delivery",
    "Durability",
    "Event",
    "Failure",
    "Features",
    "Fenced",
    "Filter",
    "Finding",
    "GroupInfo",
    "Holder",
    "MemberInfo",
    "Message",
    "Moved",
    "Ordering",
    "Page",
    "Partition",
    "Progress",
    "Reached",
    "Relay",
    "Revoked",
    "Standing",
    "Start",
    "State",
    "Subscription",
    "Supervised",
    "TopicSpec",
    "Topology",
    "Tries",
    "record_id",
    "record_log",
    "record_position",
]

Durability = Literal["fsync", "replicated", "window", "memory"]
Ordering = Literal["key", "partition", "none"]
Start = Literal["earliest", "latest"] | float  # or a Unix time
Relay = tuple[str, int]  # the shard of an outbox, and the fence of the relay that publishes for it

# Groups with this prefix are useless without a member: brokers forget them, retention and trimming ignore them.
PASSING = "onward-passing."
_BRIEF = 200  # characters of an error's message


class Features(msgspec.Struct, frozen=True):
    """What a broker can do. The suites and the docs' table tell brokers apart by this alone."""

    stable_positions: bool  # a position names the same event in every delivery, for ever
    fence: bool  # Assigned carries a number that grows with every ownership over the fleet
    durability: (
        Durability  # what an accepted event survives: a power cut, a lost node, all but the last moments, nothing
    )
    aside: bool  # records can be browsed, filtered, moved and removed one by one
    starts: frozenset[str]  # of earliest, latest, time: where a new group may start
    shared: bool = False  # with ordering="none" partitions are shared, see Assigned
    fenced_publish: bool = False  # publish checks `relay`


class State(StrEnum):
    """The states of an event that is out of the flow."""

    WAITING = "waiting"  # to be retried at `due`
    HELD = "held"  # behind an unfinished or dead event of its key
    DEAD = "dead"  # given up


class Failure(msgspec.Struct, frozen=True):
    """Why an event was given up, for the person who reads the dead letter. For an event that is to be tried again
    (reason `failed`): what its dead letter could not know otherwise."""

    reason: str  # exhausted, undecodable, expired, crashed, refused; failed
    error: str  # the exception's type
    message: str
    traceback: str
    handler: str
    attempts: int
    first: float  # Unix time of the first and of the last failure
    last: float

    def brief(self) -> "Failure":
        """A short form, to be kept in memory and in records that are written often."""
        message = self.message if len(self.message) <= _BRIEF else f"{self.message[:_BRIEF]}…"
        return msgspec.structs.replace(self, message=message, traceback="")


class AsideRecord(msgspec.Struct, frozen=True):
    id: str  # from record_id: an event that is set aside twice is one record
    group: str
    partition: Partition
    position: int
    state: State
    due: float | None
    event: Event
    tries: Tries
    failure: Failure | None
    wait_s: float | None = None  # from the failure to `due`; the wait is never longer, however clocks are set

    def moved(self, to: State, due: float | None) -> "AsideRecord":
        """The record after an operator moved it. Leaving the state dead resets the tries."""
        tries = Tries() if self.state is State.DEAD else self.tries
        return msgspec.structs.replace(self, state=to, due=due, tries=tries, wait_s=None)

    def whole(self) -> "AsideRecord":
        """The record with every field of its event decoded, fit for an encoder; see Event.whole."""
        event = self.event.whole()
        return self if event is self.event else msgspec.structs.replace(self, event=event)


def record_id(group: str, log_id: str, partition: Partition, position: int) -> str:
    return f"{group}:{log_id}:{partition.index}:{position}"


def record_position(id_: str) -> int:
    return int(id_.rsplit(":", 1)[1])


def record_log(id_: str) -> str:
    """The log that a record's id names; empty: it is no record id."""
    parts = id_.rsplit(":", 3)
    return parts[1] if len(parts) == 4 else ""


class Progress(msgspec.Struct, frozen=True):
    """What is done in a partition. Each broker stores it in its own way."""

    partition: Partition
    epoch: int
    watermark: int
    done_above: Sequence[tuple[int, int]] = ()  # ascending, disjoint, all above the watermark
    fresh: Sequence[int] = ()  # positions newly done since the last answered settle
    tries: Mapping[int, Tries] = {}  # of open positions that have been tried; bounded by the plane


class Assigned(msgspec.Struct, frozen=True):
    """This process owns the partition from here on, under this epoch.

    `epoch` grows with every ownership of this process and is never reset. `fence` grows over the fleet and was
    stored durably before this message; None where the broker has none. `log_id` is the incarnation of the log: a
    recreated topic is another log. `stored` is the last settled progress. `unclean`: the last owner ended without a
    drained release, so what it was running may have run.

    `shared`, only with ordering="none" where `features.shared`: several members hold the partition at once, and each
    event goes to one of them. `stored` and `fence` are None, `unclean` is False. The plane loads and draws no records:
    a waiting record that settle stored comes back as a Delivery when it is due, to any member, with its `tries`. Only
    `fresh` counts in settle. Positions need not be stable.
    """

    partition: Partition
    epoch: int
    fence: int | None
    log_id: str
    stored: Progress | None
    unclean: bool
    shared: bool = False


class Reached(msgspec.Struct, frozen=True):
    """The log was read up to here; positions below that were not delivered are holes."""

    partition: Partition
    epoch: int
    position: int


class Moved(msgspec.Struct, frozen=True):
    """An operator moved records of ours to another state, or removed them (`to` None)."""

    partition: Partition
    epoch: int
    ids: Sequence[str]
    to: State | None
    due: float | None


class Revoked(msgspec.Struct, frozen=True):
    """Release these within `deadline_s` seconds of receipt, or Fenced follows.

    No Delivery of them follows. They stay ours, and settles count, until the release.
    """

    partitions: Sequence[Partition]
    deadline_s: float


class Fenced(msgspec.Struct, frozen=True):
    """These are no longer ours. Settle nothing of them."""

    partitions: Sequence[Partition]


Message = Delivery | Assigned | Reached | Moved | Revoked | Fenced


class BrokerLag(msgspec.Struct, frozen=True):
    """What is in the log and was not delivered to this subscription. Unknown is None, never 0."""

    undelivered: int | None
    oldest_age_s: float | None


class TopicSpec(msgspec.Struct, frozen=True):
    name: str
    partitions: int


class Topology(msgspec.Struct, frozen=True):
    """What should exist at the broker. `own`: objects of kinds that only this broker has, such as exchanges."""

    topics: Sequence[TopicSpec] = ()
    own: Sequence[object] = ()


class Change(msgspec.Struct, frozen=True):
    """One difference between what is declared and what the broker has."""

    what: str  # the object's kind and name, such as "topic orders"
    action: Literal["create", "refuse"]
    detail: str


class Finding(msgspec.Struct, frozen=True):
    """One thing that an operator should know about the broker, and what to do about it."""

    level: Literal["ok", "warning", "error"]
    what: str
    cure: str = ""


class MemberInfo(msgspec.Struct, frozen=True):
    """A live member. `endpoint`: the host:port at which its process serves readings; None: it serves none. `ordering`:
    that of its handler; None: unknown."""

    name: str
    endpoint: str | None = None
    ordering: Ordering | None = None

    @classmethod
    def parse(cls, member: str) -> "MemberInfo":
        """From the text that was given to `subscribe`: a name, its endpoint behind an @, its ordering behind a #."""
        for ordering in get_args(Ordering):
            if member.endswith(f"#{ordering}"):
                return msgspec.structs.replace(cls.parse(member.removesuffix(f"#{ordering}")), ordering=ordering)
        name, _, endpoint = member.partition("@")
        return cls(name, endpoint or None)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        endpoint = "" if self.endpoint is None else f"@{self.endpoint}"
        return f"{self.name}{endpoint}{'' if self.ordering is None else f'#{self.ordering}'}"


class Supervised(msgspec.Struct, frozen=True):
    """A process that a supervisor started, in a slot that one process fills at a time.

    `slot` stays the same over these processes and is unique in the fleet. `member` is the name of this one. `gone`:
    earlier members of the slot that have no process left, so nothing of them can still run."""

    slot: str
    member: str
    gone: frozenset[str] = frozenset()


class Standing(msgspec.Struct, frozen=True):
    """How far a group is in one partition. Positions are sparse: `end - watermark` is no count of events."""

    watermark: int
    end: int | None  # of the log; None: unknown
    owner: str | None  # the name of a live member
    fence: int | None  # of the last ownership


class GroupInfo(msgspec.Struct, frozen=True):
    group: str
    topic: str
    members: Sequence[MemberInfo]  # those that are alive
    partitions: Mapping[int, Standing]  # by index


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a store's lock. Two equal answers some time apart mean that it is stuck."""

    pid: int
    since: float  # on the clock of onward.clock.now
    program: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.program}), which has held it for {max(0.0, clock.now() - self.since):.1f} s"


class Filter(msgspec.Struct, frozen=True):
    """Which records: every field that is set must match."""

    states: frozenset[State] = frozenset(State)
    topic: str | None = None
    key: str | None = None
    error: str | None = None
    text: str | None = None  # found in the error's message or in the value
    since: float | None = None  # bounds on the last failure, Unix time
    until: float | None = None


class Page(msgspec.Struct, frozen=True):
    records: Sequence[AsideRecord]
    after: str | None  # pass it to the next scan; None: there is no more


class Count(msgspec.Struct, frozen=True):
    """How many records match."""

    records: int
    oldest: float | None  # Unix time: the earliest of their last failures; None: none of them has failed


class Aside(Protocol):
    """All records of one group. The owner of a partition writes only through settle."""

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        """Waiting and held records (`dead`: dead ones too) above position `after`, ascending by position; at least one
        if there is one. None that a former owner wrote after it lost the partition, and none of a former log."""

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        """A page in a stable order. Records that come and go meanwhile neither repeat nor hide the others."""

    async def count(self, where: Filter) -> Count:
        """How many match, without reading them; so `where` has no text."""

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        """Compare and set: how many were still in `expect` and moved. The partition's owner gets Moved.
        Leaving the state dead resets the tries."""

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        """Compare and remove. The partition's owner gets Moved."""


class Subscription(Protocol):
    """One member of a group. `receive` has one caller and runs beside settle, release and lag.

    Partitions passed to release, pause and resume mean the ownership that receive reported last.
    """

    async def receive(self, limit: int, max_bytes: int, wait_s: float) -> Sequence[Message]:
        """What happened, in the order it happened; empty after `wait_s` of silence.

        At most `limit` deliveries (0: none, but everything else arrives), and at most `max_bytes` of them but always
        one. Positions of a partition ascend within an epoch. Cancelling it loses nothing.
        """

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        """Store what is done. `aside`: records to store; `gone`: ids of records to remove. `aside` is durable before,
        or atomically with, the progress, and the progress before `gone`. Idempotent.

        Returns the partitions that are no longer ours: nothing took effect there. AsideError: nothing was done in its
        `partitions`, its `lost` are no longer ours, all others were settled. Any other error: repeat the same call.
        """

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        """Give partitions up: after Revoked, or unasked by a member that is about to leave, which is then given no
        partition any more. After `drained` False, or close without release, the next owner is assigned unclean."""

    def troubles(self) -> Sequence[str]:
        """Why some of the group's events are not delivered; empty: nothing stops them. Readiness shows them."""

    def sure_until(self) -> float:
        """Until then ownership of everything held is certain: no other member is given a partition before. In the past
        while a Fenced message is undelivered. After the process was suspended, only a reply to a request sent since
        then extends it."""

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """No Delivery of these until resume, except what a running receive already took. Ownership is kept."""

    async def resume(self, partitions: Sequence[Partition]) -> None: ...

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        """For every partition held."""

    async def close(self) -> None:
        """Leave the group. Idempotent; a blocked receive returns. Unsettled events go to the next owner."""


class Broker(Protocol):
    features: Features

    async def publish(self, events: Sequence[Event], *, relay: Relay | None = None) -> None:
        """Returns when every event is durably accepted.

        Per key, calls take effect in the order they entered this object. When an event is not accepted, no later
        event of its key is, in this call and in calls already entered; later calls are tried normally.
        PublishError: its `refused` and `unknown` were not, or perhaps not, accepted; everything else was.

        `relay`, where `features.fenced_publish`: RelayFenced if the broker has seen a higher fence for that shard. From
        then on it accepts nothing of the call; what it accepted before is not in `refused`. BadSetting: it is no shard
        and fence.
        """

    async def subscribe(
        self,
        topics: Sequence[str],
        *,
        group: str,
        member: str,
        ordering: Ordering,
        start: Start,
        supervised: Supervised | None = None,
    ) -> Subscription:
        """Join the group. `member`: a text that MemberInfo.parse reads. `start` counts
        only where the group has no progress; a partition added later always starts at its beginning.

        `supervised`: what its `gone` members owned is assigned to this one without waiting for a lease, a session or
        the takeover grace, and unclean; a settle of theirs no longer counts."""

    def aside(self, group: str) -> Aside: ...

    async def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        """What differs from the topology; with `apply`, what can be made is made. BadSetting: an object of
        `topology.own` is not of this broker's kinds."""

    async def topics(self) -> Sequence[TopicSpec]:
        """The topics that events can be published to, by name; not what a broker stores for its own use."""

    async def groups(self, topic: str) -> Sequence[GroupInfo]:
        """Every group that has progress in the topic; none if there is no such topic."""

    async def owners(self, topic: str, group: str) -> Sequence[MemberInfo]:
        """The live members of the group that own a partition of the topic now. It costs less than `groups`."""

    async def drop_group(self, topic: str, group: str) -> None:
        """Forget the group's progress and records in the topic. BrokerError while a member is alive."""

    async def drop_topic(self, topic: str) -> None:
        """Delete the topic with its events, and every group's progress and records in it. Harmless if there is no such
        topic. BrokerError while a member of any group is alive."""

    async def diagnose(self) -> Sequence[Finding]:
        """What an operator should know: what was looked at and is well, and what is not. It changes nothing."""

    async def close(self) -> None:
        """Idempotent. Subscriptions end; publishes already entered are finished or refused, never forgotten."""
