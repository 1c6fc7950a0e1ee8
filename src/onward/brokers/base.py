"""The broker contract. Every broker has partitions, and each partition has an owner, an epoch and positions.

`onward.testing.BrokerSuite` proves the guarantees below on every broker. Some conventions hold throughout:

- All ends are exclusive. A watermark is the first position that is not known to be done. An interval is [a, b).
- Positions are sparse. They ascend, also from one owner to the next, and are never reused within a log id. They have
  gaps, so the difference of two positions is not a number of events.
- A time named `due` is Unix time. `sure_until` is on the clock of `onward.clock.now`.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec

from onward import clock
from onward.event import Delivery, Event, Partition, Tries

__all__ = [
    "PASSING",
    "Aside",
    "AsideRecord",
    "Asks",
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
    "Figure",
    "FigureKind",
    "FigureSample",
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

# What an accepted event survives. fsync: a power cut. replicated: the loss of a node. window: a crash of the process,
# but a power cut loses the last moments. memory: nothing.
Durability = Literal["fsync", "replicated", "window", "memory"]
Ordering = Literal["key", "partition", "none"]
Start = Literal["earliest", "latest"] | float  # or a Unix time
Relay = tuple[str, int]  # the shard of an outbox, and the fence of the relay that publishes for it

# The prefix of temporary groups, such as those of `onward tail`. They have no use without a member, so brokers delete
# them when the last member is gone. Retention and trimming ignore them.
PASSING = "onward-passing."
_BRIEF = 200  # how many characters of an error's message `Failure.brief` keeps


class Features(msgspec.Struct, frozen=True):
    """What a broker can do. The test suites and the table in the docs read nothing else about a broker."""

    stable_positions: bool  # a position names the same event in every delivery, forever
    fence: bool  # Assigned carries a fence
    durability: Durability
    aside: bool  # records can be listed, filtered, moved and removed one by one
    starts: frozenset[str]  # where a new group can start: a subset of earliest, latest, time
    shared: bool = False  # with ordering="none" several members share a partition, see Assigned
    fenced_publish: bool = False  # publish checks `relay`
    append_in: bool = False  # the log is in a database in which the application may have its own tables


class State(StrEnum):
    """The states of an event that is stored in the aside."""

    WAITING = "waiting"  # its retry is due at `due`
    HELD = "held"  # an earlier event of its key is unfinished or dead
    DEAD = "dead"  # Onward has given up on it


class Failure(msgspec.Struct, frozen=True):
    """Why Onward gave up on an event, for the operator who reads the dead letter.

    An event whose retry is still to come has one too, with the reason `failed`. It remembers the facts that a later
    dead letter needs, such as the time of the first failure."""

    reason: str  # of a dead letter: exhausted, undecodable, expired, crashed, refused, lost; of a retry: failed
    error: str  # the exception's type
    message: str
    traceback: str
    handler: str
    attempts: int
    first: float  # Unix time of the first and of the last failure
    last: float

    def brief(self) -> "Failure":
        """A short form, for memory and for records that are written often: a cut message and no traceback."""
        message = self.message if len(self.message) <= _BRIEF else f"{self.message[:_BRIEF]}…"
        return msgspec.structs.replace(self, message=message, traceback="")


class AsideRecord(msgspec.Struct, frozen=True):
    """An event of a group that is stored in the aside."""

    id: str  # from record_id, so an event that is set aside twice has one record
    group: str
    partition: Partition
    position: int
    state: State
    due: float | None
    event: Event
    tries: Tries
    failure: Failure | None
    wait_s: float | None = None  # from the failure to `due`. No owner waits longer, even if its wall clock is wrong

    def moved(self, to: State, due: float | None) -> "AsideRecord":
        """The record after an operator moved it. Leaving the state dead resets the tries."""
        tries = Tries() if self.state is State.DEAD else self.tries
        return msgspec.structs.replace(self, state=to, due=due, tries=tries, wait_s=None)

    def whole(self) -> "AsideRecord":
        """The record with every field of its event decoded, as an encoder needs it. See Event.whole."""
        event = self.event.whole()
        return self if event is self.event else msgspec.structs.replace(self, event=event)


def record_id(group: str, log_id: str, partition: Partition, position: int) -> str:
    return f"{group}:{log_id}:{partition.index}:{position}"


def record_position(id_: str) -> int:
    return int(id_.rsplit(":", 1)[1])


def record_log(id_: str) -> str:
    """The log id inside a record's id, or "" if the text is not a record id."""
    parts = id_.rsplit(":", 3)
    return parts[1] if len(parts) == 4 else ""


class Progress(msgspec.Struct, frozen=True):
    """Which events of a partition are done. Each broker stores it in its own way."""

    partition: Partition
    epoch: int
    watermark: int
    done_above: Sequence[tuple[int, int]] = ()  # ascending, disjoint, all above the watermark
    fresh: Sequence[int] = ()  # positions that became done since the last successful settle
    tries: Mapping[int, Tries] = {}  # by position, for open events that have been tried; the control plane bounds it


class Assigned(msgspec.Struct, frozen=True):
    """This process owns the partition from now on, under this epoch.

    - `epoch` is the number of this ownership within this process. It grows and is never reset.
    - `fence` is the number of this ownership over the whole fleet. It grows with every ownership, and the broker has
      stored it durably before it reports Assigned. None if the broker has no fences.
    - `log_id` names one life of the log. If a topic is deleted and created again, its log has a new id.
    - `stored` is the progress that was settled last. None: the group has no progress here.
    - `unclean`: the last owner ended without a drained release. The events that it was running may have taken effect.

    `shared` is only for ordering="none", on brokers with `features.shared`. Several members hold the partition at the
    same time, and each event goes to one of them:

    - `stored` and `fence` are None, and `unclean` is False.
    - The control plane does not load records from the aside. When a waiting record is due, the broker delivers it to
      any one member, with its `tries`.
    - A settle stores only what is in `fresh`.
    - Positions may be unstable.
    """

    partition: Partition
    epoch: int
    fence: int | None
    log_id: str
    stored: Progress | None
    unclean: bool
    shared: bool = False


class Reached(msgspec.Struct, frozen=True):
    """The broker has read the log up to this position. Positions below it that were not delivered do not exist."""

    partition: Partition
    epoch: int
    position: int


class Moved(msgspec.Struct, frozen=True):
    """An operator moved records of this partition to the state `to`, or removed them (`to` is None)."""

    partition: Partition
    epoch: int
    ids: Sequence[str]
    to: State | None
    due: float | None


class Revoked(msgspec.Struct, frozen=True):
    """The broker takes these partitions back. Release them within `deadline_s` seconds of receipt, or Fenced follows.

    No Delivery of them follows. Until the release this member still owns them, and its settles take effect.
    """

    partitions: Sequence[Partition]
    deadline_s: float


class Fenced(msgspec.Struct, frozen=True):
    """This member has lost these partitions. It must not settle anything in them."""

    partitions: Sequence[Partition]


Message = Delivery | Assigned | Reached | Moved | Revoked | Fenced


class BrokerLag(msgspec.Struct, frozen=True):
    """The events in the log that were not yet delivered to this subscription. None means unknown, never 0."""

    undelivered: int | None
    oldest_age_s: float | None


class Asks(msgspec.Struct, frozen=True):
    """What a member's handler asks of the broker. A broker that has no use for a field ignores it.

    - `concurrency`: how many calls run at once.
    - `timeout_s`: how long a call may take. None: no limit.
    - `types`: patterns of the only event types that the handler gets, where `*` is any text. Empty: all types.
    - `tiers`: by tier (critical, bulk), the pattern of its event types; all others are normal. Only for shared
      partitions.
    """

    concurrency: int = 100
    timeout_s: float | None = 30.0
    types: Sequence[str] = ()
    tiers: Mapping[str, str] = {}


class TopicSpec(msgspec.Struct, frozen=True):
    name: str
    partitions: int


class GroupSpec(msgspec.Struct, frozen=True):
    """A group as its handler asks for it: see Broker.subscribe."""

    topic: str
    group: str
    ordering: Ordering = "key"
    start: Start = "earliest"
    asks: Asks = Asks()


class Topology(msgspec.Struct, frozen=True):
    """The objects that should exist at the broker.

    - `own`: objects that only this kind of broker has, like exchanges.
    - `groups`: a broker creates those whose first member would otherwise come too late for some events, or that need a
      permission which members may not have. Others are created when a member joins, and are ignored here."""

    topics: Sequence[TopicSpec] = ()
    own: Sequence[object] = ()
    groups: Sequence[GroupSpec] = ()


class Change(msgspec.Struct, frozen=True):
    """One difference between the declared topology and the objects at the broker."""

    what: str  # the object's kind and name, such as "topic orders"
    action: Literal["create", "refuse"]
    detail: str


class Finding(msgspec.Struct, frozen=True):
    """One thing that an operator should know about the broker, and what to do about it."""

    level: Literal["ok", "warning", "error"]
    what: str
    cure: str = ""


FigureKind = Literal["counter", "gauge", "histogram"]


class FigureSample(NamedTuple):
    """One value. For a histogram: the sum of the observations, and how many of them are in each bucket."""

    labels: tuple[str, ...]
    value: float
    buckets: tuple[int, ...] = ()


class Figure(msgspec.Struct, frozen=True):
    """A metric that only this kind of broker has, as this process has counted it so far.

    `bounds`: the upper ends of a histogram's buckets, ascending; it has one more bucket than bounds. `largest`: of the
    gauges of several processes the largest counts, not their sum. `alias_of`: the metric has no samples of its own, but
    those of this one, which every broker has by topic, group and partition. `places`: the alias is of a metric by topic
    and group, and has these labels for them."""

    name: str  # without a prefix, and a counter without _total
    kind: FigureKind
    help: str
    labels: tuple[str, ...]
    samples: Sequence[FigureSample] = ()
    bounds: tuple[float, ...] = ()
    largest: bool = False
    alias_of: str = ""
    places: Mapping[tuple[str, ...], tuple[str, ...]] = {}


class MemberInfo(msgspec.Struct, frozen=True):
    """A live member.

    `endpoint`: the host:port at which its process serves readings, or None if it serves none. `ordering`: the
    ordering of its handler, or None if it is unknown."""

    name: str
    endpoint: str | None = None
    ordering: Ordering | None = None

    @classmethod
    def parse(cls, member: str) -> "MemberInfo":
        """Parse the `member` of `subscribe`: a name, then optionally @ and its endpoint, then # and its ordering."""
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
    """A process that a supervisor started. The supervisor has a number of slots and runs one process in each.

    `slot` is unique in the fleet and stays the same when a process is replaced. `member` is the name of this process.
    `gone`: earlier members of the slot. All their processes have ended, so none of their handlers can still run."""

    slot: str
    member: str
    gone: frozenset[str] = frozenset()


class Standing(msgspec.Struct, frozen=True):
    """How far a group is in one partition. Positions are sparse: `end - watermark` is not a number of events.

    Of a shared partition, the watermark is 0 and the end is the number of events that wait."""

    watermark: int
    end: int | None  # the end of the log; None: unknown
    owner: str | None  # the name of the live member that owns the partition; None: no live member does
    fence: int | None  # the fence of the last ownership


class GroupInfo(msgspec.Struct, frozen=True):
    group: str
    topic: str
    members: Sequence[MemberInfo]  # only live ones
    partitions: Mapping[int, Standing]  # by index


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a store's lock. If two answers some time apart are equal, that process is stuck."""

    pid: int
    since: float  # on the clock of onward.clock.now
    program: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.program}), which has held it for {max(0.0, clock.now() - self.since):.1f} s"


class Filter(msgspec.Struct, frozen=True):
    """Selects records: every field that is set must match."""

    states: frozenset[State] = frozenset(State)
    topic: str | None = None
    key: str | None = None
    error: str | None = None
    text: str | None = None  # a text in the error's message or in the value
    since: float | None = None  # the last failure was at this Unix time or later
    until: float | None = None  # the last failure was before this Unix time


class Page(msgspec.Struct, frozen=True):
    records: Sequence[AsideRecord]
    after: str | None  # pass it to the next scan; None: this is the last page


class Count(msgspec.Struct, frozen=True):
    """How many records match a filter."""

    records: int
    oldest: float | None  # Unix time, the earliest of their last failures; None: no matching record has failed


class Aside(Protocol):
    """All records of one group. The owner of a partition calls `load`, and writes only through settle. The other
    methods are for operators."""

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        """Waiting and held records (with `dead` also dead ones) above position `after`, ascending by position.

        At most `limit` records and `max_bytes` bytes, but at least one record if there is one. It returns no record
        that a former owner wrote after it lost the partition, and no record of a former log."""

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        """One page of matching records, in a stable order. If records are added or removed between two pages, no other
        record is repeated or left out."""

    async def count(self, where: Filter) -> Count:
        """Count the matching records without reading them. So `where.text` must be None."""

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        """Move those records that are still in the state `expect`, and return how many moved. The partition's owner
        gets Moved. Leaving the state dead resets the tries."""

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        """Remove those records that are still in the state `expect`, and return how many were removed. The partition's
        owner gets Moved."""


class Subscription(Protocol):
    """One member of a group. One task calls `receive`; settle, release and lag may run at the same time.

    A partition that is passed to release, pause or resume means the ownership that receive reported last.
    """

    async def receive(self, limit: int, max_bytes: int, wait_s: float) -> Sequence[Message]:
        """Wait for messages and return them in the order in which they happened. Empty if none arrives in `wait_s`.

        It returns at most `limit` deliveries, and at most `max_bytes` of them, but always one if there is one. With
        `limit` 0 it returns no delivery but all other messages. Positions of a partition ascend within an epoch.
        Cancelling the call loses no message.
        """

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        """Store which events are done. `aside`: records to store. `gone`: ids of records to remove.

        The broker stores `aside` durably before the progress, or in the same transaction. It removes `gone` only after
        the progress is durable. The call is idempotent.

        Returns the partitions that this member has lost. In those the call had no effect. Raises AsideError if the
        broker refused records: the call had no effect in its `partitions`, this member has lost its `lost`, and all
        other partitions were settled. After any other error, repeat the same call.
        """

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        """Give partitions back, after Revoked or before this member leaves the group.

        A member that releases partitions which were not revoked is about to leave. It gets no partition after that.
        If `drained` is False, or the member closes without a release, the next owner is assigned `unclean`."""

    def troubles(self) -> Sequence[str]:
        """Why some of the group's events are not delivered, for readiness. Empty if nothing stops them."""

    def sure_until(self) -> float:
        """The time until which this member surely owns all its partitions. No other member gets one of them before.

        It is in the past while a Fenced message is undelivered. After the process was suspended, only the reply to a
        request that was sent since then can extend it."""

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """Deliver no event of these partitions until resume. A receive that is running may still return events that it
        has already read. The member stays the owner."""

    async def resume(self, partitions: Sequence[Partition]) -> None: ...

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        """The lag of every partition that this member owns."""

    async def close(self) -> None:
        """Leave the group. A receive that is waiting returns. Events that are not settled go to the next owner.
        Idempotent."""


class Broker(Protocol):
    features: Features

    async def publish(self, events: Sequence[Event], *, relay: Relay | None = None) -> None:
        """Store the events. Returns when the broker has stored all of them durably.

        The events of one key are stored in the order in which the calls of `publish` began. If an event is not
        accepted, no later event of its key is accepted, in this call and in all calls that began before the failure.
        Calls that begin later are not affected.

        Raises PublishError if some events were not accepted. The events in its `refused` were not accepted. For those
        in its `unknown` the answer was lost, so they may be accepted. All others were accepted.

        `relay` is checked where `features.fenced_publish` is true. Raises RelayFenced if the broker has seen a higher
        fence for that shard. From that moment it accepts no event of the call. Events that it accepted before are not
        in `refused`. Raises BadSetting if `relay` is not a shard and a fence.
        """

    def append_in(self, connection: Any, events: Sequence[Event]) -> Callable[[], None] | None:
        """Store the events inside the transaction of a DB-API connection that the caller has open. Any thread may call
        it; the statements run in the caller's thread.

        Returns None if this broker does not keep its log in that connection's database. Otherwise it returns a function
        to call after the commit, in any thread: it wakes the members. Without that call they find the events by
        themselves, some time later. If the transaction is rolled back, nothing is stored. Without events, nothing is
        written.

        The events of one key are stored in the order of the commits. Raises what `publish` raises; then nothing of this
        call is stored, and the transaction is still open. Raises BadSetting if the connection is in autocommit."""

    async def subscribe(
        self,
        topics: Sequence[str],
        *,
        group: str,
        member: str,
        ordering: Ordering,
        start: Start,
        supervised: Supervised | None = None,
        asks: Asks | None = None,
    ) -> Subscription:
        """Join the group. `member` is a text that MemberInfo.parse reads.

        `start` is used only where the group has no progress. A partition that is added to the topic later always
        starts at its beginning.

        `supervised`: its `gone` members lose their partitions at once, without waiting for a lease, a session or the
        takeover grace. The next owners are assigned `unclean`. A settle of a `gone` member no longer takes effect.

        `asks`: what the handler asks for. Raises BadSetting if this broker cannot keep its promises with it."""

    def aside(self, group: str) -> Aside: ...

    async def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        """Return the differences from the topology. With `apply`, create the missing objects that can be created.
        Raises BadSetting if this kind of broker does not have an object of `topology.own`."""

    async def topics(self) -> Sequence[TopicSpec]:
        """The topics that applications can publish to, sorted by name. Topics for the broker's own use are left out."""

    async def groups(self, topic: str) -> Sequence[GroupInfo]:
        """Every group that has progress in the topic. Empty if the topic does not exist."""

    async def owners(self, topic: str, group: str) -> Sequence[MemberInfo]:
        """The live members of the group that own a partition of the topic now. Cheaper than `groups`."""

    async def drop_group(self, topic: str, group: str) -> None:
        """Delete the group's progress and records in the topic. Raises BrokerError while a member is alive."""

    async def drop_topic(self, topic: str) -> None:
        """Delete the topic with its events, and every group's progress and records in it. Does nothing if the topic
        does not exist. Raises BrokerError while a member of any group is alive."""

    def figures(self) -> Sequence[Figure]:
        """The metrics that only this kind of broker has, with all names even if nothing was counted yet. It never asks
        the server."""

    async def diagnose(self) -> Sequence[Finding]:
        """Examine the broker and report to the operator which checks are ok and which are not. Changes nothing."""

    async def close(self) -> None:
        """End all subscriptions. Every publish that has begun ends: its events are accepted, or it raises
        PublishError. Idempotent."""
