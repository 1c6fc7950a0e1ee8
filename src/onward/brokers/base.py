"""The broker contract. Every broker is partitions with an owner, an epoch and a position.

`onward.testing.BrokerSuite` proves each sentence below on every broker. All ends are exclusive: a watermark is
the next position not known done, intervals are [a, b). Times named `due` are Unix time; `sure_until` is on the
clock of `onward.clock.now`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from onward.event import Delivery, Event, Partition

Durability = Literal["fsync", "replicated", "window", "memory"]
Ordering = Literal["key", "partition", "none"]
Start = Literal["earliest", "latest"] | float  # or a Unix time

PASSING = "onward-passing."  # a group whose name begins so is of no use without a member: nothing of it need be kept
_BRIEF = 200  # characters of an error's message


class Features(msgspec.Struct, frozen=True):
    """What a broker can do. The suite and the docs' table are told apart by this alone."""

    stable_positions: bool  # a position names the same event in every delivery, for ever
    fence: bool  # Assigned carries a number that grows with every ownership over the fleet
    durability: Durability  # what an accepted event survives: a power cut, a node, a window of loss, nothing
    aside: bool  # records can be browsed, filtered, moved and removed one by one
    starts: frozenset[str]  # which of earliest, latest, time a new group may start at


class State(StrEnum):
    """Where an event stands that is out of the flow."""

    WAITING = "waiting"  # to be retried at `due`
    HELD = "held"  # a successor of an unfinished or dead event of its key
    DEAD = "dead"  # given up


class Tries(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What an open position has been through; it travels in the progress, so it survives a crash."""

    failed: int = 0
    started: int = 0
    crashes: int = 0


class Failure(msgspec.Struct, frozen=True):
    """Why an event was given up: the whole story, for the person who reads the dead letter. Of one that is to be tried
    again (reason `failed`), as much as its dead letter would not know without it."""

    reason: str  # exhausted, undecodable, expired, crashed, refused; failed
    error: str  # the exception's type
    message: str
    traceback: str
    handler: str
    attempts: int
    first: float  # Unix time of the first and of the last failure
    last: float

    def brief(self) -> "Failure":
        """What is worth its room in memory, and in a record that is written often."""
        message = self.message if len(self.message) <= _BRIEF else f"{self.message[:_BRIEF]}…"
        return msgspec.structs.replace(self, message=message, traceback="")


class AsideRecord(msgspec.Struct, frozen=True):
    id: str  # from record_id: the same event set aside twice is one record
    group: str
    partition: Partition
    position: int
    state: State
    due: float | None
    event: Event
    tries: Tries
    failure: Failure | None
    wait_s: float | None = None  # from its failure to `due`: however clocks are set, no longer; None: until `due`

    def moved(self, to: State, due: float | None) -> "AsideRecord":
        """As it stands when somebody has moved it: what leaves the state dead has its tries counted afresh."""
        tries = Tries() if self.state is State.DEAD else self.tries
        return msgspec.structs.replace(self, state=to, due=due, tries=tries, wait_s=None)


def record_id(group: str, log_id: str, partition: Partition, position: int) -> str:
    return f"{group}:{log_id}:{partition.index}:{position}"


def record_position(id_: str) -> int:
    return int(id_.rsplit(":", 1)[1])


class Progress(msgspec.Struct, frozen=True):
    """What is done in a partition. Each broker turns it into its own acknowledgement."""

    partition: Partition
    epoch: int
    watermark: int
    done_above: Sequence[tuple[int, int]] = ()  # ascending, disjoint, all above the watermark
    fresh: Sequence[int] = ()  # positions newly done since the last answered settle
    tries: Mapping[int, Tries] = {}  # of open positions that have been tried; bounded by the plane


class Assigned(msgspec.Struct, frozen=True):
    """This process owns the partition from here on, under this epoch.

    `epoch` grows with every ownership of this process and is never reset. `fence` grows over the fleet and was
    stored durably before this message; None where the broker cannot. `log_id` is the incarnation of the log: a
    recreated topic is another log. `stored` is the last settled progress. `unclean`: the owner before us ended
    without a drained release, so what was running there may have run.
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
    """Somebody else moved records of ours to another state, or removed them (`to` None)."""

    partition: Partition
    epoch: int
    ids: Sequence[str]
    to: State | None
    due: float | None


class Revoked(msgspec.Struct, frozen=True):
    """Please release these within `deadline_s` seconds from now; Fenced follows if you do not.

    No Delivery of them follows. Ownership is kept, and settles count, until the release.
    """

    partitions: Sequence[Partition]
    deadline_s: float


class Fenced(msgspec.Struct, frozen=True):
    """These are not ours any more. Settle nothing of them."""

    partitions: Sequence[Partition]


Message = Delivery | Assigned | Reached | Moved | Revoked | Fenced


class BrokerLag(msgspec.Struct, frozen=True):
    """What stands in the log and was not delivered to this subscription. Unknown is None, never 0."""

    undelivered: int | None
    oldest_age_s: float | None


class TopicSpec(msgspec.Struct, frozen=True):
    name: str
    partitions: int


class Topology(msgspec.Struct, frozen=True):
    topics: Sequence[TopicSpec]


class Change(msgspec.Struct, frozen=True):
    """One difference between what is declared and what the broker has."""

    topic: str
    action: Literal["create", "refuse"]
    detail: str


class GroupInfo(msgspec.Struct, frozen=True):
    group: str
    topic: str
    members: Sequence[str]  # those alive now
    watermarks: Mapping[int, int]  # by partition index


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
    after: str | None  # hand this back for the next page; None: there is no more


class Count(msgspec.Struct, frozen=True):
    """How many records there are of a kind."""

    records: int
    oldest: float | None  # Unix time: the earliest of their last failures; None: none of them has failed


class Aside(Protocol):
    """Everything of one group that is out of the flow. The owner of a partition writes only through settle."""

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        """Waiting and held records (and `dead` ones) above position `after`, ascending by position; at least one if
        there is one. What a former owner wrote after it lost the partition is not among them."""

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        """A page in a stable order. Records that come and go meanwhile neither repeat nor hide the others."""

    async def count(self, where: Filter) -> Count:
        """How many match, told without reading them; so `where` names no text."""

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        """Compare and set: how many were still in `expect` and moved. The partition's owner hears of it by Moved.
        What leaves the state dead has its tries counted afresh."""

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        """Compare and remove. The partition's owner hears of it by Moved."""


class Subscription(Protocol):
    """One member of a group. `receive` has one caller and runs beside settle, release and lag.

    Partitions named to release, pause and resume mean the ownership that receive has told of last.
    """

    async def receive(self, limit: int, max_bytes: int, wait_s: float) -> Sequence[Message]:
        """What happened, in the order it happened; empty after `wait_s` of silence.

        At most `limit` deliveries, and at most `max_bytes` of them but always one. Positions of a partition
        ascend within an epoch. Cancelling it loses nothing.
        """

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        """Record what is done. `aside` is durable before, or atomically with, the progress, and that before `gone`.

        Answers the partitions that were not ours any more: nothing took effect there. Idempotent.
        AsideError: nothing of this call was done. Any other error: call again with the same.
        """

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        """Give partitions up. `drained` False, or a close without release: the next owner is told `unclean`.

        Asked by Revoked, or unasked by a member that is about to leave: then they are not given back to it."""

    def troubles(self) -> Sequence[str]:
        """Why some of the group's events are not delivered, for those who watch; empty: nothing keeps them."""

    def sure_until(self) -> float:
        """The time up to which ownership of everything held is certain. Nobody else is given a partition before."""

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """No Delivery of these until resume, but for what a running receive already took. Ownership is kept."""

    async def resume(self, partitions: Sequence[Partition]) -> None: ...

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        """For every partition held."""

    async def close(self) -> None:
        """Leave the group. Idempotent; a blocked receive returns. Unsettled events come to the next owner."""


class Broker(Protocol):
    features: Features

    async def publish(self, events: Sequence[Event]) -> None:
        """Returns when every event is durably accepted.

        Per key, calls take effect in the order they entered this object. When an event is not accepted, no later
        event of its key is, in this call and in calls already entered; later calls are tried afresh.
        PublishError: names what was refused and what is unknown; everything else was accepted.
        """

    async def subscribe(
        self, topics: Sequence[str], *, group: str, member: str, ordering: Ordering, start: Start
    ) -> Subscription:
        """Join the group. `start` counts only where the group has no progress; a partition added later always
        starts at its beginning."""

    def aside(self, group: str) -> Aside: ...

    async def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        """What differs from the topology; with `apply`, what can be made so is made so."""

    async def groups(self, topic: str) -> Sequence[GroupInfo]: ...

    async def drop_group(self, topic: str, group: str) -> None:
        """Forget the group's progress and records. Refused with BrokerError while a member is alive."""

    async def close(self) -> None:
        """Idempotent. Subscriptions end; publishes that were entered are finished or refused, never forgotten."""
