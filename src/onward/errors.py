"""Every error that Onward raises.

OnwardError
├── ConfigError                 something was declared or set wrongly; nothing has been written
│   ├── UnknownScheme           no broker speaks this URL
│   ├── MissingExtra            the broker's client library is not installed
│   ├── BadSetting              a setting has no such name or no such value
│   ├── BadName                 a topic or group name that a broker would refuse
│   ├── BadHandler              a handler that cannot be called, or a second one for its topic and group
│   └── PartitionsDiffer        the topic is stored with another partition count
├── PayloadError                the event cannot be published; nothing has been written
│   ├── Unserialisable          the value has no bytes form
│   └── TooLarge                the value exceeds max_event_bytes
├── Undecodable                 a stored value does not fit the handler's annotation
├── BrokerError                 the broker failed, or its answer was lost
│   ├── BadStore                not our file, a damaged file, or one from a newer version
│   │   └── StoreLost           the file was deleted, replaced or overwritten while it was in use
│   ├── GroupDropped            the group was dropped while this member was away
│   ├── Closed                  the broker, subscription or application is closed
│   ├── PublishError            some events were refused, or it is unknown whether they were stored
│   │   ├── Backlogged          a limit is reached: max_backlog_bytes, or max_outgoing_bytes in this process
│   │   └── RelayFenced         a newer outbox relay publishes for this shard
│   └── AsideError              records could not be set aside; names the partitions in which nothing was done
├── NoSuchLetter                no dead letter has this id
├── AlertError                  an alert could not be handed over
├── Decision                    raised by a handler: what is to become of its event
│   ├── RetryLater              not now: again in so many seconds
│   ├── GiveUp                  never: to the dead letters at once
│   └── Skip                    nothing to do: it counts as handled
└── HandlerError                how a handler's run ended
    ├── HandlerTimeout          the handler ran longer than timeout_s
    ├── Expired                 the event's time was over before its turn came
    ├── RemoteError             the handler raised in a worker process; its error, told in text
    ├── Unfinished              nobody's failure: the event stays open and runs again, no attempt charged
    │   ├── Busy                another run of the same event holds the inbox
    │   ├── InDoubt             the answer to a commit was lost; the next run sees what became of it
    │   ├── Superseded          a newer owner of the partition has written; this run took no effect
    │   └── Unreachable         the inbox cannot be asked or told; it runs again when it may be back
    └── WorkerDied              the worker running the handler died
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
    "Undecodable",
    "Unfinished",
    "UnknownScheme",
    "Unreachable",
    "Unserialisable",
    "WorkerDied",
]


class OnwardError(Exception):
    """The root. Its text names the thing, the cause and the cure."""


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


class PartitionsDiffer(ConfigError):
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

    `refused`: certainly not accepted; publish them again in this order.
    `unknown`: the broker's answer was lost; publishing again may make duplicates.
    """

    def __init__(self, why: str, *, refused: Sequence[Event] = (), unknown: Sequence[Event] = ()) -> None:
        super().__init__(why)
        self.refused = tuple(refused)
        self.unknown = tuple(unknown)


class Backlogged(PublishError):
    pass


class RelayFenced(PublishError):
    pass


class AsideError(BrokerError):
    """A settle whose records could not all be stored.

    `partitions`: nothing was done there. `lost`: no longer ours, nothing was done there either. In all other
    partitions of the call the settle took effect.
    """

    def __init__(self, why: str, *, partitions: Sequence[Partition], lost: Sequence[Partition] = ()) -> None:
        super().__init__(why)
        self.partitions = tuple(partitions)
        self.lost = tuple(lost)


class NoSuchLetter(OnwardError):
    pass


class AlertError(OnwardError):
    pass


class Decision(OnwardError):
    """For handlers to raise. In a batch it is taken once the batch is split and the event stands alone."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)


class RetryLater(Decision):
    """Try this event again in `after_s` seconds. It counts as a failed attempt, so that retries end."""

    def __init__(self, after_s: float, reason: str = "") -> None:
        if not 0 <= after_s < float("inf"):
            raise ValueError(f"RetryLater({after_s}): seconds from now, 0 or more")
        super().__init__(reason or f"again in {after_s:g} s")
        self.after_s = float(after_s)


class GiveUp(Decision):
    """No further attempt would help: the event is a dead letter with this reason."""


class Skip(Decision):
    """There is nothing to do for this event: it counts as handled, and is counted as skipped."""


class HandlerError(OnwardError):
    pass


class HandlerTimeout(HandlerError):
    pass


class Expired(HandlerError):
    pass


class RemoteError(HandlerError):
    """What a handler raised in another process. The error itself stays there: not every error can be pickled. It also
    stands for an error that raises when it is looked at.

    `name` is its class, `kinds` that class and all its bases as module.name, `trace` the traceback's text.
    """

    def __init__(self, name: str, message: str, kinds: Sequence[str], trace: str) -> None:
        super().__init__(message)
        self.name = name
        self.kinds = frozenset(kinds)
        self.trace = trace

    def __repr__(self) -> str:
        return f"{self.name}({str(self)!r})"

    def is_a(self, kinds: Sequence[type[BaseException]]) -> bool:
        """`isinstance`, for the error that it tells of."""
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
    """Also of a class whose metaclass raises when it is asked."""
    return type.__dict__["__qualname__"].__get__(kind)  # type: ignore[no-any-return]


def kind_name(kind: type) -> str:
    """module.name of a class."""
    return f"{type.__dict__['__module__'].__get__(kind)}.{class_name(kind)}"
