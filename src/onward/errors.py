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
│   ├── GroupDropped            the group was dropped while this member was away
│   ├── Closed                  the broker, subscription or application is closed
│   ├── PublishError            some events were refused, or their fate is unknown
│   │   └── Backlogged          the backlog is at max_backlog_bytes; consumers are behind
│   └── AsideError              a record could not be set aside; nothing of that settle was done
└── HandlerError                how a handler's run ended
    ├── HandlerTimeout          the handler ran longer than timeout_s
    └── WorkerDied              the worker running the handler died
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onward.event import Event

__all__ = [
    "AsideError",
    "Backlogged",
    "BadHandler",
    "BadName",
    "BadSetting",
    "BadStore",
    "BrokerError",
    "Closed",
    "ConfigError",
    "GroupDropped",
    "HandlerError",
    "HandlerTimeout",
    "MissingExtra",
    "OnwardError",
    "PartitionsDiffer",
    "PayloadError",
    "PublishError",
    "TooLarge",
    "Undecodable",
    "UnknownScheme",
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


class GroupDropped(BrokerError):
    pass


class Closed(BrokerError):
    pass


class PublishError(BrokerError):
    """Every event of the call that is named in neither list was accepted.

    `refused`: certainly not accepted; publish them again in this order.
    `unknown`: the broker's answer was lost; publishing again may make duplicates.
    """

    def __init__(self, why: str, *, refused: Sequence[Event] = (), unknown: Sequence[Event] = ()) -> None:
        super().__init__(why)
        self.refused = tuple(refused)
        self.unknown = tuple(unknown)


class Backlogged(PublishError):
    pass


class AsideError(BrokerError):
    pass


class HandlerError(OnwardError):
    pass


class HandlerTimeout(HandlerError):
    pass


class WorkerDied(HandlerError):
    pass
