"""Every error that Onward raises.

OnwardError
├── ConfigError                 a declaration or a setting is wrong; nothing has been written
│   ├── UnknownScheme           no broker has the scheme of this URL
│   ├── MissingExtra            the broker's client library is not installed
│   ├── BadSetting              there is no setting of this name, or it cannot have this value
│   ├── BadName                 brokers would refuse this topic or group name
│   ├── BadHandler              the handler cannot run as declared, or its topic and group already have a handler
│   └── TopologyDiffers         the broker has an object of the declared name that differs
│       └── PartitionsDiffer    the broker stores the topic with another partition count
├── PayloadError                the event cannot be published; nothing has been written
│   ├── Unserialisable          the value cannot be turned into bytes
│   └── TooLarge                the value exceeds max_event_bytes
├── Undecodable                 a stored value does not fit the handler's annotation
├── BrokerError                 the broker failed, or its answer was lost
│   ├── BadStore                the file is damaged, is not Onward's, or is from a newer version
│   │   └── StoreLost           the file was deleted, replaced or overwritten while it was in use
│   ├── GroupDropped            the group was dropped while this member was away
│   ├── Closed                  the broker, subscription or application is closed
│   ├── PublishError            some events were refused, or it is unknown whether they were stored
│   │   ├── Backlogged          a limit is reached: max_backlog_bytes, or max_outgoing_bytes in this process
│   │   └── RelayFenced         a newer outbox relay publishes for this shard
│   └── AsideError              records could not be stored aside; names the partitions in which nothing was done
├── OutboxError                 the outbox's database failed
│   ├── OutboxUnreachable       the database cannot be reached, or does not answer
│   └── BadOutbox               the outbox's tables are missing, of another version, or this user may not use them
├── NoSuchLetter                no dead letter has this id
├── AlertError                  an alert could not be delivered
├── Decision                    raised by a handler to decide what happens to its event
│   ├── RetryLater              try again in so many seconds
│   ├── GiveUp                  do not try again: the event becomes a dead letter at once
│   └── Skip                    there is nothing to do: the event counts as handled
└── HandlerError                how a handler's run ended
    ├── HandlerTimeout          the handler ran longer than timeout_s
    ├── Expired                 the event expired before its turn came
    ├── RemoteError             the handler raised in a worker process; carries that error as text
    ├── Unfinished              not a failure: the event stays open and runs again, no attempt is charged
    │   ├── Busy                another run of the same event has it claimed in the inbox
    │   ├── InDoubt             the answer to a commit was lost; the next run finds out whether it took effect
    │   ├── Superseded          a newer owner of the partition has written; this run took no effect
    │   └── Unreachable         the inbox cannot be reached; the event waits and runs again
    └── WorkerDied              the worker that ran the handler died
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onward.event import Event, Partition

__all__ = [
    "AlertError",
    "AsideError",
    "Backlogged",
    "BadHandler",
    "BadName",
    "BadOutbox",
    "BadSetting",
    "BadStore",
    "BrokerError",
    "Busy",
    "Closed",
    "ConfigError",
    "Decision",
    "Expired",
    "GiveUp",
    "GroupDropped",
    "HandlerError",
    "HandlerTimeout",
    "InDoubt",
    "MissingExtra",
    "NoSuchLetter",
    "OnwardError",
    "OutboxError",
    "OutboxUnreachable",
    "PartitionsDiffer",
    "PayloadError",
    "PublishError",
    "RelayFenced",
    "RemoteError",
    "RetryLater",
    "Skip",
    "StoreLost",
    "Superseded",
    "TooLarge",
    "TopologyDiffers",
    "Undecodable",
    "Unfinished",
    "UnknownScheme",
    "Unreachable",
    "Unserialisable",
    "WorkerDied",
]


class OnwardError(Exception):
    """The base of every error here. Its text names the thing, the cause and the cure."""


class ConfigError(OnwardError):
    pass


class UnknownScheme(ConfigError):
    pass


class MissingExtra(ConfigError):
    pass


class BadSetting(ConfigError):
    pass


class BadName(ConfigError):
    pass


class BadHandler(ConfigError):
    pass


class TopologyDiffers(ConfigError):
    pass


class PartitionsDiffer(TopologyDiffers):
    pass


class PayloadError(OnwardError):
    pass


class Unserialisable(PayloadError):
    pass


class TooLarge(PayloadError):
    pass


class Undecodable(OnwardError):
    pass


class BrokerError(OnwardError):
    pass


class BadStore(BrokerError):
    pass


class StoreLost(BadStore):
    pass


class GroupDropped(BrokerError):
    pass


class Closed(BrokerError):
    pass


class PublishError(BrokerError):
    """Every event of the call that is in neither list was accepted.

    `refused`: these were certainly not accepted. Publish them again in this order.
    `unknown`: the broker's answer for these was lost. Publishing them again may make duplicates.
    """

    def __init__(self, why: str, *, refused: Sequence[Event] = (), unknown: Sequence[Event] = ()) -> None:
        super().__init__(why)
        self.refused = tuple(refused)
        self.unknown = tuple(unknown)


class Backlogged(PublishError):
    pass


class RelayFenced(PublishError):
    """`seen`: the highest fence that the broker has seen for the shard."""

    def __init__(
        self, why: str, *, refused: Sequence[Event] = (), unknown: Sequence[Event] = (), seen: int = 0
    ) -> None:
        super().__init__(why, refused=refused, unknown=unknown)
        self.seen = seen


class AsideError(BrokerError):
    """Some records of a settle could not be stored.

    `partitions`: the settle did nothing in these. `lost`: they are no longer ours, and it did nothing there either. In
    all other partitions of the call it took effect.
    """

    def __init__(self, why: str, *, partitions: Sequence[Partition], lost: Sequence[Partition] = ()) -> None:
        super().__init__(why)
        self.partitions = tuple(partitions)
        self.lost = tuple(lost)


class OutboxError(OnwardError):
    pass


class OutboxUnreachable(OutboxError):
    pass


class BadOutbox(OutboxError):
    pass


class NoSuchLetter(OnwardError):
    pass


class AlertError(OnwardError):
    pass


class Decision(OnwardError):
    """For handlers to raise. A batch handler's decision counts only when the batch has been split down to one event."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)


class RetryLater(Decision):
    """Try this event again in `after_s` seconds. This counts as a failed attempt, so that retries end."""

    def __init__(self, after_s: float, reason: str = "") -> None:
        if not 0 <= after_s < float("inf"):
            raise ValueError(f"RetryLater({after_s}): give the seconds from now, 0 or more")
        super().__init__(reason or f"again in {after_s:g} s")
        self.after_s = float(after_s)


class GiveUp(Decision):
    """No further attempt would help: the event becomes a dead letter with this reason."""


class Skip(Decision):
    """There is nothing to do for this event. It counts as handled; a metric counts it as skipped."""


class HandlerError(OnwardError):
    pass


class HandlerTimeout(HandlerError):
    pass


class Expired(HandlerError):
    pass


class RemoteError(HandlerError):
    """Describes an error that a handler raised in another process. The error itself stays there, because not every
    error can be pickled. This class also replaces an error that raises when its text or class is read.

    `name` is the error's class, `kinds` that class and all its bases as module.name, `trace` the traceback's text.
    """

    def __init__(self, name: str, message: str, kinds: Sequence[str], trace: str) -> None:
        super().__init__(message)
        self.name = name
        self.kinds = frozenset(kinds)
        self.trace = trace

    def __repr__(self) -> str:
        return f"{self.name}({str(self)!r})"

    def is_a(self, kinds: Sequence[type[BaseException]]) -> bool:
        """`isinstance`, for the error that this one describes."""
        return any(kind_name(kind) in self.kinds for kind in kinds)


class Unfinished(HandlerError):
    pass


class Busy(Unfinished):
    pass


class InDoubt(Unfinished):
    pass


class Superseded(Unfinished):
    pass


class Unreachable(Unfinished):
    pass


class WorkerDied(HandlerError):
    pass


def class_name(kind: type) -> str:
    """The name of a class, also if its metaclass raises from `__qualname__`."""
    return type.__dict__["__qualname__"].__get__(kind)  # type: ignore[no-any-return]


def kind_name(kind: type) -> str:
    """module.name of a class."""
    return f"{type.__dict__['__module__'].__get__(kind)}.{class_name(kind)}"
